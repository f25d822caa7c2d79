"""The work of rollouts: their turns, tokens and seconds outside of the engine, as recorded from a run.

A simulated rollout repeats a recorded one. It is drawn from a group that was recorded at about the same position of its
run, so that the frequency of long rollouts, the similarity within groups, and the change of lengths during training
are preserved.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import fmean
from typing import Self

from etude.errors import UserError
from etude.telemetry.events import EngineStats, Logged, RolloutClosed
from etude.types import RolloutStage, RolloutStatus

NEAR = 0.05
"""Recorded groups are drawn from this share of the run before a group's own position, and the same share after it."""
TRAIN = "train"
STAGES = ("sandbox_s", "tools_s", "grading_s")
"""Fields of :class:`RolloutWork` with work outside of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """The work of one rollout."""

    turns: int
    sampled_tokens: int
    prompt_tokens: int
    """Tokens that the engine reads in all turns, without those in its cache."""
    sandbox_s: float
    """Seconds until its sandbox is ready."""
    tools_s: float
    """Commands of the agent in all turns."""
    grading_s: float
    """Grading and scoring."""
    model_s: float = 0.0
    """Recorded time of waiting for the model; the simulation determines its own."""

    @property
    def turn_tokens(self) -> int:
        """Sampled tokens of each simulated turn."""
        return self.sampled_tokens // self.turns


@dataclass(frozen=True, slots=True)
class Workload:
    """Recorded groups of rollouts, in the order in which they were admitted."""

    groups: tuple[tuple[RolloutWork, ...], ...]
    is_ordered: bool = True
    """False if the order has no meaning: then a run goes through all groups again and again, each time in a new order,
    so that its means vary little.
    """

    @classmethod
    def of_events(cls, logged: Iterable[Logged]) -> Self:
        """The graded training rollouts of a run; the events must be in order of time.

        Raises :class:`~etude.errors.UserError` if there are none.
        """
        events = list(logged)
        ended = [(each.at_s, each.event) for each in events if isinstance(each.event, RolloutClosed)]
        trained = [(at_s, event) for at_s, event in ended if event.purpose == TRAIN]
        closed = [event for _, event in trained if event.status == RolloutStatus.GRADED]
        turns = sum(event.turns for event in closed)
        if not turns:
            raise UserError(
                "the run has no graded training rollout to learn from: name one that trained for some steps"
            )
        read_tokens = sum(
            each.event.prefill_tokens
            for each in events
            if isinstance(each.event, EngineStats) and trained[0][0] <= each.at_s <= trained[-1][0]
        )
        groups = defaultdict[int, list[RolloutWork]](list)
        for event in closed:
            groups[event.group_index].append(_work(event, read_tokens / turns))
        return cls(tuple(tuple(groups[index]) for index in sorted(groups)))

    def draw(self, place: float, group: int, random: Random) -> RolloutWork:
        """The work of a rollout of ``group``, which is admitted at position ``place`` of the run, from 0 to 1."""
        if not self.is_ordered:
            round_number, index = divmod(group, len(self.groups))
            return random.choice(self.groups[_shuffled(len(self.groups), round_number)[index]])
        of_group = Random(group)  # the same position for all its rollouts
        last = len(self.groups) - 1
        near = min(1.0, max(0.0, place + of_group.uniform(-NEAR, NEAR)))
        return random.choice(self.groups[round(near * last)])

    @property
    def rollouts(self) -> list[RolloutWork]:
        """All recorded rollouts."""
        return [work for group in self.groups for work in group]

    @property
    def wait_s(self) -> float:
        """Mean seconds that a turn waited for the model."""
        return sum(work.model_s for work in self.rollouts) / sum(work.turns for work in self.rollouts)

    def mean(self, stage: str) -> float:
        """The mean of a field of :class:`RolloutWork` over rollouts."""
        return fmean(getattr(work, stage) for work in self.rollouts)

    def scaled(self, factors: Mapping[str, float]) -> "Workload":
        """The workload with some fields of :class:`RolloutWork` multiplied, each by its factor."""
        return replace(self, groups=tuple(tuple(_scaled(work, factors) for work in group) for group in self.groups))


@cache
def _shuffled(count: int, seed: int) -> tuple[int, ...]:
    return tuple(Random(seed).sample(range(count), count))


def _scaled(work: RolloutWork, factors: Mapping[str, float]) -> RolloutWork:
    return replace(work, **{stage: factor * getattr(work, stage) for stage, factor in factors.items()})


def _work(event: RolloutClosed, prompt_tokens: float) -> RolloutWork:
    seconds = {stage: event.stage_s.get(stage, 0.0) for stage in RolloutStage}
    return RolloutWork(
        turns=max(1, event.turns),
        sampled_tokens=event.sampled_tokens,
        prompt_tokens=round(prompt_tokens * event.turns),
        sandbox_s=seconds[RolloutStage.SESSION] + seconds[RolloutStage.SANDBOX],
        tools_s=seconds[RolloutStage.TOOLS],
        grading_s=seconds[RolloutStage.GRADING] + seconds[RolloutStage.SCORING],
        model_s=seconds[RolloutStage.MODEL],
    )
