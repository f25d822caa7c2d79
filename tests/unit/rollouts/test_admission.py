"""Whatever the timing, no trained token is staler than allowed, and the loop always gets to its end."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config import RolloutConfig
from etude.rollouts.admission import Admission

MAX_DROPS = 5


@dataclass
class SimulatedGroup:
    left: int
    """Rollouts that have not ended."""
    oldest_token: int
    """The lowest weight version that sampled one of its tokens."""
    dropped: bool = False


@dataclass
class Simulation:
    """A trainer, engines and rollouts in which whatever can happen next happens in random order."""

    config: RolloutConfig
    steps: int
    random: Random
    version: int = 0
    """Steps done, published and served."""
    training: bool = False
    drops: int = 0
    groups: list[SimulatedGroup] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def run(self) -> None:
        admission = Admission(self.config, steps=self.steps)
        while self.version < self.steps:
            before = len(self.groups)
            for _ in range(
                admission.groups_to_admit(version=self.version, kept=len(self.kept()), in_flight=self.in_flight())
            ):
                self.groups.append(SimulatedGroup(left=self.config.group_size, oldest_token=self.version))
            assert self.in_flight() <= self.config.concurrency
            moves = [self.end_rollout] * bool(self.in_flight()) + [self.drop] * self.may_drop()
            moves += [self.start_step] * self.may_start() + [self.end_step] * self.training
            assert moves or len(self.groups) > before, "deadlock: nothing can happen any more"
            if moves:
                self.random.choice(moves)()

    def kept(self) -> list[SimulatedGroup]:
        return [group for group in self.groups if not group.dropped]

    def open(self) -> list[SimulatedGroup]:
        return [group for group in self.kept() if group.left]

    def in_flight(self) -> int:
        return sum(group.left for group in self.open())

    def batch(self) -> list[SimulatedGroup]:
        size = self.config.groups_per_step
        return self.kept()[self.version * size : (self.version + 1) * size]

    def may_drop(self) -> bool:
        return bool(self.open()) and self.drops < MAX_DROPS

    def may_start(self) -> bool:
        batch = self.batch()
        is_ready = len(batch) == self.config.groups_per_step and not any(group.left for group in batch)
        return is_ready and not self.training

    def end_rollout(self) -> None:
        self.random.choice(self.open()).left -= 1

    def drop(self) -> None:
        self.random.choice(self.open()).dropped = True
        self.drops += 1

    def start_step(self) -> None:
        self.staleness += [self.version - group.oldest_token for group in self.batch()]
        self.training = True

    def end_step(self) -> None:
        self.version += 1
        self.training = False


@st.composite
def configs(draw: st.DrawFn) -> RolloutConfig:
    groups_per_step, group_size, max_staleness = (
        draw(st.integers(1, 4)),
        draw(st.integers(2, 4)),
        draw(st.integers(0, 3)),
    )
    window = (max_staleness + 1) * groups_per_step * group_size
    return RolloutConfig(
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_staleness=max_staleness,
        concurrency=draw(st.integers(group_size, window)),
    )


@settings(deadline=None)
@given(configs(), st.integers(1, 6), st.integers(0, 2**32))
def test_staleness_is_bounded_and_every_step_is_reached(config: RolloutConfig, steps: int, seed: int) -> None:
    simulation = Simulation(config, steps, Random(seed))
    simulation.run()
    assert simulation.version == steps
    assert len(simulation.staleness) == steps * config.groups_per_step == len(simulation.kept())
    assert min(simulation.staleness) >= 0
    assert max(simulation.staleness) <= config.max_staleness


def test_the_bound_is_used_not_only_kept() -> None:
    config = RolloutConfig(groups_per_step=2, group_size=2, max_staleness=2, concurrency=12)
    reached = set[int]()
    for seed in range(20):
        simulation = Simulation(config, 6, Random(seed))
        simulation.run()
        reached |= set(simulation.staleness)
    assert reached == {0, 1, 2}


SMALL = RolloutConfig(groups_per_step=4, group_size=2, max_staleness=1, concurrency=16)


@pytest.mark.parametrize(
    ("version", "kept", "in_flight", "groups", "why"),
    [
        (0, 0, 0, 8, "the window of two steps is empty"),
        (0, 5, 0, 3, "the window has three places left"),
        (0, 8, 0, 0, "the window is full"),
        (1, 8, 0, 4, "a new version opens one step's worth"),
        (0, 0, 11, 2, "five idle rollouts are two whole groups"),
        (0, 0, 15, 0, "one idle rollout is not a group"),
        (0, 0, 20, 0, "more in flight than allowed, as after a change of configuration"),
        (9, 38, 0, 2, "the run needs forty groups"),
        (9, 40, 0, 0, "the run has all it needs"),
    ],
)
def test_admission_takes_the_tightest_of_three_limits(
    version: int, kept: int, in_flight: int, groups: int, why: str
) -> None:
    admission = Admission(SMALL, steps=10)
    assert admission.groups_to_admit(version=version, kept=kept, in_flight=in_flight) == groups, why


def test_without_staleness_the_next_batch_waits_for_the_weights_of_this_one() -> None:
    admission = Admission(RolloutConfig(groups_per_step=4, group_size=2, max_staleness=0, concurrency=8), steps=10)
    assert admission.groups_to_admit(version=0, kept=0, in_flight=0) == 4
    assert admission.groups_to_admit(version=0, kept=4, in_flight=0) == 0
    assert admission.groups_to_admit(version=1, kept=4, in_flight=0) == 4
