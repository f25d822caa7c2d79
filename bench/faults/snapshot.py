"""The ledger's tables as facts: the statements to read them, and what their rows say."""

from collections.abc import Sequence
from typing import Any

from bench.faults.audit import GroupFact, LedgerSnapshot, RolloutFact

QUESTIONS = (
    "SELECT group_index, task_id, epoch, size, state, step, reason FROM groups WHERE purpose = 'train'",
    "SELECT rollout_id, group_index, slot, attempt, status, reward FROM rollouts WHERE purpose = 'train'",
    "SELECT step FROM steps WHERE state = 'done'",
)
"""Statements whose rows are a snapshot."""


def snapshot_of(answers: Sequence[Sequence[tuple[Any, ...]]]) -> LedgerSnapshot:
    """The ledger by what it answers to ``QUESTIONS``."""
    groups, rollouts, steps = answers
    return LedgerSnapshot(
        groups={
            index: GroupFact(
                index=index, task_id=task_id, epoch=epoch, size=size, state=state, step=step, reason=reason
            )
            for index, task_id, epoch, size, state, step, reason in groups
        },
        rollouts={
            rollout_id: RolloutFact(
                rollout_id=rollout_id, group_index=index, slot=slot, attempt=attempt, status=status, reward=reward
            )
            for rollout_id, index, slot, attempt, status, reward in rollouts
        },
        steps_done=frozenset(step for (step,) in steps),
    )
