"""The text of a task made from a change: a commit's subject in a user's words, or a release's new names."""

from pathlib import Path

import pytest

from etude.errors import DamagedError
from etude.taskgen.failures import SourceError
from etude.taskgen.history.changed_files import ChangedFiles
from etude.taskgen.history.progress import (
    PROGRESS_FILE,
    HistoryProgress,
    newest_tried,
    read_progress,
    write_progress,
)
from etude.taskgen.history.proposals import Proposal, prompt_of, propose
from etude.taskgen.history.records import RECORDS_FILE, read_records
from etude.taskgen.history.sources import Change, open_history
from etude.taskgen.projects import read_project
from etude.taskgen.verdicts import Rejection
from histories import COMMITS, FIXED, START, TEST_MEAN, TEST_TOTAL, WITH_MEAN, git, make_history

BEFORE = {**START, "tally/__init__.py": FIXED}
AFTER = {**START, "tally/__init__.py": WITH_MEAN, "tests/test_total.py": TEST_MEAN}
PROJECT = read_project(AFTER)


def change(subject: str) -> Change:
    return Change(before="a", after="b", subject=subject, day="2026-01-01")


@pytest.mark.parametrize(
    ("subject", "prompt"),
    [
        ("Fix rounding of negative numbers (#123)", "fix rounding of negative numbers"),
        ("feat(parser): accept trailing commas in lists.", "accept trailing commas in lists"),
        ("Handle empty input in mean, closes #7", "handle empty input in mean,"),
        ("Bump version to 1.2", ""),
        ("docs: say more about it all", ""),
        ("Merge branch 'main' of somewhere", ""),
        ("v1.2.3 is out now", ""),
        ("small fix", ""),
    ],
)
def test_a_subject_becomes_a_users_words(subject: str, prompt: str) -> None:
    assert prompt_of(subject) == prompt


def test_a_commit_is_one_proposal_with_a_size() -> None:
    proposals = propose(change("Add mean of numbers"), ChangedFiles(before=BEFORE, after=AFTER), PROJECT)
    assert isinstance(proposals, list)
    (proposal,) = proposals
    assert proposal == Proposal(prompt="add mean of numbers", template="tally:tally", lines=4)
    assert proposal.difficulty == "easy"


def test_a_release_is_a_proposal_for_each_new_name() -> None:
    documented = WITH_MEAN.replace(
        "(numbers):\n    return", '(numbers):\n    """Mean of ``numbers``. More."""\n    return'
    )
    files = ChangedFiles(before=BEFORE, after={**AFTER, "tally/__init__.py": documented})
    proposals = propose(change(""), files, PROJECT)
    assert isinstance(proposals, list)
    (proposal,) = proposals
    assert proposal.prompt == "add mean(numbers) to tally: mean of `numbers`"
    assert (proposal.template, proposal.path, proposal.name) == ("tally:tally:mean", "tally/__init__.py", "mean")
    moved = ChangedFiles(before={**BEFORE, "tally/old.py": WITH_MEAN}, after=files.after)
    assert propose(change(""), moved, PROJECT) is Rejection.VAGUE


def test_changes_without_source_or_tests_are_none() -> None:
    only_source = {**BEFORE, "tally/__init__.py": WITH_MEAN}
    assert (
        propose(change("Add the mean"), ChangedFiles(before=BEFORE, after=only_source), PROJECT) is Rejection.UNTESTED
    )
    only_tests = {**BEFORE, "tests/test_total.py": TEST_TOTAL}
    assert (
        propose(change("Test the total"), ChangedFiles(before=BEFORE, after=only_tests), PROJECT) is Rejection.UNTESTED
    )
    wide = {**AFTER, "tally/__init__.py": WITH_MEAN + "x = 1\n" * 700}
    assert propose(change("Add the mean"), ChangedFiles(before=BEFORE, after=wide), PROJECT) is Rejection.TOO_WIDE


def test_commits_are_read_newest_first_with_their_trees(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "tally")
    changes = open_history(str(repository)).changes(3)
    assert [each.subject for each in changes] == [subject for subject, _ in reversed(COMMITS)][:3]
    assert changes[0].before == changes[1].after
    tree = open_history(str(repository)).tree(changes[1].after, tmp_path / "tree")
    assert (tree / "tally" / "__init__.py").read_text() == WITH_MEAN
    assert not (tree / ".git").exists()
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(bare))
    assert open_history(str(bare)).changes(3) == changes


def test_changes_since_a_commit_are_those_behind_it(tmp_path: Path) -> None:
    history = open_history(str(make_history(tmp_path / "tally")))
    every = history.changes(None)
    assert history.changes(None, since=every[2].after) == every[:2]
    assert history.changes(1, since=every[2].after) == every[:1]
    assert history.changes(None, since=every[0].after) == []
    with pytest.raises(SourceError, match="no '12ab', at which the last build ended"):
        history.changes(None, since="12ab")


def test_a_change_that_a_sandbox_failed_is_tried_again() -> None:
    newest_first = [Change(before=str(n - 1), after=str(n), subject="", day="") for n in (3, 2, 1)]
    assert newest_tried(newest_first, []) == "3"
    assert newest_tried(newest_first, [newest_first[1]]) == "1"
    assert newest_tried(newest_first, [newest_first[2]]) == ""


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == {}
    progress = {"pypi:tally": HistoryProgress(newest="1.2", day="2026-02-03", base="slim", before="2026-01-01")}
    write_progress(tmp_path, progress)
    assert read_progress(tmp_path) == progress
    (tmp_path / PROGRESS_FILE).write_text('{"pypi:tally": {"last": "1.2"}}')
    with pytest.raises(DamagedError, match=r"histories\.json cannot be read"):
        read_progress(tmp_path)


def test_what_has_no_history_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no history here"):
        open_history(str(tmp_path))


def test_a_damaged_record_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / RECORDS_FILE).write_text('{"task_id": "a"}\n')
    with pytest.raises(DamagedError, match=r"records\.jsonl, line 1"):
        read_records(tmp_path)
