"""The catalogue of planted bugs: small slips of the kind that people make, one at a time.

    function ──operators──▶ edits ──compile, compare──▶ mutants

Owns the catalogue and what counts as a mutant: it compiles, and its syntax tree differs from the right one. That the
two behave differently only tests can say. Operators are those of mutation testing (DeMillo, Lipton, Sayward 1978)
beside ones taken from bugs in Python projects (Widyasari et al., BugsInPy, 2020).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etude.tasks.repositories import expression_bugs as inside
from etude.tasks.repositories import statement_bugs as around
from etude.tasks.repositories.expression_bugs import Operator
from etude.tasks.repositories.spans import Edit, Function, SourceText, apply, last_line

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "boundary": inside.boundary,
        "inverted_comparison": inside.inverted_comparison,
        "inverted_condition": inside.inverted_condition,
        "swapped_operands": inside.swapped_operands,
        "wrong_sign": inside.wrong_sign,
        "and_for_or": inside.and_for_or,
        "off_by_one": inside.off_by_one,
        "mutated_constant": inside.mutated_constant,
        "wrong_text": inside.wrong_text,
        "wrong_key": inside.wrong_key,
        "wrong_default": inside.wrong_default,
        "lost_copy": inside.lost_copy,
        "lost_cleaning": inside.lost_cleaning,
        "swapped_arguments": inside.swapped_arguments,
        "lost_keyword": inside.lost_keyword,
        "wrong_twin": inside.wrong_twin,
        "wrong_name": inside.wrong_name,
        "missing_await": inside.missing_await,
        "swapped_branches": inside.swapped_branches,
        "dropped_branch": around.dropped_branch,
        "dropped_statement": around.dropped_statement,
        "reordered_statements": around.reordered_statements,
        "missing_return": around.missing_return,
        "wrong_exception": around.wrong_exception,
        "break_for_continue": around.break_for_continue,
        "lost_accumulation": around.lost_accumulation,
        "early_return": around.early_return,
    }
)
"""Bugs that can be planted, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A file with one bug in it."""

    operator: str
    line: int
    """Position of the bug, in the text that was right."""
    edit: Edit
    """Text of the whole file."""


def mutants(source: SourceText, function: Function) -> Iterator[Mutant]:
    """Every bug of the catalogue that could be in ``function``, in the order of the catalogue; no two are equal."""
    first, last = source.line_start(function.line), source.line_start(last_line(function.node) + 1)
    right = _tree(source.text[first:last])
    seen = {right, None}
    for name, operator in OPERATORS.items():
        for edit in operator(source, function):
            edit_there = Edit(start=edit.start - first, end=edit.end - first, text=edit.text)
            wrong = _tree(apply(source.text[first:last], [edit_there]))
            if wrong not in seen:
                line = source.text.count("\n", first, edit.start) + function.line
                yield Mutant(operator=name, line=line, edit=edit)
                seen.add(wrong)


def _tree(function: str) -> str | None:
    """The code of a function's text, wherever it is indented to; ``None`` for what does not compile."""
    text = f"if 1:\n{function}" if function[:1] in " \t" else function
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return None
