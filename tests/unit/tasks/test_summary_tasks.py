"""Functions of the standard library, to be described in one line."""

import ast
from random import Random

import pytest

from etude.tasks.summaries import SummariesFamily, SummaryDemonstrations, functions_of, is_heldout
from etude.types import AnswerChecks, Split


@pytest.fixture(scope="module")
def family() -> SummariesFamily:
    return SummariesFamily(heldout_every=6)


def test_a_task_is_real_code_and_the_line_that_tells_it(family: SummariesFamily) -> None:
    for split in Split:
        for index in range(50):
            task = family.task(split, index)
            request, _, code = task.prompt.partition("\n")
            (function,) = ast.parse(code).body
            assert isinstance(function, ast.FunctionDef)
            assert isinstance(task.checks, AnswerChecks)
            assert task.checks.answer.startswith(f"{function.name} returns ")
            assert code.endswith(f"return {task.checks.answer.split(' returns ', 1)[1]}")
            assert request == "sum up"
            assert ast.get_docstring(function) is None


def test_modules_are_on_one_side_each(family: SummariesFamily) -> None:
    seen = {split: {family.task(split, index).template for index in range(family.size(split) or 0)} for split in Split}
    assert not seen[Split.TRAIN] & seen[Split.HELDOUT]
    assert all(is_heldout(module, 6) for module in seen[Split.HELDOUT])
    assert len(seen[Split.TRAIN]) > 40
    assert len(seen[Split.HELDOUT]) > 5


def test_tasks_are_so_many_and_none_comes_twice(family: SummariesFamily) -> None:
    for split in Split:
        size = family.size(split)
        assert size is not None and size > 100
        assert len({family.task(split, index).prompt for index in range(size)}) == size
        assert family.task(split, 7) == SummariesFamily(heldout_every=6).task(split, 7)


def test_only_short_functions_with_one_return_at_their_end_are_taken() -> None:
    source = (
        'def good(a):\n    """Said."""\n    # why\n    b = a\n    return b + 1\n'
        "def two(a):\n    if a:\n        return 1\n    return 2\n"
        "def inner(a):\n    def f():\n        pass\n    return f\n"
        "def none(a):\n    return\n"
        "@staticmethod\ndef marked(a):\n    return a\n"
        "def long_winded(a):\n    return 'a rather long expression indeed'\n"
        "class C:\n    def method(self):\n        return self.a\n"
    )
    functions = {function.name: function for function in functions_of("m", source)}
    assert sorted(functions) == ["good", "method"]
    assert functions["good"].text == "def good(a):\n    b = a\n    return b + 1"
    assert functions["method"].text == "def method(self):\n    return self.a"
    assert functions["good"].line == "good returns b + 1"


def test_the_imperfect_agent_mostly_writes_badly_and_sometimes_well(family: SummariesFamily) -> None:
    demonstrations = SummaryDemonstrations(family, Split.TRAIN)
    output = [demonstrations.session(Random(number))[1].content for number in range(200)]
    assert all(line.startswith("answer ") for line in output)
    well = sum(line.split()[2] == "returns" and line[-1] != "!" and "think" not in line for line in output)
    assert 20 < well < 110
    assert demonstrations.session(Random(1)) == demonstrations.session(Random(1))


def test_what_is_practised_cannot_be_known_by_heart(family: SummariesFamily) -> None:
    demonstrations = SummaryDemonstrations(family, Split.TRAIN)
    lines = set()
    for number in range(200):
        text, _, line = demonstrations.code(Random(number)).rpartition("\n# ")
        name, returned = line.split(" returns ", 1)
        assert text.startswith(f"def {name}(")
        assert text.endswith(f"return {returned}")
        lines.add(line)
    assert len(lines) > 190
