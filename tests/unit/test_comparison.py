"""The page that compares manuals has étude's own figures as they are: its words and the cost that it quotes."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TUTORIALS = REPOSITORY / "docs" / "tutorials"
COMPARISON = (REPOSITORY / "docs" / "comparison.md").read_text(encoding="utf-8")
COUNTED = {
    r"\(a\).*?2, 1, ([\d,]+)": ("your tasks", "your-tasks.md", "# Your tasks", "etude run units.toml"),
    r"five files each: ([\d,]+)": ("your tasks", "your-tasks.md", "# Your tasks", "etude run files.toml"),
    r"\(b\).*?2, 1, ([\d,]+)": ("your agent", "your-agent.md", "# Your agent", "before anything is trained."),
    r"\(c\).*?2, 1, ([\d,]+)": ("how many GPUs, at what cost", "your-model.md", "## How many", "key to change"),
}
"""For each count of the page: the README's link, the page it leads to, and where the answer begins and ends there."""


def words_between(page: str, start: str, end: str) -> int:
    return len(page[page.index(start) : page.index(end) + len(end)].split())


@pytest.mark.parametrize("count", COUNTED)
def test_the_words_that_lead_to_an_answer_are_as_many_as_the_page_says(count: str) -> None:
    link, name, start, end = COUNTED[count]
    written = int(re.findall(count, COMPARISON)[0].replace(",", ""))
    page = (TUTORIALS / name).read_text(encoding="utf-8")
    to_the_link = words_between(README, "# étude", f"[{link}]")
    assert to_the_link + words_between(page, start, end) == pytest.approx(written, rel=0.05)


def test_the_cost_of_a_30b_mixture_is_that_of_the_tutorial() -> None:
    tutorial = (TUTORIALS / "your-model.md").read_text(encoding="utf-8")
    costs = re.findall(r"`recipes/gpu-30b-a3b` .*?\| ([\d.]+) min, \$([\d.]+)", tutorial)
    assert re.findall(r"([\d.]+) minutes and \$([\d.]+) a step", COMPARISON) == costs
