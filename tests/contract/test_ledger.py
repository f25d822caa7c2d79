"""Contract of every ledger call, for every supported database."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.errors import FencedError
from etude.ledger.changes import TRAINER
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.ledger.states import GroupState
from etude.types import Rollout, RolloutStatus, Split
from ledgers import NewPlace, fill, holding, new_task, rollout, task


@pytest.fixture
def ledger(place: str) -> Iterator[Ledger]:
    with Ledger.open(place) as opened:
        yield opened


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
    assert (progress.admitted, progress.usable, progress.dropped, progress.claimed) == (3, 2, 1, 2)
    with pytest.raises(ValueError, match="no move from dropped to dropped"):
        ledger.drop_group(TRAIN, 1, "again")


def test_a_claimed_step_gets_the_same_groups_after_a_restart(ledger: Ledger, place: str) -> None:
    fill(ledger, "a"), fill(ledger, "b")
    first = ledger.claim_batch(1, 1)
    assert first
    with Ledger.open(place) as another_process:
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


def test_a_step_may_claim_while_the_one_before_is_published_and_not_earlier(ledger: Ledger, place: str) -> None:
    for name in "abcd":
        fill(ledger, name)
    first, second = ledger.claim_batch(1, 1), ledger.claim_batch(2, 1)
    assert [[group.index for group in batch or []] for batch in (first, second)] == [[0], [1]]
    with pytest.raises(ValueError, match="step 3 cannot claim a batch: step 1 is not committed"):
        ledger.claim_batch(3, 1)
    progress = ledger.progress()
    assert (progress.steps_done, progress.claimed, progress.ready) == (0, 2, 2)
    with Ledger.open(place) as another_process:
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


def test_facts_are_remembered(ledger: Ledger, place: str) -> None:
    assert ledger.facts.get("phase") is None
    ledger.facts.set("phase", "rl")
    ledger.facts.set("phase", "done")
    with Ledger.open(place) as another_process:
        assert another_process.facts.get("phase") == "done"


WRITER = """
import sys, time
from pathlib import Path
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.types import Case, FunctionChecks, Split, Task

