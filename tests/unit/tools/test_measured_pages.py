"""The pages of the benches: committed results are of benches as they are, and all is said that was measured."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from bench.report import Goal
from measured_pages import RESULTS, measured_pages, module_of

FILES = sorted(RESULTS.glob("*.json"))


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return measured_pages()


def _declared(name: str) -> Iterator[Goal]:
    """The goals in the modules of a bench."""
    package = module_of(name).__name__.rpartition(".")[0]
    for module in [each for path, each in sys.modules.items() if path.startswith(package)]:
        yield from _goals_in([each for name, each in vars(module).items() if not name.startswith("__")])


def _goals_in(value: object) -> Iterator[Goal]:
    """A goal, or all in nested containers."""
    match value:
        case Goal():
            yield value
        case Mapping():
            yield from _goals_in(list(value.values()))
        case list() | tuple():
            for each in value:
                yield from _goals_in(each)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_goals_of_a_committed_result_are_those_of_its_bench(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["bench"] == file.stem and result["command"].startswith(f"python -m bench {file.stem}")
    declared = {(goal.name, goal.sense, goal.goal, goal.meaning) for goal in _declared(file.stem)}
    judged = {(name, each["sense"], each["goal"], each["meaning"]) for name, each in result["goals"].items()}
    assert judged and judged <= declared


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_has_command_machine_commit_goals_and_figures(file: Path, pages: Mapping[str, str]) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    page, index = pages[f"measured/{file.stem}.md"], pages["measured/index.md"]
    assert result["command"] in page and result["commit"] in page and result["machine"]["processor"] in page
    for goal in result["goals"].values():
        met = "| yes |" if goal["met"] else "| **no** |"
        assert any(goal["meaning"] in line and met in line for line in page.splitlines())
        assert any(goal["meaning"] in line and f"{met} [{file.stem}](" in line for line in index.splitlines())
    assert module_of(file.stem).table(result).strip() in page


def test_a_bench_without_a_result_is_listed_with_the_pages_that_quote_it(pages: Mapping[str, str]) -> None:
    index, names = pages["measured/index.md"], {file.stem for file in FILES}
    assert names <= BENCHES.keys()
    for name in BENCHES.keys() - names:
        assert f"| `{name}` |" in index
    if "weights" not in names:
        assert "[weights](../weights.md)" in index
