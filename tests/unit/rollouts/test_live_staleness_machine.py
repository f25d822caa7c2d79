"""The proof in docs/control.md for two classes: simulated groups, users' sessions, loads of the trainer, a real ledger.

The possible events happen in random order: admitting, sampling, grading; sessions that begin, continue under new
weights and are offered late, twice, or by a process with old counts; training, loading weights instead of a batch,
publishing, releasing. No trained token may be more than O updates old, every step must be reached, and each way in
which the rule could be slightly wrong must be detected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.live import LiveConfig
from etude.config.rollouts import RolloutConfig
from etude.ledger import rows
from etude.ledger.changes import LiveAdmission
from etude.ledger.ledger import LIVE, TRAIN, Ledger, OpenSlot, TaskDraw
from etude.rollouts.admission import Admission
from etude.types import Finish, Observation, ObservedSession, Rollout, RolloutStatus, Turn
from ledgers import task

MEMORY = Path("/dev/shm")
"""Where a ledger is fastest; hundreds are made."""
MOST_MOVES = 3000
MOST_OPEN = 6
"""Sessions under way."""
STEPS = 6
Move = Callable[[], None]


@dataclass(frozen=True)
class Rules:
    """The window's rules; each field can be set to a wrong rule."""

    oldest: bool = True
    """A session's version is its oldest token's, not its newest."""
    checks: bool = True
    """The ledger compares with the window when it admits a session."""
    by_class: bool = True
    """Each class has a window of its own, not both one of all groups."""
    counts_loads: bool = True
    """A step that loads weights is no batch."""


RIGHT = Rules()


@dataclass
class Product:
    """Trainer, users and simulated rollouts of one run, and the events that may happen to them."""

    config: RolloutConfig
    live: LiveConfig
    ledger: Ledger
    rules: Rules
    max_loads: int = 1
    claimed: int = 0
    published: int = 0
    committed: int = 0
    released: int = 0
    """Version that users have."""
    loads: list[int] = field(default_factory=list)
    """Steps that loaded weights."""
    slots: list[OpenSlot] = field(default_factory=list)
    sessions: dict[str, list[int]] = field(default_factory=dict)
    """Session → versions of its tokens."""
    number: int = 0
    ages: dict[str, list[int]] = field(default_factory=lambda: {LIVE: [], TRAIN: []})
    """Class → updates between each trained token and the weights that were trained."""
    stale: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self.config, steps=STEPS, live=self.live)

    @property
    def is_done(self) -> bool:
        return self.committed == STEPS

    def moves(self) -> list[Move]:
        may_claim = self.claimed < STEPS and self.claimed - self.committed < 2 and self.claimed <= self.published + 1
        moves: list[Move] = [
            *[self.claim] * (4 * may_claim),
            *[self.load] * (may_claim and len(self.loads) < self.max_loads and self.claimed < STEPS - 1),
            *[self.publish] * (self.published < self.claimed),
            *[self.commit] * (self.committed < self.published),
            *[self.release] * (self.released < self.published),
            *[self.admit] * 2,
            *[self.begin] * (2 * (len(self.sessions) < MOST_OPEN)),
        ]
        moves += [partial(self.grade, slot) for slot in self.slots]
        for name in self.sessions:
            moves += [partial(self.go_on, name), partial(self.offer, name), partial(self.offer_twice, name)]
        return moves

    def run(self, random: Random) -> None:
        """Let random events happen until the last step is done."""
        for _ in range(MOST_MOVES):
            if self.is_done:
                return
            random.choice(self.moves())()
        raise AssertionError("things happen, and lead nowhere")

    def updates(self, version: int) -> int:
        """Optimiser updates behind a version."""
        return version - sum(step <= version for step in self.loads)

    def claim(self) -> None:
        step = self.claimed + 1
        batch = self.updates(step - 1)
        plan = self.admission.plan
        groups = self.ledger.claim_batch(step, plan.groups(TRAIN, batch), plan.groups(LIVE, batch))
        if groups is None:
            return
        self.claimed = step
        for group in groups:
            versions = [version for one in group.rollouts for turn in one.turns for version in turn.versions.tolist()]
            self.ages[LIVE if group.is_live else TRAIN] += [batch - self.updates(version) for version in versions]

    def load(self) -> None:
        """A step that continues with released weights and trains on nothing."""
        step = self.claimed + 1
        self.ledger._db.write(lambda db: rows.insert_step(db, step))
        self.loads.append(step)
        self.claimed = step

    def publish(self) -> None:
        self.published += 1

    def commit(self) -> None:
        self.committed += 1
        self.ledger.commit_step(self.committed)

    def release(self) -> None:
        """Release a version between the current one and the newest, since not every version is a candidate."""
        self.released = min(self.published, self.released + 1 + self.number % 2)

    def window(self, version: int, purpose: str) -> int:
        loads = self.ledger.loads.count(version) if self.rules.counts_loads else 0
        return self.admission.window(version, loads, purpose)

    def admit(self) -> None:
        version = self.published
        loads = self.ledger.loads.count(version)
        self.slots += self.ledger.admit_next(
            draw, size=2, version=version, kept_below=self.admission.window(version, loads)
        ) or []  # fmt: skip

    def grade(self, slot: OpenSlot) -> None:
        self.slots.remove(slot)
        rollout = self.rollout(f"{slot.group_index}.{slot.slot}", [slot.admitted_version, self.published])
        self.ledger.record(replace(rollout, group_index=slot.group_index, slot=slot.slot), TRAIN)

    def begin(self) -> None:
        self.sessions[f"s{self.number}"] = [self.released]
        self.number += 1

    def go_on(self, name: str) -> None:
        self.sessions[name].append(self.released)

    def offer(self, name: str) -> None:
        self.admit_live(name, self.sessions.pop(name))

    def offer_twice(self, name: str) -> None:
        """The process dies behind the ledger's commit, and its successor offers it again."""
        versions = self.sessions.pop(name)
        self.admit_live(name, versions)
        assert self.admit_live(name, versions) is LiveAdmission.DUPLICATE

    def admit_live(self, name: str, versions: list[int]) -> LiveAdmission:
        version = min(versions) if self.rules.oldest else max(versions)
        below = self.window(version, LIVE)
        if not self.rules.by_class:
            below += self.window(version, TRAIN) - self.ledger.progress(TRAIN).usable
        if not self.rules.checks:
            below = self.admission.groups_needed(0, LIVE)
        observation = Observation(user="u", day=0, template="", arm="", prompt_tokens=1)
        observed = ObservedSession(session_id=name, observation=observation, ended_at=0.0, sampled_tokens=(1,))
        rollout = replace(self.rollout(name, versions), observation=observation)
        outcome = self.ledger.live.admit(rollout, observed, version=version, kept_below=below)
        self.stale += outcome is LiveAdmission.STALE
        return outcome

    def rollout(self, name: str, versions: list[int]) -> Rollout:
        ids = np.ones(len(versions), np.int32)
        turn = Turn(
            prompt_ids=ids[:1], completion_ids=ids, logprobs=-ids.astype(np.float32),
            versions=np.array(versions, np.int32), finish=Finish.STOP,
        )  # fmt: skip
        return Rollout(
            rollout_id=name, group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=(turn,)
        )


