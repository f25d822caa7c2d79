"""Retired tasks and the reasons, and tasks that are found in training texts."""

from pathlib import Path

import pytest

from etude.taskgen.history.contamination import WORDS, find_traces
from etude.taskgen.history.retirement import MIN_TRIES, difficulty_of, gather_tries, reason_to_retire

TEXT = " ".join(f"word{index}" for index in range(2 * WORDS))


@pytest.mark.parametrize(
    ("passed", "share", "reason", "difficulty"),
    [
        ([True] * MIN_TRIES, 0.0, "solved always: 4 of 4 tries", "easy"),
        ([False] * MIN_TRIES, 0.0, "solved never: 0 of 4 tries", "hard"),
        ([True, False, True, False], 0.0, "", "medium"),
        ([True] * (MIN_TRIES - 1), 0.0, "", "by size"),
        ([], 0.0, "", "by size"),
        ([True, False] * 2, 0.5, "leaked: 50% of its words in a row stand in the training text", "medium"),
    ],
)
def test_a_task_is_judged_by_enough_tries(passed: list[bool], share: float, reason: str, difficulty: str) -> None:
    record = gather_tries({"a": passed}).get("a")
    assert reason_to_retire(record, share, 0.2) == reason
    assert difficulty_of(record, "by size") == difficulty


def test_words_in_a_row_are_found_in_the_text_that_has_most_of_them(tmp_path: Path) -> None:
    (tmp_path / "half.txt").write_text(" ".join(TEXT.split()[: WORDS + 2]))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "most.txt").write_text(TEXT.upper().replace(" ", ",\n"))
    (tmp_path / "other.txt").write_text(" ".join(reversed(TEXT.split())))
    traces = find_traces({"copied": TEXT, "fresh": TEXT.replace("word", "term")}, "", tmp_path)
    (match,) = traces.tasks
    assert (match.task_id, match.share, match.file) == ("copied", 1.0, "deep/most.txt")
    assert traces.files == 3


def test_fewer_words_than_a_run_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(TEXT.split()[: WORDS - 1]))
    assert find_traces({"a": TEXT}, "", tmp_path).tasks == ()


def test_a_canary_is_found(tmp_path: Path) -> None:
    (tmp_path / "crawl.txt").write_text("… etude-canary-1 …")
    (tmp_path / "clean.txt").write_text("etude canary 1")
    assert find_traces({}, "etude-canary-1", tmp_path).canary_in == ("crawl.txt",)