folder, place, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
checks = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=0),))
(folder / f"ready-{first}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
with Ledger.open(place) as ledger:
    for name in range(first, first + 20):
        task = Task(
            task_id=str(name), family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=checks
        )
        ledger.admit_group(task, TRAIN, 1, 0)
"""


def test_processes_may_create_and_write_one_ledger_at_the_same_time(tmp_path: Path, place: str) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), place, str(first)]) for first in (0, 10)]
    while len(list(tmp_path.glob("ready-*"))) < len(writers):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [writer.wait(30) for writer in writers] == [0, 0]
    with Ledger.open(place) as ledger:
        assert sorted(int(group.task.task_id) for group in ledger.groups(TRAIN)) == list(range(30))


def draw(position: int) -> TaskDraw:
    """Training data in which every task comes twice in a row."""
    return TaskDraw(task=task(position // 2))


def test_a_drawn_task_its_cursor_and_its_group_are_one(ledger: Ledger, place: str) -> None:
    slots = ledger.admit_next(draw, size=2, version=3, kept_below=9)
    assert slots is not None
    assert [(slot.group_index, slot.slot, slot.attempt) for slot in slots] == [(0, 0, 0), (0, 1, 0)]
    assert ledger.group(TRAIN, 0).admitted_version == 3
    with Ledger.open(place) as another_process:  # passes over the task that it finds known
        (slot,) = another_process.admit_next(draw, size=1, version=3, kept_below=9) or []
    assert slot.task == task(1)
    assert ledger.progress().drawn == 3
    assert ledger.open_slots(TRAIN)[:2] == slots


def test_no_group_is_admitted_beyond_the_window_and_a_dropped_one_makes_room(ledger: Ledger) -> None:
    assert ledger.admit_next(draw, size=1, version=0, kept_below=1)
    assert ledger.admit_next(draw, size=1, version=0, kept_below=1) is None
    assert ledger.progress().drawn == 1
    ledger.drop_group(TRAIN, 0, "infra")
    assert ledger.admit_next(draw, size=1, version=0, kept_below=1)


def test_a_task_drawn_by_another_process_meanwhile_is_drawn_by_no_other(ledger: Ledger, place: str) -> None:
    drawn: list[int] = []

    def slowly(position: int) -> TaskDraw:
        if not drawn:
            with Ledger.open(place) as faster:
                assert faster.admit_next(new_task, size=1, version=0, kept_below=9)
        drawn.append(position)
        return new_task(position)

    assert ledger.admit_next(slowly, size=1, version=0, kept_below=9)
    assert drawn == [0, 1]
    assert [group.task.task_id for group in ledger.groups(TRAIN)] == ["0", "1"]


def test_a_task_is_admitted_once_an_epoch(ledger: Ledger) -> None:
    def three_epochs_of_two_tasks(position: int) -> TaskDraw:
        return TaskDraw(task=task(position % 2), epoch=1 + position // 4)  # each task is drawn twice an epoch

    for _ in range(6):
        assert ledger.admit_next(three_epochs_of_two_tasks, size=1, version=0, kept_below=9)
    groups = [(group.task.task_id, group.epoch) for group in ledger.groups(TRAIN)]
    assert groups == [("0", 1), ("1", 1), ("0", 2), ("1", 2), ("0", 3), ("1", 3)]
    assert ledger.progress().drawn == 10


def test_held_out_data_is_not_admitted_by_drawing_it_either(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="nothing held out"):
        ledger.admit_next(lambda _: TaskDraw(task=task("secret", Split.HELDOUT)), size=1, version=0, kept_below=9)
    assert ledger.progress().drawn == 0


def test_the_cursor_commits_with_the_step_as_far_as_everything_before_is_settled(ledger: Ledger) -> None:
    for _ in range(4):
        for slot in ledger.admit_next(draw, size=1, version=0, kept_below=9) or []:
            if slot.group_index != 2:
                ledger.record(rollout(slot.group_index, 0), TRAIN)
    progress = ledger.progress()
    assert (progress.drawn, progress.committed) == (7, 0)
    assert ledger.claim_batch(1, 1)
    assert ledger.claim_batch(2, 1)
    assert ledger.progress().committed == 0
    ledger.commit_step(1)
    assert ledger.progress().committed == 2  # the task of the claimed group lies there: it is not published yet
    ledger.commit_step(2)
    assert ledger.progress().committed == 4
    ledger.drop_group(TRAIN, 2, "infra")
    assert ledger.claim_batch(3, 1)
    ledger.commit_step(3)
    assert ledger.progress().committed == ledger.progress().drawn == 7


def test_a_group_is_ready_when_half_of_it_is_graded_and_the_rest_lost(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 4, 0)
    ledger.record(rollout(0, 0, reward=None), TRAIN)
    assert ledger.lose_slot(TRAIN, 0, 0, "infra: slot 0") is GroupState.OPEN
    assert ledger.lose_slot(TRAIN, 0, 0, "infra: slot 0") is GroupState.OPEN
    assert [slot.slot for slot in ledger.open_slots(TRAIN)] == [1, 2, 3]
    with pytest.raises(ValueError, match="that slot is graded, lost"):
        ledger.record(rollout(0, 0, attempt=1), TRAIN)
    ledger.record(rollout(0, 1), TRAIN)
    assert ledger.lose_slot(TRAIN, 0, 3, "infra: slot 3") is GroupState.OPEN
    assert ledger.record(rollout(0, 2), TRAIN) is None
    assert ledger.progress().ready == 1
    assert [done.slot for done in (ledger.claim_batch(1, 1) or [])[0].rollouts] == [1, 2]


def test_a_group_is_dropped_as_soon_as_its_quorum_is_out_of_reach(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 4, 0)
    ledger.admit_group(task("b"), "before", 1, 0)
    states = [ledger.lose_slot(TRAIN, 0, slot, f"infra: slot {slot}") for slot in (0, 1, 2)]
    assert states == [GroupState.OPEN, GroupState.OPEN, GroupState.DROPPED]
    assert ledger.lose_slot("before", 0, 0, "infra") is GroupState.DROPPED
    assert (ledger.progress().dropped, ledger.open_slots(TRAIN)) == (1, [])
    with pytest.raises(ValueError, match="cannot be lost: the group is dropped"):
        ledger.lose_slot(TRAIN, 0, 3, "infra")


def test_a_graded_slot_is_never_lost(ledger: Ledger) -> None:
    ledger.admit_group(task("a"), TRAIN, 2, 0)
    ledger.record(rollout(0, 0), TRAIN)
    for slot in (0, 2):
        with pytest.raises(ValueError, match=f"slot {slot} of group 0 of 'train' cannot be lost"):
            ledger.lose_slot(TRAIN, 0, slot, "infra")


def test_only_the_holder_of_the_lease_trains_and_a_zombie_never_commits(ledger: Ledger, place: str) -> None:
    for name in "abc":
        fill(ledger, name)
    with holding(place, TRAINER, "host:/run") as zombie:
        assert zombie.claim_batch(1, 1)
        with pytest.raises(FencedError, match="host:/run holds the right to train"):
            ledger.claim_batch(2, 1)
        with pytest.raises(FencedError, match="holds the right to train"):
            ledger.commit_step(1)
        assert ledger.leases.take(TRAINER, "elsewhere:/run") is None
        with holding(place, TRAINER, "host:/run") as successor:  # under its own name: at once
            with pytest.raises(FencedError, match=r"lease 'trainer' of host:/run \(token 1\) is lost"):
                zombie.commit_step(1)
            assert [group.index for group in successor.claim_batch(1, 1) or []] == [0]
            successor.commit_step(1)
            successor.leases.release()
        with pytest.raises(FencedError):
            zombie.claim_batch(2, 1)
    assert ledger.claim_batch(2, 1)
    assert ledger.progress().consumed == 1


def test_rollouts_processes_fill_their_own_groups_and_inherit_those_of_the_dead(place: str) -> None:
    with holding(place, "rollouts-0", "a") as dead, holding(place, "rollouts-1", "b") as heir:
        for ledger in (dead, heir, dead):
            assert ledger.admit_next(new_task, size=1, version=0, kept_below=9)
        assert [slot.group_index for slot in dead.open_slots(TRAIN)] == [0, 2]
        assert [slot.group_index for slot in heir.open_slots(TRAIN)] == [1]
        with pytest.raises(FencedError, match="group 0 of 'train' belongs to 'rollouts-0' now, not to 'rollouts-1'"):
            heir.record(rollout(0, 0), TRAIN)
        dead.record(rollout(0, 0), TRAIN)
        dead.leases.release()
        assert [slot.group_index for slot in heir.open_slots(TRAIN)] == [1, 2]
        heir.record(rollout(2, 0), TRAIN)
        assert heir.progress().ready == 2
    with Ledger.open(place) as tool:
        assert [slot.group_index for slot in tool.open_slots(TRAIN)] == [1]


def test_a_ledger_holds_one_lease(place: str) -> None:
    with holding(place, "rollouts", "a") as ledger, pytest.raises(ValueError, match="holds the lease 'rollouts'"):
        ledger.leases.take(TRAINER, "a")


def test_two_runs_in_one_place_know_nothing_of_each_other(new_place: NewPlace) -> None:
    with Ledger.open(new_place()) as one, Ledger.open(new_place()) as other:
        fill(one, "a")
        assert other.progress().admitted == 0
        assert fill(other, "a") == 0
