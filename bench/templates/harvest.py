"""vLLM's tests of its tool parsers, read as data: what a model writes, and the calls that are in it.

A case is a row of ``pytest.mark.parametrize`` with a column ``model_output`` and one of expected calls. The tests are
never run or imported: their syntax trees are evaluated as far as they are literals, sums of literals, names for them,
``json.dumps`` of them, and the nouns of calls. A row that needs more is left out. Owns the reading alone.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from etude.types import Json

Definitions: TypeAlias = dict[str, ast.expr]
"""Names of a module → their values; functions that only return something are lambdas."""
CALL_FIELDS = ("function", "name", "arguments")
"""Fields by which calls are compared."""
EXPECTED = ("expected_tool_calls", "expected")
"""Columns of expected calls."""


@dataclass(frozen=True, slots=True)
class Case:
    """One text, and its calls as (name, arguments)."""

    text: str
    calls: tuple[tuple[str, Json], ...]


def harvest(source: str) -> list[Case]:
    """The cases of a test file, each text once."""
    tree = ast.parse(source)
    definitions: Definitions = {}
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], value):
                definitions[name] = value
            case ast.AugAssign(ast.Name(name)):
                definitions.pop(name, None)
            case ast.FunctionDef(name, arguments, [ast.Return(ast.expr() as value)]):
                definitions[name] = ast.Lambda(arguments, value)
    cases: dict[str, Case] = {}
    for names, row in _rows(tree, definitions):
        fields = dict(zip(names, row, strict=False))
        calls = next((fields[name] for name in EXPECTED if name in fields), None)
        if "model_output" not in fields or calls is None:
            continue
        try:
            text, result = evaluate(fields["model_output"], definitions), evaluate(calls, definitions)
            pairs = tuple(_pair(call) for call in (result if isinstance(result, list) else [result]))
        except ValueError:
            continue
        if isinstance(text, str):
            cases.setdefault(text, Case(text, pairs))
    return list(cases.values())


def evaluate(node: ast.expr, definitions: Definitions) -> Json:
    """The value of an expression. Raises ``ValueError`` for one that is not plain."""
    match node:
        case ast.Name(name) if name in definitions:
            return evaluate(definitions[name], definitions)
        case ast.List(items) | ast.Tuple(items):
            return [evaluate(item, definitions) for item in items]
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return {
                str(evaluate(key, definitions)): evaluate(value, definitions) for key, value in pairs if key is not None
            }
        case ast.BinOp(left, ast.Add(), right):
            return str(evaluate(left, definitions)) + str(evaluate(right, definitions))
        case ast.JoinedStr(parts):
            return "".join(str(evaluate(part, definitions)) for part in parts)
        case ast.FormattedValue(value):
            return evaluate(value, definitions)
        case ast.Call(ast.Name(name), values, []) if isinstance(function := definitions.get(name), ast.Lambda):
            given = [ast.parse(repr(evaluate(value, definitions)), mode="eval").body for value in values]
            names = [parameter.arg for parameter in function.args.args]
            return evaluate(function.body, {**definitions, **dict(zip(names, given, strict=False))})
        case ast.Call(ast.Attribute(ast.Name("json"), "dumps"), [value, *_]):
            return json.dumps(evaluate(value, definitions))
        case ast.Call(ast.Name("FunctionCall" | "ToolCall" | "MistralToolCall"), [], fields):
            call = {field.arg or "": evaluate(field.value, definitions) for field in fields if field.arg in CALL_FIELDS}
            return call.get("function", call)
    literal: Json = ast.literal_eval(node)
    return literal


def _pair(call: Json) -> tuple[str, Json]:
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), str):
        raise ValueError(f"{call!r} is no call")
    return str(call.get("name")), json.loads(str(call["arguments"]))


def _rows(tree: ast.Module, definitions: Definitions) -> Iterator[tuple[list[str], list[ast.expr]]]:
    """Every row of every parametrisation, with the names of its columns."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "parametrize"), [names, rows, *_]):
                pass
            case ast.Call(
                ast.Attribute(_, "parametrize"), [], [ast.keyword("argnames", names), ast.keyword(_, rows), *_]
            ):
                pass
            case _:
                continue
        try:
            columns = evaluate(names, definitions)
        except ValueError:
            continue
        listed = columns.split(",") if isinstance(columns, str) else columns
        if not isinstance(listed, list):
            continue
        rows = definitions.get(rows.id, rows) if isinstance(rows, ast.Name) else rows
        for row in rows.elts if isinstance(rows, ast.List) else []:
            match row:
                case ast.Tuple(values) | ast.Call(ast.Attribute(_, "param"), values):
                    yield [str(name).strip() for name in listed], list(values)
