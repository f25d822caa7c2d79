"""The proof of docs/control.md, put to the test: dispatchers, regions with engines, a trainer and a real ledger.

Whatever can happen next happens in any order: hearing, counting, admitting, opening sessions, sampling, ending,
losing, killing, training, publishing, pulling, cutting regions off and healing them. The bound must hold for every
trained token, every step must be reached, and each way in which the rule could be slightly wrong must be noticed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.rollouts import RolloutConfig
from etude.fleet.regions import RegionLimits, RegionReport, Regions
from etude.ledger.ledger import TRAIN, Ledger, OpenSlot, TaskDraw
from etude.rollouts.admission import Admission
from etude.rollouts.schedule import Place, place_of
from etude.trainer.batching.batch import build_batch
from etude.types import Finish, Rollout, RolloutStatus, Turn
from ledgers import task

MAX_FAILURES = 12
"""Attempts that fail in one history: finitely many, as liveness supposes."""
MAX_CUTS = 4
"""Cuts of regions."""
MAX_LOST = 16
"""Engines that are out of reach for a while."""
MOST_MOVES = 2000
"""Far more than any history needs."""

PLACES = 8
"""Sessions of one dispatcher that a region takes."""

MEMORY = Path("/dev/shm")
"""Where a ledger is fastest; hundreds are made."""

Move: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Rules:
    """The window's rules; each field can be set to a wrong rule."""

    extra: int = 0
    """Groups by which the window is too wide."""
    hears_published: bool = False
    """A version counts once it is published, whatever engines serve."""
    checks_count: bool = True
    """The ledger compares with the window when it admits, not only the dispatcher when it counts."""
    checks_versions: bool = True
    """A rollout with tokens of older weights than its group was admitted at is not graded."""
    asks_version: bool = True
    """A session goes to a region that serves the version that its group was admitted at, and its calls ask for it."""


RIGHT = Rules()


@dataclass
class Dispatcher:
    """The memory of one rollouts process."""

    table: Regions
    heard: int = 0
    may_admit: int = 0
    slots: dict[Place, OpenSlot] = field(default_factory=dict)
    tokens: dict[Place, list[int]] = field(default_factory=dict)
    """The version of each token that was sampled in a slot's present attempt."""
    regions: dict[Place, str] = field(default_factory=dict)
    """The region of each slot's session, if it has one."""


@dataclass
class Region:
    """Engines that pull published versions while there is a link."""

    engines: list[int] = field(default_factory=lambda: [0, 0])
    missing: int | None = None
    """The engine that is out of reach: it is not counted and does not pull, and is back before anybody knows."""
    is_disconnected: bool = False
    """Nothing gets there or back: it does not pull and says nothing."""

    def counted(self) -> int:
        """The oldest version of the engines in reach."""
        return min(version for engine, version in enumerate(self.engines) if engine != self.missing)


@dataclass
class Trainer:
    """The trainer, and the regions that pull its versions."""

    config: RolloutConfig
    steps: int
    ledger: Ledger
    claimed: int = 0
    published: int = 0
    committed: int = 0
    regions: dict[str, Region] = field(default_factory=lambda: {name: Region() for name in ("home", "far")})
    staleness: list[int] = field(default_factory=list)

    def moves(self) -> list[Move]:
        behind = [
            (region, engine)
            for region in self.regions.values()
            for engine, version in enumerate(region.engines)
            if version < self.published and engine != region.missing and not region.is_disconnected
        ]
        return [
            *[self.claim] * (4 * self.may_claim()),
            *[self.publish] * (self.published < self.claimed),
            *[self.commit] * (self.committed < self.published),
            *(partial(self.pull, region, engine) for region, engine in behind),
        ]

    def lose_sight(self, region: Region, engine: int | None) -> None:
        """Make an engine of the region unreachable; with ``None`` it is reachable again, and pulls."""
        if region.missing is not None and not region.is_disconnected:
            self.pull(region, region.missing)
        region.missing = engine

    def may_claim(self) -> bool:
        return self.claimed < self.steps and self.claimed - self.committed < 2 and self.claimed <= self.published + 1

    def claim(self) -> None:
        groups = self.ledger.claim_batch(self.claimed + 1, self.config.groups_per_step)
        if groups is not None:
            self.claimed += 1
            self.staleness += build_batch(self.claimed, groups).staleness.tolist()

    def publish(self) -> None:
        self.published += 1

    def commit(self) -> None:
        self.committed += 1
        self.ledger.commit_step(self.committed)

    def pull(self, region: Region, engine: int) -> None:
        region.engines[engine] = self.published


