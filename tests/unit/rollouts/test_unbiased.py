"""Late and lost rollouts do not bias learning: the real scheduler, and a policy whose good rollouts are long.

The policy is one coin: with probability P_LONG a rollout is long, and long ones succeed more often. The gradient of the
expected reward by the coin's logit θ, p = σ(θ), is known, g = p(1 − p)(r_long − r_short), and so is each rollout's
score, s = a − p. An estimate is a mean over groups of Σ A·s / (G − 1); its confidence interval is that of the mean.
Legend: G rollouts per group, K of them graded.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from etude.config.rollouts import RolloutConfig
from etude.errors import SandboxError
from etude.ledger.ledger import Ledger
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import RolloutFakes, run_virtually
from etude.telemetry.events import RolloutClosed
from etude.telemetry.log import EventLog, EventReader
from etude.trainer.batching.advantage import group_advantages, group_weight
from etude.trainer.batching.batch import build_batch
from etude.types import Finish, Group, Rollout, Task, Turn
from ledgers import new_task
from records import TASK, make_rollout

P_LONG = 0.1
SUCCESS = {True: 0.8, False: 0.2}
LENGTH_S = {True: 1.0, False: 0.1}
"""Median; both vary by a factor of two or so."""
GRADIENT = P_LONG * (1 - P_LONG) * (SUCCESS[True] - SUCCESS[False])
GROUPS, SIZE, STEPS = 16, 8, 8
SIGMAS = 4.0
"""Half width of the confidence intervals, in standard errors: a chance of 1 in 16,000 that one misses."""
MEMORY = Path("/dev/shm")
"""Where a ledger is fastest."""
ONE = np.ones(1, np.int32)
NEWEST = 99 * ONE
"""A weight version that is never too old."""
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=NEWEST, finish=Finish.STOP)


@dataclass
class Coin:
    """Plays and grades rollouts; machines die at a rate per second, or refuse a share of rollouts at once."""

    random: Random
    fakes: RolloutFakes
    deaths_per_s: float = 0.0
    refused: float = 0.0

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        is_long = self.random.random() < P_LONG
        seconds = LENGTH_S[is_long] * self.random.lognormvariate(0.0, 0.4)
        dies_s = self.random.expovariate(self.deaths_per_s) if self.deaths_per_s else math.inf
        if self.random.random() < self.refused:
            dies_s = 0.0
        await asyncio.sleep(min(seconds, dies_s))
        if dies_s < seconds:
            raise SandboxError("the machine died")
        self.fakes.sessions.capture(session, TURN)
        return HarnessResult(reason="submit", counts={"long": int(is_long)})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        return Grade(value=float(self.random.random() < SUCCESS[bool(result.counts["long"])]), parts={})


@dataclass(frozen=True)
class History:
    """The batches that a run trained on, and every attempt that it made."""

    batches: list[list[Group]]
    attempts: list[RolloutClosed]

    @property
    def groups(self) -> list[Group]:
        return list(itertools.chain.from_iterable(self.batches))

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


def history(
    seed: int, *, steps: int = STEPS, deaths_per_s: float = 0.0, refused: float = 0.0, max_attempts: int = 8
) -> History:
    """Run the real dispatcher over a real ledger, with a trainer that takes no time."""
    config = RolloutConfig(
        groups_per_step=GROUPS,
        group_size=SIZE,
        max_staleness=0,
        concurrency=GROUPS * SIZE,
        max_attempts=max_attempts,
    )

    async def unused(task: Task, session: Session) -> str:
        raise NotImplementedError

    fakes = RolloutFakes(unused, lambda task: 0.0)
    coin = Coin(Random(seed), fakes, deaths_per_s=deaths_per_s, refused=refused)
    place = MEMORY if MEMORY.is_dir() else None
    with TemporaryDirectory(dir=place) as name, Ledger.open(Path(name) / "ledger.db") as ledger:
        with EventLog(Path(name) / "events", "rollouts") as events:
            dispatcher = Dispatcher(
                config,
                ledger=ledger,
                draw=new_task,
                context=replace(fakes.context, harness=coin, grader=coin),
                events=events,
                serving_version=lambda: ledger.progress().steps_done,
            )
            batches = run_virtually(_train(dispatcher, ledger, steps))
        attempts = [logged.event for logged in EventReader(Path(name) / "events").new()]
    return History(batches, [event for event in attempts if isinstance(event, RolloutClosed)])


async def _train(dispatcher: Dispatcher, ledger: Ledger, steps: int) -> list[list[Group]]:
    training = asyncio.create_task(dispatcher.train(steps))
    batches = []
    for step in range(1, steps + 1):
        while (batch := ledger.claim_batch(step, GROUPS)) is None:
            await asyncio.sleep(0.1)
        ledger.commit_step(step)
        batches.append(batch)
    await training
    return batches


def estimate(groups: Sequence[Group]) -> list[float]:
    """One unbiased estimate of the gradient per group, as the trainer would weigh it."""
    return [_estimate(group.rollouts) for group in groups]


def _estimate(rollouts: Sequence[Rollout]) -> float:
    advantages_K = group_advantages(np.array([rollout.reward for rollout in rollouts], np.float32))
    scores_K = np.array([rollout.counts["long"] - P_LONG for rollout in rollouts])
    weight = group_weight("mean", compared=len(rollouts), graded=len(rollouts), lost=SIZE - len(rollouts))
    return float(weight * (advantages_K * scores_K).sum() / (SIZE - 1))


def first_finished(batches: Sequence[Sequence[Group]]) -> list[Group]:
    """The groups of a biased rule: start more groups than needed, and train on the half that ends first."""
    return [group for batch in batches for group in sorted(batch, key=_seconds)[: len(batch) // 2]]


def in_time(groups: Sequence[Group], deadline_s: float) -> list[Group]:
    """The groups of a biased rule: drop rollouts that exceed a deadline."""
    cut = [replace(g, rollouts=tuple(r for r in g.rollouts if r.seconds <= deadline_s)) for g in groups]
    return [group for group in cut if len(group.rollouts) > 1]


def _seconds(group: Group) -> float:
    return max(rollout.seconds for rollout in group.rollouts)


def off(values: Sequence[float], truth: float) -> float:
    """Distance between the mean of ``values`` and the truth, in standard errors."""
    return abs(fmean(values) - truth) / (stdev(values) / math.sqrt(len(values)))


@pytest.fixture(scope="module", params=[1, 2, 3])
def lossy(request: pytest.FixtureRequest) -> Iterator[History]:
    """A run that loses one slot in ten for good, independent of its content."""
    yield history(request.param, refused=0.1, max_attempts=1)


def test_the_estimate_is_unbiased_though_slots_are_lost(lossy: History) -> None:
    assert len(lossy.groups) == GROUPS * STEPS
    assert {len(group.rollouts) + group.lost for group in lossy.groups} == {SIZE}
    assert max(group.lost for group in lossy.groups) > 1
    assert off(estimate(lossy.groups), GRADIENT) < SIGMAS
    assert off([float(rollout.counts["long"]) for rollout in lossy.rollouts], P_LONG) < SIGMAS


@pytest.mark.parametrize(
    "naive",
    [lambda run: first_finished(run.batches), lambda run: in_time(run.groups, 0.8)],
    ids=["first finished, first trained", "late ones are dropped"],
)
def test_naive_rules_are_biased_on_the_same_rollouts(lossy: History, naive: Callable[[History], list[Group]]) -> None:
    estimates = estimate(naive(lossy))
    assert off(estimates, GRADIENT) > SIGMAS
    assert fmean(estimates) < 0.6 * GRADIENT


def test_deaths_that_hit_long_rollouts_bias_who_survives_and_known_weights_undo_it() -> None:
    """Rule 3 of docs/control.md, at a rate of deaths far beyond its assumption."""
    run = history(4, steps=4, deaths_per_s=1.0)
    long = np.array([float(rollout.counts["long"]) for rollout in run.rollouts])
    assert off(long.tolist(), P_LONG) > SIGMAS
    losses = sum(attempt.status == "failed_infra" for attempt in run.attempts)
    rate = losses / sum(attempt.seconds for attempt in run.attempts)
    assert rate == pytest.approx(1.0, rel=0.2)
    weights = np.exp(rate * np.array([rollout.seconds for rollout in run.rollouts]))
    share = float((weights * long).sum() / weights.sum())
    error = float(np.sqrt((weights**2 * (long - share) ** 2).sum()) / weights.sum())
    assert abs(share - P_LONG) < SIGMAS * error


def test_what_is_tried_again_at_a_deadline_is_out_by_no_more_than_its_share_allows() -> None:
    """Attempts that end because of their content are repeated; this biases what is graded.

    The bias is at most docs/control.md's bound √(ē/(1 − ē)), which the worst case reaches.
    """
    random = np.random.default_rng(0)
    for _ in range(200):
        law, values, ends = random.dirichlet(np.ones(6)), random.standard_normal(6), random.random(6) * random.random()
        share = float(law @ ends)
        graded = law * (1 - ends) / (1 - share)
        deviation = math.sqrt(law @ (values - law @ values) ** 2)
        bias = float(graded @ values - law @ values)
        assert bias == pytest.approx(-float(law @ (values * ends) - (law @ values) * share) / (1 - share))
        assert abs(bias) <= deviation * math.sqrt(share / (1 - share)) * (1 + 1e-9)
    rare = np.array([0.99, 0.01])
    graded = rare * np.array([1.0, 0.0]) / 0.99
    assert rare[1] - graded[1] == pytest.approx(math.sqrt(0.01 * 0.99) * math.sqrt(0.01 / 0.99))


def test_a_group_that_lost_rollouts_weighs_as_much_as_a_whole_one_exactly() -> None:
    """E[Σ A·s] over every outcome of K rollouts, times the weight, is (G − 1)·g for every K, and divided by the batch's
    normaliser, (G − 1)/G · g: every rollout has one token.
    """
    outcomes = [
        (is_long, reward, (P_LONG if is_long else 1 - P_LONG) * (SUCCESS[is_long] if reward else 1 - SUCCESS[is_long]))
        for is_long in (True, False)
        for reward in (1.0, 0.0)
    ]
    planned = 5
    for present in (2, 3, 4, 5):
        total = 0.0
        for drawn in itertools.product(outcomes, repeat=present):
            mean = fmean(reward for _, reward, _ in drawn)
            likelihood = math.prod(chance for *_, chance in drawn)
            total += likelihood * sum((reward - mean) * (is_long - P_LONG) for is_long, reward, _ in drawn)
        weight = group_weight("mean", compared=present, graded=present, lost=planned - present)
        assert weight * total == pytest.approx((planned - 1) * GRADIENT, rel=1e-12)
        graded = tuple(make_rollout(str(slot), TURN, slot=slot, reward=float(slot)) for slot in range(present))
        group = Group(index=0, task=TASK, admitted_version=0, rollouts=graded, lost=planned - present)
        batch = build_batch(1, [group])
        normaliser = batch.num_loss_tokens + batch.num_lost_tokens
        assert weight * total / normaliser == pytest.approx((planned - 1) / planned * GRADIENT, rel=1e-12)
