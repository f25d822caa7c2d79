"""Every planted bug compiles, changes the program, and is inside of its function."""

import ast
import textwrap

import pytest

from etude.tasks.repositories.mutations import OPERATORS, mutants
from etude.tasks.repositories.spans import SourceText, apply

EXAMPLES: dict[str, tuple[str, str]] = {
    "boundary": ("if a < b: return 1", "a <= b"),
    "inverted_comparison": ("return a is None", "a is not None"),
    "inverted_condition": ("if f(a): return 1", "if not (f(a))"),
    "swapped_operands": ("return a - b", "b - a"),
    "wrong_sign": ("return (a) + (b)", "(a) - (b)"),
    "and_for_or": ("return f(a) and f(b)", "f(a) or f(b)"),
    "off_by_one": ("return a[len(b):3]", "a[len(b):4]"),
    "mutated_constant": ("return 7", "return 8"),
    "wrong_text": ("return 'abc'", "'ab'"),
    "wrong_key": ("return a['x'] + a['y']", "a['y'] + a['y']"),
    "wrong_default": ("return c", "c=2"),
    "lost_copy": ("return list(a)", "return a"),
    "lost_cleaning": ("return a.strip()", "return a"),
    "swapped_arguments": ("return f(a, b)", "f(b, a)"),
    "lost_keyword": ("return f(a, key=b)", "f(a)"),
    "wrong_twin": ("return min(a)", "max(a)"),
    "wrong_name": ("return a", "return b"),
    "missing_await": ("return await f(a)", "return f(a)"),
    "swapped_branches": ("return a if c else b", "b if c else a"),
    "dropped_branch": ("if a:\n    f(a)\nreturn 2", "\n    return 2"),
    "dropped_statement": ("a.append(1)\nreturn a", "return a"),
    "reordered_statements": ("x = f(a)\nx = x + 1\nreturn x", "x = x + 1\n    x = f(a)"),
    "missing_return": ("return f(a)", "    f(a)"),
    "wrong_exception": ("raise ValueError(a)", "TypeError(a)"),
    "break_for_continue": ("for x in a:\n    break\nreturn x", "continue"),
    "lost_accumulation": ("c += a\nreturn c", "c = a"),
    "early_return": ("for x in a:\n    c += x\nreturn c", "        return c"),
}


def program(body: str) -> SourceText:
    indented = textwrap.indent(body, "    ")
    return SourceText("m.py", f"def f(x): return x\n\nasync def g(a, b, c=1):\n{indented}\n")


def test_the_catalogue_is_large_and_every_operator_has_an_example() -> None:
    assert len(OPERATORS) >= 12
    assert EXAMPLES.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_operator_plants_its_bug(name: str) -> None:
    body, expected = EXAMPLES[name]
    source = program(body)
    function = list(source.functions())[1]
    texts = [apply(source.text, [edit]) for edit in OPERATORS[name](source, function)]
    assert any(expected in text for text in texts), texts


@pytest.mark.parametrize("name", EXAMPLES)
def test_mutants_compile_and_differ_and_stay_inside(name: str) -> None:
    source = program(EXAMPLES[name][0])
    function = list(source.functions())[1]
    head = source.text[: source.line_start(function.line)]
    mutated = [(mutant, apply(source.text, [mutant.edit])) for mutant in mutants(source, function)]
    dumps = [ast.dump(ast.parse(text)) for _, text in mutated]
    assert mutated
    assert len({*dumps, ast.dump(source.tree)}) == len(dumps) + 1
    assert all(text.startswith(head) for _, text in mutated)
    assert all(mutant.line >= function.line for mutant, _ in mutated)


def test_a_bug_in_a_method_keeps_the_indentation() -> None:
    source = SourceText(
        "m.py", "class C:\n    def m(self, a):\n        if a > 1:\n            return 'ä'\n        return 2\n"
    )
    (function,) = source.functions()
    texts = {mutant.operator: apply(source.text, [mutant.edit]) for mutant in mutants(source, function)}
    assert "        if a >= 1:\n" in texts["boundary"]
    assert all(ast.parse(text) for text in texts.values())