@dataclass
class Factory:
    """All parts of a run, and the events that may happen to them."""

    config: RolloutConfig
    trainer: Trainer
    ledger: Ledger
    rules: Rules
    failures: int = 0
    cuts: int = 0
    lost: int = 0
    orphaned: bool = False
    """Slots are in nobody's hands."""
    dispatchers: list[Dispatcher] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config, steps=self.trainer.steps)
        self.dispatchers += [Dispatcher(self.new_table()) for _ in range(2)]

    def new_table(self) -> Regions:
        """A table with a report of version 0 from every region. No time passes: absence is set explicitly."""
        table = Regions(self.trainer.regions, RegionLimits(lead=1.0))
        for name in self.trainer.regions:
            table.report(name, RegionReport(version=0, capacity=PLACES), 0.0)
        return table

    @property
    def is_done(self) -> bool:
        return self.trainer.committed == self.trainer.steps

    def moves(self, *, failing: bool = True) -> list[Move]:
        """All possible next events; without ``failing`` only those that make progress."""
        may_cut, may_lose = failing and self.cuts < MAX_CUTS, failing and self.lost < MAX_LOST
        failing = failing and self.failures < MAX_FAILURES
        moves = self.trainer.moves()
        for region in self.trainer.regions.values():
            can_lose = may_lose and region.missing is None
            moves += [partial(self.lose_sight, region, engine) for engine in (0, 1)] * can_lose
            moves += [partial(self.trainer.lose_sight, region, None)] * (region.missing is not None)
            moves += [partial(self.cut, region)] * (may_cut and not region.is_disconnected)
            moves += [partial(self.heal, region)] * region.is_disconnected
        for one in self.dispatchers:
            moves += [partial(self.hear, one, name) for name in self.trainer.regions if self.has_news(one, name)]
            moves += [partial(self.count, one)] * (not one.may_admit)
            moves += [partial(self.admit, one)] * (2 * bool(one.may_admit))
            moves += [partial(self.take_over, one)] * self.orphaned
            moves += [partial(self.kill, one)] * (failing and bool(one.slots))
            for slot in one.slots.values():
                moves += [partial(self.open, one, slot)] * (place_of(slot) not in one.regions)
                moves += [partial(self.sample, one, slot)] * (place_of(slot) in one.regions)
                moves += [partial(self.grade, one, slot)] * (2 * bool(one.tokens[place_of(slot)]))
                moves += [partial(self.fail, one, slot)] * failing
        return moves

    def run(self, random: Random, *, failing: bool = True) -> None:
        """Let random events happen until the last step is done."""
        for _ in range(MOST_MOVES):
            if self.is_done:
                return
            random.choice(self.moves(failing=failing))()
        raise AssertionError("things happen, and lead nowhere")

    def has_news(self, one: Dispatcher, name: str) -> bool:
        """True if a region's state differs from what a dispatcher knows of it."""
        region = self.trainer.regions[name]
        (view,) = [view for view in one.table.views(0.0) if view.name == name]
        unheard = self.rules.hears_published and one.heard < self.trainer.published
        return (
            unheard
            or view.is_away != region.is_disconnected
            or (not region.is_disconnected and view.version != region.counted())
        )

    def hear(self, one: Dispatcher, name: str) -> None:
        """A region answers, or does not."""
        region = self.trainer.regions[name]
        if region.is_disconnected:
            one.table.lose(name)
        else:
            one.table.report(name, RegionReport(version=region.counted(), capacity=PLACES), 0.0)
        one.heard = self.trainer.published if self.rules.hears_published else one.table.admitted_version

    def lose_sight(self, region: Region, engine: int) -> None:
        self.lost += 1
        self.trainer.lose_sight(region, engine)

    def cut(self, region: Region) -> None:
        self.cuts += 1
        region.is_disconnected = True

    def heal(self, region: Region) -> None:
        """Reconnect a region, with the weights that it had."""
        region.is_disconnected = False

    def count(self, one: Dispatcher) -> None:
        admitted = self.ledger.progress().usable - self.rules.extra
        one.may_admit = self.admission.groups_to_admit(version=one.heard, admitted=admitted, in_flight=len(one.slots))

    def admit(self, one: Dispatcher) -> None:
        one.may_admit -= 1
        window = min(self.admission.window(one.heard) + self.rules.extra, self.admission.groups_needed())
        slots = self.ledger.admit_next(
            draw,
            size=self.config.group_size,
            version=one.heard,
            kept_below=window if self.rules.checks_count else self.admission.groups_needed(),
        )
        for slot in slots or ():
            self.hold(one, slot)

    def hold(self, one: Dispatcher, slot: OpenSlot) -> None:
        one.slots[place_of(slot)] = slot
        one.tokens[place_of(slot)] = []

    def open(self, one: Dispatcher, slot: OpenSlot) -> None:
        """A session, if any region may have it now."""
        name = one.table.choose(slot.admitted_version if self.rules.asks_version else 0, 0.0)
        if name is not None:
            one.regions[place_of(slot)] = name

    def sample(self, one: Dispatcher, slot: OpenSlot) -> None:
        """Sample a token on each engine of the session's region, since turns may move between engines.

        A gateway assumes that an engine which comes back has the version that it had last.
        """
        region = self.trainer.regions[one.regions[place_of(slot)]]
        if not region.is_disconnected and not (self.rules.asks_version and region.counted() < slot.admitted_version):
            one.tokens[place_of(slot)] += region.engines

    def let_go(self, one: Dispatcher, place: Place) -> None:
        """Remove a slot and its session."""
        del one.slots[place]
        name = one.regions.pop(place, None)
        if name is not None:
            one.table.ended(name)

    def grade(self, one: Dispatcher, slot: OpenSlot) -> None:
        if self.rules.checks_versions and min(one.tokens[place_of(slot)]) < slot.admitted_version:
            self.fail(one, slot)
        else:
            self.ledger.record(self.ended(slot, RolloutStatus.GRADED, one.tokens[place_of(slot)]), TRAIN,
                               max_resamples=self.config.max_resamples)  # fmt: skip
            self.let_go(one, place_of(slot))

    def fail(self, one: Dispatcher, slot: OpenSlot) -> None:
        self.failures += 1
        due = self.ledger.record(self.ended(slot, RolloutStatus.FAILED_INFRA, []), TRAIN)
        self.let_go(one, place_of(slot))
        if due is None:
            return
        if due < self.config.max_attempts:
            self.hold(one, replace(slot, attempt=due))
        elif (
            self.ledger.lose_slot(TRAIN, slot.group_index, slot.slot, "infra", max_resamples=self.config.max_resamples)
            == "dropped"
        ):
            for place in [place for place in one.slots if place[0] == slot.group_index]:
                self.let_go(one, place)

    def kill(self, one: Dispatcher) -> None:
        """Lose the memory of a process; its successor learns and counts anew."""
        self.failures += 1
        self.orphaned = True
        one.table, one.heard, one.may_admit = self.new_table(), 0, 0
        one.slots, one.tokens, one.regions = {}, {}, {}

    def take_over(self, one: Dispatcher) -> None:
        lease = {place for other in self.dispatchers for place in other.slots}
        for slot in self.ledger.open_slots(TRAIN):
            if place_of(slot) not in lease:
                self.hold(one, slot)
        self.orphaned = False

    def ended(self, slot: OpenSlot, status: RolloutStatus, versions: list[int]) -> Rollout:
        ids = np.ones(len(versions), np.int32)
        turn = Turn(
            prompt_ids=np.ones(1, np.int32),
            completion_ids=ids,
            logprobs=-ids.astype(np.float32),
            versions=np.array(versions, np.int32),
            finish=Finish.STOP,
        )
        return Rollout(
            rollout_id=str(next(self.ids)),
            group_index=slot.group_index,
            slot=slot.slot,
            attempt=slot.attempt,
            status=status,
            reward=float(slot.slot % 2 and slot.group_index % 3) if versions else None,  # one group in three is alike
            turns=(turn,) if versions else (),
        )


