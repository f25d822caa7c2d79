"""The audit of a fault campaign finds every planted fault, and reports none in a sound run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.faults.audit import (
    Closing,
    Computed,
    Ending,
    Evidence,
    Finding,
    GroupFact,
    LedgerSnapshot,
    RolloutFact,
    Terms,
    Weights,
    Wrong,
    audit,
    compare,
)
from etude.types import Finish

STEPS, GROUPS, SIZE, TURNS = 3, 2, 2, 4
Change = Callable[[Evidence], Evidence]


def group(index: int, **changes: Any) -> GroupFact:
    fact = GroupFact(
        index=index, task_id=f"task-{index}", epoch=1, size=SIZE, state="consumed", step=1 + index // GROUPS, reason=""
    )
    return replace(fact, **changes)


def rollout(index: int, slot: int, attempt: int = 0, status: str = "graded") -> RolloutFact:
    return RolloutFact(
        rollout_id=f"r{index}.{slot}.{attempt}",
        group_index=index,
        slot=slot,
        attempt=attempt,
        status=status,
        reward=0.0 if status == "graded" else None,
    )


def sound() -> Evidence:
    """A run of six groups, one more that was dropped, and a failed attempt."""
    groups = {index: group(index) for index in range(STEPS * GROUPS)}
    groups[6] = group(6, state="dropped", step=None, reason="infra: slot 0: SandboxError")
    rollouts = [rollout(index, slot) for index in range(STEPS * GROUPS) for slot in range(SIZE)]
    rollouts += [rollout(6, 0, 0, "failed_infra"), rollout(6, 1, 0, "dropped")]
    return Evidence(
        terms=Terms(steps=STEPS, groups_per_step=GROUPS, max_turns=TURNS, max_attempts=2),
        snapshot=LedgerSnapshot(
            groups=groups, rollouts={r.rollout_id: r for r in rollouts}, steps_done=frozenset({1, 2, 3})
        ),
        drawn=tuple((f"task-{index}", 1) for index in range(7)),
        endings=tuple(
            Ending(rollout_id=r.rollout_id, reason="submit", turns=2, last_finish=Finish.STOP)
            for r in rollouts
            if r.status == "graded"
        ),
        closings=tuple(Closing(rollout_id=r.rollout_id, status=r.status, reward=r.reward) for r in rollouts),
        computed=(Computed(1, (0.5, 10)), Computed(2, (0.1, 12)), Computed(2, (0.1, 12)), Computed(3, (0.0, 9))),
        weights=Weights(versions=(0, 1, 2, 3), faults=(), published="abc", lineage="abc"),
    )


def with_group(index: int, **changes: Any) -> Change:
    def change(evidence: Evidence) -> Evidence:
        groups = {**evidence.snapshot.groups, index: group(index, **changes)}
        return replace(evidence, snapshot=replace(evidence.snapshot, groups=groups))

    return change


def without_group(index: int) -> Change:
    def change(evidence: Evidence) -> Evidence:
        groups = {key: value for key, value in evidence.snapshot.groups.items() if key != index}
        return replace(evidence, snapshot=replace(evidence.snapshot, groups=groups))

    return change


def given_up(index: int, slot: int) -> list[RolloutFact]:
    """Every attempt at a slot failed."""
    return [rollout(index, slot, attempt, "failed_infra") for attempt in range(2)]


def with_rollout(*facts: RolloutFact) -> Change:
    def change(evidence: Evidence) -> Evidence:
        rollouts = {**evidence.snapshot.rollouts, **{fact.rollout_id: fact for fact in facts}}
        return replace(evidence, snapshot=replace(evidence.snapshot, rollouts=rollouts))

    return change


def without_rollout(rollout_id: str) -> Change:
    def change(evidence: Evidence) -> Evidence:
        rollouts = {key: value for key, value in evidence.snapshot.rollouts.items() if key != rollout_id}
        return replace(evidence, snapshot=replace(evidence.snapshot, rollouts=rollouts))

    return change


def with_ending(**changes: Any) -> Change:
    return lambda evidence: replace(evidence, endings=(replace(evidence.endings[0], **changes),))


def with_weights(**changes: Any) -> Change:
    return lambda evidence: replace(evidence, weights=replace(evidence.weights, **changes))


def with_steps(*steps: int) -> Change:
    return lambda evidence: replace(evidence, snapshot=replace(evidence.snapshot, steps_done=frozenset(steps)))


def test_a_sound_run_has_nothing_wrong() -> None:
    assert audit(sound()) == []


def test_the_lesser_half_of_a_group_may_be_given_up() -> None:
    evidence = with_rollout(*given_up(2, 1))(sound())
    assert audit(replace(evidence, closings=())) == []


PLANTED: dict[str, tuple[Wrong, Change]] = {
    "a committed step is gone": (Wrong.LOST, with_steps(1, 3)),
    "a step has a group too few": (Wrong.LOST, with_group(3, state="open", step=None)),
    "an admitted group is gone": (Wrong.LOST, without_group(6)),
    "a group is claimed for ever": (Wrong.LOST, with_group(6, state="claimed", step=4)),
    "a group is nowhere": (Wrong.LOST, with_group(6, state="forgotten", step=None)),
    "a group was dropped for no reason": (Wrong.LOST, with_group(6, state="dropped", step=None)),
    "a drawn task was never admitted": (Wrong.LOST, lambda e: replace(e, drawn=(*e.drawn, ("task-7", 1)))),
    "a graded rollout is gone": (Wrong.LOST, without_rollout("r2.1.0")),
    "a slot was given up too early": (Wrong.LOST, lambda e: replace(without_rollout("r2.1.0")(e), closings=())),
    "a consumed group has no graded rollout": (
        Wrong.LOST,
        lambda e: replace(with_rollout(*given_up(0, 0), *given_up(0, 1))(e), closings=()),
    ),
    "a version is missing": (Wrong.LOST, with_weights(versions=(0, 1, 3))),
    "a version cannot be had": (Wrong.LOST, with_weights(faults=("version 2: damaged",))),
    "the weights are others than the checkpoint's": (Wrong.LOST, with_weights(lineage="abd")),
    "a group is in a step too many": (Wrong.DOUBLE_TRAINED, with_group(0, step=2)),
    "a group is of another epoch than its task was drawn in": (Wrong.LOST, with_group(1, epoch=2)),
    "a task was admitted twice": (Wrong.DOUBLE_TRAINED, with_group(1, task_id="task-0")),
    "a slot has two graded rollouts": (Wrong.DOUBLE_TRAINED, with_rollout(rollout(0, 0, 1))),
    "a step was redone on another batch": (
        Wrong.DOUBLE_TRAINED,
        lambda e: replace(e, computed=(*e.computed, Computed(2, (0.2, 12)))),
    ),
    "a failed rollout has a reward": (
        Wrong.INFRA_SCORED_ZERO,
        with_rollout(replace(rollout(6, 0, 0, "failed_infra"), reward=0.0)),
    ),
    "a failed rollout became a graded one": (
        Wrong.INFRA_SCORED_ZERO,
        with_rollout(replace(rollout(6, 0, 0, "failed_infra"), status="graded", reward=0.0)),
    ),
    "a graded session was not ended by its model": (Wrong.INFRA_SCORED_ZERO, with_ending(reason="connection lost")),
    "a graded session has no turn": (Wrong.INFRA_SCORED_ZERO, with_ending(turns=0)),
    "a graded session had turns left": (Wrong.INFRA_SCORED_ZERO, with_ending(reason="turns")),
    "a graded session ended whole and was called cut": (Wrong.INFRA_SCORED_ZERO, with_ending(reason="length")),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(planted: str) -> None:
    wrong, change = PLANTED[planted]
    assert wrong in {finding.wrong for finding in audit(change(sound()))}


def open_snapshot(**changes: Any) -> LedgerSnapshot:
    snapshot = LedgerSnapshot(
        groups={0: group(0), 1: group(1, state="claimed"), 2: group(2, state="ready", step=None)},
        rollouts={fact.rollout_id: fact for fact in (rollout(0, 0), rollout(0, 1), rollout(1, 0, 0, "failed_infra"))},
        steps_done=frozenset({1}),
    )
    return replace(snapshot, **changes)


def test_getting_on_is_no_change_for_the_worse() -> None:
    assert compare(LedgerSnapshot(), open_snapshot()) == []
    assert compare(open_snapshot(), open_snapshot()) == []
    later = open_snapshot(groups={**open_snapshot().groups, 1: group(1), 2: group(2, state="claimed"), 3: group(3)})
    assert compare(open_snapshot(), later) == []


@pytest.mark.parametrize(
    ("wrong", "changes"),
    [
        (Wrong.LOST, {"steps_done": frozenset()}),
        (Wrong.LOST, {"rollouts": {}}),
        (Wrong.LOST, {"rollouts": {**open_snapshot().rollouts, "r0.0.0": replace(rollout(0, 0), reward=1.0)}}),
        (Wrong.LOST, {"groups": {}}),
        (Wrong.LOST, {"groups": {**open_snapshot().groups, 0: group(0, task_id="another")}}),
        (Wrong.LOST, {"groups": {**open_snapshot().groups, 2: group(2, state="open", step=None)}}),
        (Wrong.LOST, {"groups": {**open_snapshot().groups, 0: group(0, state="dropped")}}),
        (Wrong.DOUBLE_TRAINED, {"groups": {**open_snapshot().groups, 0: group(0, step=2)}}),
    ],
)
def test_what_goes_is_found(wrong: Wrong, changes: dict[str, Any]) -> None:
    result = compare(open_snapshot(), open_snapshot(**changes))
    assert result
    assert {finding.wrong for finding in result} == {wrong}
    assert all(isinstance(finding, Finding) for finding in result)


def test_progress_is_whatever_the_run_gets_done() -> None:
    snapshot = open_snapshot()
    assert snapshot.graded == 2
    assert snapshot.progress != open_snapshot(groups={**snapshot.groups, 2: group(2, state="claimed")}).progress
    assert snapshot.progress == open_snapshot().progress