def draw(position: int) -> TaskDraw:
    return TaskDraw(task=task(f"task-{position}"))


@contextmanager
def product(config: RolloutConfig, live: LiveConfig, rules: Rules = RIGHT, *, max_loads: int = 1) -> Iterator[Product]:
    place = MEMORY if MEMORY.is_dir() else None
    with TemporaryDirectory(dir=place) as folder, Ledger.open(Path(folder) / "ledger.db") as ledger:
        yield Product(config, live, ledger, rules, max_loads)


@st.composite
def recipes(draw: st.DrawFn) -> tuple[RolloutConfig, LiveConfig]:
    first, staleness = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    config = RolloutConfig(groups_per_step=first, group_size=2, max_staleness=staleness, concurrency=2)
    live = LiveConfig(
        groups_per_step=draw(st.integers(1, 3)),
        simulated_groups_per_step=draw(st.integers(0, 2)),
        after_steps=draw(st.integers(0, 3)),
    )
    return config, live


@settings(deadline=None, max_examples=25)
@given(recipes(), st.lists(st.integers(0, 10_000), max_size=100), st.integers(0, 2))
def test_no_trained_token_is_too_stale_and_every_step_is_reached(
    recipe: tuple[RolloutConfig, LiveConfig], choices: list[int], max_loads: int
) -> None:
    config, live = recipe
    with product(config, live, max_loads=max_loads) as here:
        for choice in choices:
            if here.is_done:
                break
            moves = here.moves()
            moves[choice % len(moves)]()
        here.run(Random(0))
        batches = STEPS - len(here.loads)
        for purpose in (TRAIN, LIVE):
            assert here.ledger.progress(purpose).consumed == here.admission.plan.before(purpose, batches)
            assert all(0 <= age <= config.max_staleness for age in here.ages[purpose])


NARROW = RolloutConfig(groups_per_step=2, group_size=2, max_staleness=1, concurrency=4)
MIXED = LiveConfig(groups_per_step=2, simulated_groups_per_step=1, after_steps=1)


def worst(rules: Rules, seeds: range) -> int:
    """The highest age of a trained live token in some histories."""
    reached = -1
    for seed in seeds:
        with product(NARROW, MIXED, rules, max_loads=2) as here:
            here.run(Random(seed))
            reached = max(reached, *here.ages[LIVE])
        if reached > NARROW.max_staleness:
            break
    return reached


def test_the_bound_is_reached() -> None:
    assert worst(RIGHT, range(8)) == NARROW.max_staleness


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(oldest=False), id="a session is as fresh as its newest token"),
        pytest.param(Rules(checks=False), id="sessions have no window"),
        pytest.param(Rules(by_class=False), id="both classes have one window"),
        pytest.param(Rules(counts_loads=False), id="a load counts as a batch"),
    ],
)
def test_a_rule_that_is_slightly_wrong_is_noticed(rules: Rules) -> None:
    assert worst(rules, range(60)) > NARROW.max_staleness