def draw(position: int) -> TaskDraw:
    """Every fourth task repeats the one before; after six tasks they repeat, in the next epoch."""
    epoch, place = divmod(position, 8)
    return TaskDraw(task=task(f"task-{place - place // 4}"), epoch=epoch + 1)


@contextmanager
def factory(config: RolloutConfig, *, steps: int, rules: Rules = RIGHT) -> Iterator[Factory]:
    place = MEMORY if MEMORY.is_dir() else None
    with TemporaryDirectory(dir=place) as folder, Ledger.open(Path(folder) / "ledger.db") as ledger:
        yield Factory(config, Trainer(config, steps, ledger), ledger, rules)


@st.composite
def configs(draw: st.DrawFn) -> RolloutConfig:
    groups_per_step, group_size = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    max_staleness = draw(st.integers(0, 2))
    window = (max_staleness + 1) * groups_per_step * group_size
    return RolloutConfig(
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_staleness=max_staleness,
        concurrency=draw(st.integers(group_size, window)),
        max_attempts=draw(st.integers(1, 2)),
        max_resamples=draw(st.integers(0, 2)),
    )


@settings(deadline=None, max_examples=25)
@given(configs(), st.lists(st.integers(0, 10_000), max_size=100))
def test_no_trained_token_is_too_stale_and_every_step_is_reached(config: RolloutConfig, choices: list[int]) -> None:
    with factory(config, steps=2) as here:
        for choice in choices:
            if here.is_done:
                break
            moves = here.moves()
            moves[choice % len(moves)]()
        here.run(Random(0), failing=False)
        assert here.ledger.progress().consumed == 2 * config.groups_per_step
        assert 0 <= min(here.trainer.staleness) <= max(here.trainer.staleness) <= config.max_staleness


