"""One jinja chat template, compiled and rendered the way Hugging Face's checkpoints expect it.

Owns the environment: settings, filters and globals as ``apply_chat_template`` has them, in jinja's sandbox, for a
template is code from a download. Text in, text out; tokens are :mod:`etude.tokens.jinja`'s business.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import DamagedError
from etude.types import Json

Now: TypeAlias = Callable[[], datetime]
"""Says what day it is; asked once per rendering."""

FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template may raise, on purpose or by a conversation it did not expect."""


class Template:
    """Renders conversations. ``variables`` are the special tokens by their role, e.g. ``bos_token``.

    Raises :class:`~etude.errors.DamagedError` for a source that does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], now: Now) -> None:
        self.source = source
        """What it was compiled from."""
        self._variables = dict(variables)
        self._now = now
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DamagedError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, opening: bool) -> str:
        """The text of a conversation; with ``opening`` also of the beginning of the next reply.

        Raises ``ValueError`` with the template's own words for a conversation that it does not take.
        """
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opening,
                strftime_now=self._now().strftime,
            )
        except FAULTS as error:
            raise ValueError(f"the model's chat template does not take this conversation: {error}") from error


class _Generation(Extension):
    """``{% generation %}`` marks for trainers what an assistant said; here it is only a scope."""

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
    """JSON as it is; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
