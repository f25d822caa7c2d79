"""One jinja chat template, compiled and rendered as Hugging Face checkpoints expect.

Owns the environment: settings, filters and globals of ``apply_chat_template``, in jinja's sandbox because a template is
downloaded code. It can read only its inputs, and one rendering has a budget of steps: an endless loop raises an error
instead of blocking the caller. Text in, text out; :mod:`etude.tokens.jinja` owns tokens.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeAlias, final

from jinja2 import TemplateError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import DamagedError
from etude.tokens.messages import NO_KWARGS, TemplateKwargs
from etude.types import Json

Now: TypeAlias = Callable[[], datetime]
"""Returns the current date; called once per rendering."""

MAX_STEPS = 2_000_000
"""Limit of steps of one rendering, one per item of a loop or range. It takes a second or two; a template that compares
all pairs of messages reaches it at about a thousand messages.
"""
STEP_CHARACTERS, STEP_ITEMS = 256, 16
"""Characters of a text, and items of a list, that count as one step when an operator makes them."""
CALL_STEPS = 20
"""Cost of a call, in iterations of a loop."""
MAX_BITS = 4096
"""Size of the largest number that a template computes: products of larger ones take time beyond any count of steps."""
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields of ``tokenizer_config.json`` that are template variables."""
GIVEN = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", *SPECIAL_ROLES})
"""Variables that every rendering sets; a caller may not set them."""
FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, NameError, RecursionError, TypeError, ValueError)
"""Errors that a template may raise, on purpose or because of an unexpected conversation."""


class JinjaTemplate:
    """Renders conversations. ``variables`` are the special tokens by their role, e.g. ``bos_token``.

    Raises :class:`~etude.errors.DamagedError` for a source that does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], now: Now) -> None:
        self.source = source
        """The source it was compiled from."""
        self._variables = dict(variables)
        self._now = now
        environment = _Environment()
        try:
            reads = _variables_of(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DamagedError(f"the chat template does not compile: {error}") from error
        self.reads = reads - GIVEN - environment.globals.keys()
        """Further variables that the template reads, e.g. ``enable_thinking``: a caller may set them."""

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        kwargs: TemplateKwargs = NO_KWARGS,
        *,
        opening: bool,
    ) -> str:
        """The text of a conversation; with ``opening`` also the beginning of the next reply.

        ``kwargs`` are further variables, from :attr:`reads`. Raises ``ValueError`` with the template's message for a
        conversation that it rejects, and after ``MAX_STEPS`` steps.
        """
        steps = _steps.set(MAX_STEPS)
        try:
            return self._template.render(
                {"documents": None}
                | dict(kwargs)
                | self._variables
                | {
                    "messages": list(messages),
                    "tools": list(tools) or None,
                    "add_generation_prompt": opening,
                    "strftime_now": self._now().strftime,
                }
            )
        except FAULTS as error:
            raise ValueError(f"the model's chat template does not take this conversation: {error}") from error
        finally:
            _steps.reset(steps)


def _variables_of(tree: nodes.Template) -> frozenset[str]:
    """The variables that a template takes from outside: those that it reads but does not set, or tests for presence."""
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    optional = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    return frozenset(meta.find_undeclared_variables(tree)) - (names - optional)


_steps: ContextVar[int] = ContextVar("steps", default=MAX_STEPS)
"""Steps that the rendering in progress may still take."""


def _spend(steps: int) -> None:
    left = _steps.get() - steps
    if left < 0:
        raise TemplateError(f"it takes more than {MAX_STEPS:,} steps: it loops, or the conversation is too long for it")
    _steps.set(left)


class _Generator(CodeGenerator):
    """Routes all loops and ``~`` through methods of the environment."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja's name
        """A loop over counted items."""
        assert isinstance(node.iter, nodes.Expr)
        node.iter = self._through("counted", node.iter)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja's name
        """Texts put together."""
        self.visit(self._through("joined", nodes.List(node.nodes, lineno=node.lineno)), frame)

    def _through(self, method: str, argument: nodes.Expr) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None, lineno=argument.lineno)
        call.set_environment(self.environment)
        return call


@final
class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as ``apply_chat_template`` configures it, with a count of loops, calls and growing values."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["range"] = _range
        del self.globals["lipsum"]  # generates text of unlimited length

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, one step each."""
        for item in iterable:
            _spend(1)
            yield item

    def joined(self, parts: Iterable[Any]) -> str:
        """Put texts together, as ``~`` does."""
        texts = [str(part) for part in parts]
        _spend(sum(map(len, texts)) // STEP_CHARACTERS)
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja has it
        """Count a call, which may be recursive."""
        _spend(CALL_STEPS)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count the result of an operator by its size, before computing it."""
        _spend(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Steps for the result of an operator. Raises ``TemplateError`` for a number that is too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateError(f"it computes a number of more than {MAX_BITS} bits")
        return 0
    sides = [side for side in (left, right) if isinstance(side, str | list | tuple)]
    times = max([0, *(side for side in (left, right) if isinstance(side, int))]) if operator == "*" else 1
    return sum(times * len(side) // (STEP_CHARACTERS if isinstance(side, str) else STEP_ITEMS) for side in sides)


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's text for trainers; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*bounds: int) -> range:
    """Python's ``range``, counted when it is created because filters consume it without a loop."""
    numbers = range(*bounds)
    _spend(len(numbers))
    return numbers


def _raise(message: str) -> None:
    raise TemplateError(message)
