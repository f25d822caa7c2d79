"""One ledger, one process: what each call promises."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from etude.errors import RunFolderError
from etude.ledger.ledger import TRAIN, Ledger
from etude.types import Case, Finish, FunctionChecks, Rollout, RolloutStatus, Split, Task, Turn


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.db") as opened:
        yield opened


def task(name: str, split: Split = Split.TRAIN) -> Task:
    checks = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(1,), expected=2),))
    return Task(task_id=name, family="fake", template="t", split=split, prompt="", files={}, checks=checks)


def rollout(group: int, slot: int, attempt: int = 0, reward: float | None = 1.0, name: str = "") -> Rollout:
    one = np.ones(1, np.int32)
    turn = Turn(prompt_ids=one, completion_ids=one, logprobs=-one.astype(np.float32), versions=one, finish=Finish.STOP)
    return Rollout(
        rollout_id=name or f"{group}.{slot}.{attempt}",
        group_index=group,
        slot=slot,
        attempt=attempt,
        status=RolloutStatus.FAILED_INFRA if reward is None else RolloutStatus.GRADED,
        reward=reward,
        turns=(turn,),
    )


def fill(ledger: Ledger, name: str, size: int = 2) -> int:
    index = ledger.admit_group(task(name), TRAIN, size, 0)
    assert index is not None
    for slot in range(size):
        ledger.record(rollout(index, slot, reward=float(slot)), TRAIN)
    return index


def test_groups_are_numbered_by_purpose_in_admission_order(ledger: Ledger) -> None:
    admitted = [ledger.admit_group(task(name), purpose, 1, 0) for name, purpose in
                [("a", TRAIN), ("b", TRAIN), ("a", "before"), ("b", "before")]]  # fmt: skip
    assert admitted == [0, 1, 0, 1]


def test_a_prompt_is_trained_once_but_evaluated_as_often_as_one_likes(ledger: Ledger) -> None:
    assert ledger.admit_group(task("a"), TRAIN, 2, 0) == 0
    assert ledger.admit_group(task("a"), TRAIN, 2, 0) is None
    ledger.drop_group(TRAIN, 0, "infra")
    assert ledger.admit_group(task("a"), TRAIN, 2, 0) is None
    assert ledger.admit_group(task("a"), "before", 1, 0) == 0
    assert ledger.admit_group(task("a"), "before", 1, 0) == 1


def test_a_held_out_task_is_refused_for_training(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="nothing held out is ever trained on"):
        ledger.admit_group(task("a", Split.HELDOUT), TRAIN, 2, 0)
    assert ledger.admit_group(task("a", Split.HELDOUT), "before", 1, 0) == 0


def test_the_last_graded_slot_makes_a_group_ready(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 2, 5)
    assert ledger.record(rollout(0, 1), TRAIN) is None
    assert ledger.progress().ready == 0
    assert ledger.record(rollout(0, 0), TRAIN) is None
    assert ledger.progress().ready == 1
    group = ledger.group(TRAIN, 0)
    assert group.admitted_version == 5
    assert [done.slot for done in group.rollouts] == [0, 1]


def test_an_infrastructure_failure_leaves_the_slot_open_for_the_next_attempt(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 2, 0)
    assert ledger.record(rollout(0, 0, reward=None), TRAIN) == 1
    assert ledger.record(rollout(0, 1), TRAIN) is None
    assert ledger.record(rollout(0, 0, attempt=1, reward=None), TRAIN) == 2
    (left,) = ledger.open_slots(TRAIN)
    assert (left.task, left.group_index, left.slot, left.attempt) == (task("a"), 0, 0, 2)
    assert ledger.record(rollout(0, 0, attempt=2), TRAIN) is None
    assert ledger.open_slots(TRAIN) == []
    assert ledger.rollout_counts(TRAIN) == {"graded": 2, "failed_infra": 2, "dropped": 0}
    assert [done.rollout_id for done in ledger.group(TRAIN, 0).rollouts] == ["0.0.2", "0.1.0"]


def test_recording_a_rollout_again_changes_nothing(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 2, 0)
    assert [ledger.record(rollout(0, 0, reward=None), TRAIN) for _ in range(2)] == [1, 1]
    assert [ledger.record(rollout(0, 1, reward=0.5), TRAIN) for _ in range(2)] == [None, None]
    assert ledger.rollout_counts(TRAIN) == {"graded": 1, "failed_infra": 1, "dropped": 0}


@pytest.mark.parametrize(
    ("misfit", "why"),
    [
        (rollout(0, 0, name="other"), "that slot is graded"),
        (rollout(0, 2), "beyond the group's 2 slots"),
        (rollout(0, 1, attempt=1), "attempt 0 is due"),
        (rollout(7, 0), "no group 7"),
        (
            Rollout(rollout_id="x", group_index=0, slot=1, attempt=0, status=RolloutStatus.DROPPED, reward=None),
            "drop the group first",
        ),
    ],
)
def test_a_rollout_that_fits_nowhere_is_refused(ledger: Ledger, misfit: Rollout, why: str) -> None:
    ledger.admit_group(task("a"), TRAIN, 2, 0)
    ledger.record(rollout(0, 0), TRAIN)
    with pytest.raises(ValueError, match=why):
        ledger.record(misfit, TRAIN)
    assert ledger.rollout_counts(TRAIN)[RolloutStatus.GRADED] == 1


def test_a_batch_waits_for_the_oldest_group_even_if_newer_ones_are_ready(ledger: Ledger) -> None:
    ledger.admit_group(task("slow"), TRAIN, 1, 0)
    fill(ledger, "fast"), fill(ledger, "faster")
    assert ledger.claim_batch(1, 2) is None
    ledger.record(rollout(0, 0), TRAIN)
    assert [group.index for group in ledger.claim_batch(1, 2) or []] == [0, 1]


def test_a_dropped_group_is_skipped_and_counted(ledger: Ledger) -> None:
    fill(ledger, "a")
    ledger.admit_group(task("b"), TRAIN, 2, 0)
    fill(ledger, "c")
    ledger.drop_group(TRAIN, 1, "infra: out of attempts")
    assert [group.index for group in ledger.claim_batch(1, 2) or []] == [0, 2]
    progress = ledger.progress()
    assert (progress.admitted, progress.kept, progress.dropped, progress.claimed) == (3, 2, 1, 2)
    with pytest.raises(ValueError, match="no move from dropped to dropped"):
        ledger.drop_group(TRAIN, 1, "again")


def test_a_claimed_step_gets_the_same_groups_after_a_restart(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, "a"), fill(ledger, "b")
    first = ledger.claim_batch(1, 1)
    assert first
    with Ledger.open(tmp_path / "ledger.db") as another_process:
        again = another_process.claim_batch(1, 1)
    assert again
    assert [group.index for group in again] == [group.index for group in first] == [0]


def test_steps_follow_each_other_and_each_commits_once(ledger: Ledger) -> None:
    fill(ledger, "a"), fill(ledger, "b")
    with pytest.raises(ValueError, match="has not claimed a batch"):
        ledger.commit_step(1)
    with pytest.raises(ValueError, match="step 1 is next"):
        ledger.claim_batch(2, 1)
    assert ledger.claim_batch(1, 1)
    with pytest.raises(ValueError, match="step 2 is next"):
        ledger.claim_batch(3, 1)
    ledger.commit_step(1)
    with pytest.raises(ValueError, match="no move from done to done"):
        ledger.commit_step(1)
    with pytest.raises(ValueError, match="step 2 is next"):
        ledger.claim_batch(1, 1)
    progress = ledger.progress()
    assert (progress.steps_done, progress.consumed, progress.ready) == (1, 1, 1)


def test_a_step_may_claim_while_the_one_before_is_published_and_not_earlier(ledger: Ledger, tmp_path: Path) -> None:
    for name in "abcd":
        fill(ledger, name)
    first, second = ledger.claim_batch(1, 1), ledger.claim_batch(2, 1)
    assert [[group.index for group in batch or []] for batch in (first, second)] == [[0], [1]]
    with pytest.raises(ValueError, match="step 3 cannot claim a batch: step 1 is not committed"):
        ledger.claim_batch(3, 1)
    progress = ledger.progress()
    assert (progress.steps_done, progress.claimed, progress.ready) == (0, 2, 2)
    with Ledger.open(tmp_path / "ledger.db") as another_process:
        again = [another_process.claim_batch(step, 1) for step in (1, 2)]
    assert [[group.index for group in batch or []] for batch in again] == [[0], [1]]
    ledger.commit_step(1)
    assert [group.index for group in ledger.claim_batch(3, 1) or []] == [2]
    with pytest.raises(ValueError, match="step 4 cannot claim a batch: step 2 is not committed"):
        ledger.claim_batch(4, 1)
    ledger.commit_step(2)
    ledger.commit_step(3)
    assert ledger.claim_batch(4, 1)
    progress = ledger.progress()
    assert (progress.steps_done, progress.consumed, progress.claimed) == (3, 3, 1)


def test_a_step_that_finds_no_batch_yet_claims_nothing(ledger: Ledger) -> None:
    fill(ledger, "a")
    assert ledger.claim_batch(1, 1)
    assert ledger.claim_batch(2, 1) is None
    with pytest.raises(ValueError, match="step 2 is next"):
        ledger.claim_batch(3, 1)
    ledger.commit_step(1)
    fill(ledger, "b")
    assert ledger.claim_batch(2, 1)


def test_rewards_are_in_order_of_groups_not_of_ends(ledger: Ledger) -> None:
    for name in "abc":
        ledger.admit_group(task(name), "before", 1, 0)
    for index in (2, 0, 1):
        ledger.record(rollout(index, 0, reward=index / 2), "before")
    assert ledger.rewards("before") == [0.0, 0.5, 1.0]
    assert [group.task.task_id for group in ledger.groups("before")] == ["a", "b", "c"]
    assert ledger.rewards(TRAIN) == []


def test_facts_are_remembered_by_the_file(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.get_fact("phase") is None
    ledger.set_fact("phase", "rl")
    ledger.set_fact("phase", "done")
    with Ledger.open(tmp_path / "ledger.db") as another_process:
        assert another_process.get_fact("phase") == "done"


def test_foreign_newer_and_broken_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    foreign, newer, broken = (tmp_path / name for name in ("foreign.db", "newer.db", "broken.db"))
    database = sqlite3.connect(foreign)
    database.execute("CREATE TABLE songs (name TEXT)")
    database.close()
    Ledger.open(newer).close()
    database = sqlite3.connect(newer)
    database.execute("PRAGMA user_version = 99")
    database.close()
    broken.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    for path, why in [
        (foreign, "not a ledger of étude"),
        (newer, "version 99"),
        (broken, "not a database"),
        (tmp_path / "missing" / "ledger.db", "create it first"),
    ]:
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(RunFolderError, match=why):
            Ledger.open(path)
        assert (path.read_bytes() if path.exists() else None) == before


WRITER = """
import sys, time
from pathlib import Path
from etude.ledger.ledger import TRAIN, Ledger
from etude.types import Case, FunctionChecks, Split, Task

folder, first = Path(sys.argv[1]), int(sys.argv[2])
checks = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=0),))
(folder / f"ready-{first}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
with Ledger.open(folder / "ledger.db") as ledger:
    for name in range(first, first + 20):
        task = Task(
            task_id=str(name), family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=checks
        )
        ledger.admit_group(task, TRAIN, 1, 0)
"""


def test_processes_may_create_and_write_one_ledger_at_the_same_time(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(first)]) for first in (0, 10, 20)]
    while len(list(tmp_path.glob("ready-*"))) < len(writers):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [writer.wait(30) for writer in writers] == [0, 0, 0]
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert sorted(int(group.task.task_id) for group in ledger.groups(TRAIN)) == list(range(40))