NARROW = RolloutConfig(groups_per_step=2, group_size=2, max_staleness=1, concurrency=8, max_attempts=2)


def worst(rules: Rules, seeds: range) -> int:
    """The highest staleness in some histories."""
    reached = -1
    for seed in seeds:
        with factory(NARROW, steps=4, rules=rules) as here:
            here.run(Random(seed))
            reached = max(reached, *here.trainer.staleness)
        if reached > NARROW.max_staleness:
            break
    return reached


def test_the_bound_holds_where_groups_without_a_signal_are_sampled_again() -> None:
    dropped = 0
    for seed in range(8):
        with factory(NARROW.model_copy(update={"max_resamples": 2}), steps=4) as here:
            here.run(Random(seed))
            assert max(here.trainer.staleness) <= NARROW.max_staleness
            dropped += sum(here.ledger.resampled(step) for step in range(1, 5))
    assert dropped


def test_the_bound_is_reached() -> None:
    assert worst(RIGHT, range(8)) == NARROW.max_staleness


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(extra=1), id="the window is too wide by one"),
        pytest.param(Rules(checks_count=False), id="counted, not checked"),
        pytest.param(Rules(checks_versions=False), id="engines that come back old are believed"),
        pytest.param(Rules(checks_versions=False, asks_version=False), id="any region may have any session"),
        pytest.param(
            Rules(hears_published=True, checks_versions=False, asks_version=False), id="published, not served"
        ),
    ],
)
def test_a_rule_that_is_slightly_wrong_is_noticed(rules: Rules) -> None:
    assert worst(rules, range(60)) > NARROW.max_staleness
