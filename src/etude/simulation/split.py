"""Simulation of a fleet at a reduced scale, and the cheapest split of GPUs between training and sampling.

    fleet ──▶ a few of its engines and groups, times corrected for that ──▶ simulation ──▶ figures
    steps or dollars per hour ──▶ fewest GPUs by calculation ──▶ simulation ──▶ more of the busier side, simulated again

**Reduced scale.** A fleet of E engines that make G groups a step is simulated as E' engines and G' groups. A sequence
in an engine then represents f = (G / G') · (E' / E): the engine has a fraction 1/f of its places, and each takes f
times as much of a step, so that a full engine decodes at the real pace. The trainer takes G / G' times as long per
token. Shares of time, seconds of a step and staleness stay the same, up to the noise of fewer rollouts; the maximum
number of sandboxes is scaled back. A rollout's turns beyond :data:`MOST_TURNS` are merged with others; their pauses
remain. Long steps are simulated with virtual seconds that represent several real ones, so that a step takes at most
:data:`STEP_S`; constant delays of the production code, such as half a second, then weigh that much more.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, TypeAlias

from etude.config.recipe import RunConfig
from etude.dashboard.statistics import Estimate, mean_over_seeds
from etude.errors import ConfigError
from etude.simulation.calibration import RunCalibration
from etude.simulation.figures import FULL, HOUR_S, RunFigures, StepRecords
from etude.simulation.priced import DAY_H, Fleet, gpu_price
from etude.simulation.run import SimulatedEvents, Stop, simulate, skipped_steps
from etude.simulation.steady import BATCHES, SteadyState, batch_steps, batches_of
from etude.simulation.workload import STAGES, Workload
from etude.telemetry.events import Logged

MOST_ROLLOUTS = 64
"""Maximum number of rollouts of a simulated step."""
MOST_TURNS = 8
STEPS = 6
"""Minimum number of counted steps, in addition to those in which the pipeline fills and drains."""
MOST_STEPS = 16
"""Maximum number of them without a number of hours, where a round of the workload has more."""
STEP_S = 30.0
"""Maximum number of virtual seconds of a step, by calculation."""
POLL_S = 0.1
"""Polling interval of simulated processes."""
ROUNDS = 4
"""Maximum number of simulations of a search after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationExtent:
    """Limits of a simulation; by default, one round of the workload is simulated."""

    hours: float | None = None
    """The simulated time."""
    precision: float | None = None
    """The simulation ends as soon as every interval of its :class:`~etude.simulation.steady.SteadyState` is narrower,
    each way, than this share of its mean.
    """
    batches: int | None = None
    """Number of batches to simulate, after a first one that is left out."""

    def steps(self, round_steps: int, least_step_s: float) -> int:
        """Number of steps to count, if a round of the workload has ``round_steps``."""
        if self.hours is not None:
            return max(STEPS, math.ceil(self.hours * HOUR_S / least_step_s))
        if self.batches is not None:
            return (self.batches + 2) * batch_steps(round_steps)
        return max(STEPS, min(MOST_STEPS, round_steps))


ONE_ROUND = SimulationExtent()
SEARCHED = SimulationExtent(batches=6)
"""Extent of each simulation of a search: pairs of batches tell splits apart whose steps differ by some per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFleet:
    """A fleet at the scale at which it is simulated."""

    config: RunConfig
    calibration: RunCalibration
    engines: tuple[int, ...]
    factor: float
    """Groups of the fleet per simulated group."""
    second_s: float
    """Real seconds per simulated second."""

    @property
    def round_steps(self) -> int:
        """Number of steps in which every group of the workload is drawn once."""
        return steps_of_round(self.calibration.workload, self.config.rollouts.groups_per_step)

    @property
    def tokens_per_step(self) -> float:
        """Expected number of sampled tokens of a simulated step."""
        each = fmean(work.turns * work.turn_tokens for work in self.calibration.workload.rollouts)
        return self.config.rollouts.rollouts_per_step * each

    @classmethod
    def of(cls, fleet: Fleet, extent: SimulationExtent = ONE_ROUND) -> "SmallFleet":
        """Scale a fleet down for an extent of simulation; a small fleet is unchanged."""
        rollouts, size = fleet.config.rollouts, fleet.config.rollouts.group_size
        groups = min(rollouts.groups_per_step, max(4, MOST_ROLLOUTS // size))
        factor = rollouts.groups_per_step / groups
        engines = tuple(max(1, round(count / factor)) for count in fleet.engines)
        calibration = fleet.calibration
        whole = sum(fleet.engines)
        trainer = replace(calibration.trainer, token_s=calibration.trainer.token_s * factor)
        merged, call_s = _merged(calibration)
        small = rollouts.model_copy(
            update={
                "groups_per_step": groups,
                "concurrency": max(size, round(rollouts.concurrency / factor)),
                "max_resamples": 0,
            }
        )
        least_s = least_step_s(fleet)
        counted = extent.steps(steps_of_round(merged, groups), least_s)
        steps = fleet.config.trainer.model_copy(update={"steps": counted + 2 * skipped_steps(fleet.config)})
        second_s = max(1.0, least_s / STEP_S)
        in_the_small = replace(
            calibration,
            engine=calibration.engine.with_places(whole / (factor * sum(engines))),
            trainer=trainer,
            workload=merged,
            call_s=call_s,
        )
        return cls(
            config=fleet.config.model_copy(update={"rollouts": small, "trainer": steps}),
            calibration=_faster(in_the_small, second_s),
            engines=engines,
            factor=factor,
            second_s=second_s,
        )


def steps_of_round(workload: Workload, groups_per_step: int) -> int:
    """Number of steps that draw every group of a workload."""
    return -(-len(workload.groups) // groups_per_step)


def _merged(calibration: RunCalibration) -> tuple[Workload, float]:
    """Rollouts with fewer turns, and the seconds per call that compensate for them."""
    workload = calibration.workload
    groups = workload.groups
    turns = sum(work.turns for group in groups for work in group)
    few = tuple(tuple(replace(work, turns=min(work.turns, MOST_TURNS)) for work in group) for group in groups)
    left = sum(work.turns for group in few for work in group)
    return replace(workload, groups=few), calibration.call_s * turns / left


def _faster(calibration: RunCalibration, factor: float) -> RunCalibration:
    """The calibration with all times divided by a factor."""
    return replace(
        calibration,
        engine=calibration.engine.scaled(1 / factor),
        trainer=calibration.trainer.scaled(1 / factor),
        swap_s=calibration.swap_s / factor,
        call_s=calibration.call_s / factor,
        workload=calibration.workload.scaled(dict.fromkeys(STAGES, 1 / factor)),
    )


def simulate_fleet(fleet: Fleet, *, seed: int = 0, extent: SimulationExtent = ONE_ROUND) -> "FleetSimulation":
    """Simulate a fleet at a reduced scale."""
    small, hours, precision = SmallFleet.of(fleet, extent), extent.hours, extent.precision
    second_s, skipped = small.second_s, skipped_steps(fleet.config)
    regions = [
        replace(
            region,
            engines=n,
            rtt_s=region.rtt_s / second_s,
            arrival_s=region.arrival_s / second_s,
            lent=region.lent and region.lent.scaled(second_s),
        )
        for region, n in zip(fleet.regions, small.engines, strict=True)
    ]
    until_s = None if hours is None else hours * HOUR_S / second_s
    day_s = DAY_H * HOUR_S / second_s if any(region.lent for region in regions) else None
    records, least = StepRecords(), extent.batches or BATCHES

    def batched(logged: Sequence[Logged]) -> list[RunFigures]:
        records.follow(logged)
        return batches_of(records, skipped=skipped, round_steps=small.round_steps, least=least, day_s=day_s)

    def is_enough(logged: Sequence[Logged]) -> bool:
        batches = batched(logged)
        return bool(batches) and SteadyState.of_batches(batches, small.tokens_per_step).precision <= (precision or 0.0)

    stop = Stop(until_s=until_s, is_enough=None if precision is None else is_enough)
    events = simulate(small.config, small.calibration, regions, seed=seed, poll_s=POLL_S, stop=stop)
    figures, state = RunFigures.of_events(events.logged, skipped=skipped), None
    batches = [] if precision is None and extent.batches is None else batched(events.logged)
    if batches:
        state = SteadyState.of_batches(batches, small.tokens_per_step)
        figures = replace(
            figures,
            step_s=state.step_s.mean,
            trainer_busy=state.trainer_busy.mean,
            engine_busy=state.engine_busy.mean,
            engine_s=state.engine_busy.mean * state.step_s.mean * sum(small.engines),
        )
    return FleetSimulation(
        figures=replace(figures, step_s=figures.step_s * second_s, engine_s=figures.engine_s * second_s),
        events=events,
        small=small,
        steady=state,
        batches_s=tuple(batch.step_s * second_s for batch in batches),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSimulation:
    """The simulation of a fleet."""

    figures: RunFigures
    """Figures of the fleet, in real seconds."""
    events: SimulatedEvents
    small: SmallFleet
    steady: SteadyState | None = None
    """Intervals of the figures in virtual seconds; ``None`` without a precision, or if there were too few steps."""
    batches_s: tuple[float, ...] = ()
    """Seconds of a step in each batch of ``steady``."""

    def includes_step(self, step_s: float) -> bool:
        """True if the 95 % interval of a step's time includes ``step_s``; needs ``steady``."""
        assert self.steady is not None, "a simulation without batches has no interval"
        mean_s = self.figures.step_s
        return abs(step_s - mean_s) <= self.steady.step_s.relative * mean_s


def steps_by_hour(events: SimulatedEvents, small: SmallFleet) -> dict[int, float]:
    """Hour of the day → steps in that hour, averaged over the days in which it was simulated."""
    ended_h = [each.at_s * small.second_s / HOUR_S for each in events.steps]
    counts = Counter(int(at_h % DAY_H) for at_h in ended_h)
    return {hour: count / max(1.0, -(-(ended_h[-1] - hour) // DAY_H)) for hour, count in sorted(counts.items())}


def trainer_s(fleet: Fleet) -> float:
    """Seconds of the trainer per step, by calculation."""
    trainer = fleet.calibration.trainer
    sampled = fleet.rollouts * fleet.plan.workload.sampled_tokens
    return trainer.step_s(sampled) + trainer.save_s


def engine_s(fleet: Fleet) -> float:
    """Seconds of a step's rollouts on all engines, if all places are taken, by calculation."""
    engine, work = fleet.calibration.engine, fleet.plan.workload
    token_s = engine.decode_s(engine.max_running) / engine.max_running
    each_s = work.sampled_tokens * token_s + work.prompt_tokens * engine.prompt_s
    return fleet.rollouts * each_s / sum(fleet.engines)


def least_step_s(fleet: Fleet) -> float:
    """Seconds of a step without any waiting."""
    busy_s = trainer_s(fleet), engine_s(fleet)
    return max(busy_s) if fleet.config.rollouts.max_staleness else sum(busy_s)


Goal: TypeAlias = tuple[Literal["steps", "usd"], float]
"""Steps per hour to reach with the least money, or dollars per hour to spend on the most steps."""


def parse_goal(text: str) -> Goal:
    """The goal of ``steps=6`` or ``usd=2500``. Raises :class:`~etude.errors.ConfigError`."""
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if name == "steps" and value > 0:
        return "steps", value
    if name == "usd" and value > 0:
        return "usd", value
    raise ConfigError(f"--search {text!r}: expected steps=N or usd=N, each for an hour, such as steps=6")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCandidate:
    """A split of GPUs that a search has simulated."""

    fleet: Fleet
    simulation: FleetSimulation

    @classmethod
    def of(cls, fleet: Fleet, seed: int) -> "SplitCandidate":
        """Simulate a split, on the same rollouts as every other one of the seed."""
        return cls(fleet=fleet, simulation=simulate_fleet(fleet, seed=seed, extent=SEARCHED))

    @property
    def steps_per_hour(self) -> float:
        """Optimiser steps per hour."""
        return self.simulation.figures.steps_per_hour

    def longer_than(self, other: "SplitCandidate") -> Estimate:
        """The share by which its step is longer than another one's, from pairs of batches of the same rollouts."""
        pairs = zip(self.simulation.batches_s, other.simulation.batches_s, strict=True)
        return mean_over_seeds([mine_s / other_s - 1 for mine_s, other_s in pairs])


def search(fleet: Fleet, goal: Goal, *, seed: int = 0) -> tuple[SplitCandidate, list[SplitCandidate]]:
    """The cheapest split for the given steps per hour, or the fastest one for the given dollars per hour, and all other
    splits that were simulated.

    Raises :class:`~etude.errors.ConfigError` if the goal cannot be reached.
    """
    if not fleet.config.rollouts.max_staleness:
        raise ConfigError("--search needs rollouts.max_staleness of 1 or more: else both sides wait for each other")
    kind, value = goal
    tried = _enlarged(fleet, value, seed) if kind == "steps" else _shifted(fleet, value, seed)
    chosen = tried[-1] if kind == "steps" else max(tried, key=lambda each: each.steps_per_hour)
    return chosen, [each for each in tried if each is not chosen]


def _enlarged(fleet: Fleet, steps_h: float, seed: int) -> list[SplitCandidate]:
    """Candidates of growing size; the last one makes ``steps_h`` steps an hour, unless there were too many."""
    tried = [SplitCandidate.of(split_for(fleet, HOUR_S / steps_h), seed)]
    while len(tried) <= ROUNDS and tried[-1].steps_per_hour < steps_h:
        tried.append(SplitCandidate.of(_larger(tried[-1].fleet, tried[-1].simulation.figures), seed))
    return tried


def _shifted(fleet: Fleet, usd_h: float, seed: int) -> list[SplitCandidate]:
    """Candidates for the same money, each with more of the side that is busier in the one before, while steps become
    shorter.
    """
    tried = [SplitCandidate.of(split_within(fleet, usd_h), seed)]
    while len(tried) <= ROUNDS:
        before = tried[-1]
        moved = _moved(before.fleet, before.simulation.figures, usd_h)
        if moved.ranks in [each.fleet.ranks for each in tried]:
            break
        tried.append(SplitCandidate.of(moved, seed))
        if tried[-1].steps_per_hour <= before.steps_per_hour:
            break
    return tried


def _larger(fleet: Fleet, figures: RunFigures) -> Fleet:
    """A fleet with more of the busier side: rollouts end unevenly, which the calculation ignores."""
    if figures.engine_busy >= figures.trainer_busy:
        return _split(fleet, fleet.ranks, (sum(fleet.engines) + 1) / sum(fleet.engines))
    return _split(fleet, fleet.ranks + _machines(fleet, 1 / 10), 1.0)


def _moved(fleet: Fleet, figures: RunFigures, usd_h: float) -> Fleet:
    """The fleet with more of the busier side for the same money, or the same one if that is impossible."""
    change = _machines(fleet, 1 / 40)
    ranks = fleet.ranks + (change if figures.trainer_busy > figures.engine_busy else -change)
    whole = sum(fleet.engines)
    affordable = (
        split
        for engines in range(2 * whole, 0, -1)
        if ranks > 0 and gpus_usd_h(split := _split(fleet, ranks, engines / whole)) <= usd_h
    )
    return next(affordable, fleet)


def _machines(fleet: Fleet, share: float) -> int:
    """A share of the GPUs that train, in whole machines."""
    machine = fleet.plan.assumptions.machine_gpus
    return max(1, int(fleet.ranks * share) // machine) * machine


def split_for(fleet: Fleet, step_s: float) -> Fleet:
    """The smallest fleet in which each side is busy for :data:`~etude.simulation.figures.FULL` of a step of ``step_s``.

    The trainer grows by whole machines, engines in proportion to those of the regions. Raises
    :class:`~etude.errors.ConfigError` if no number of GPUs is enough.
    """
    machine, room_s = fleet.plan.assumptions.machine_gpus, FULL * step_s
    trainer = fleet.calibration.trainer
    sampled_s = fleet.rollouts * fleet.plan.workload.sampled_tokens * trainer.token_s * fleet.ranks
    fixed_s = trainer.fixed_s * fleet.ranks
    left_s = room_s - trainer.save_s
    if left_s <= 0:
        raise ConfigError(f"a step of {step_s:.1f} s is shorter than what is between two steps (assumptions.save_s)")
    ranks = max(1, -(-(sampled_s + fixed_s) // left_s))
    needed = engine_s(fleet) * sum(fleet.engines) / room_s
    return _split(fleet, int(-(-ranks // machine) * machine), needed / sum(fleet.engines))


def split_within(fleet: Fleet, usd_h: float) -> Fleet:
    """The fleet with the most steps per hour for ``usd_h``. Raises :class:`~etude.errors.ConfigError`."""
    low_s, high_s = 1.0, 30 * 24 * HOUR_S
    cheapest = split_for(fleet, high_s)
    if gpus_usd_h(cheapest) > usd_h:
        raise ConfigError(
            f"--search usd={usd_h:g}: the smallest fleet of this plan, {cheapest.ranks} GPUs that train and "
            f"{cheapest.sampling_gpus} that sample, costs {gpus_usd_h(cheapest):.0f} dollars an hour"
        )
    low_s += fleet.calibration.trainer.save_s / FULL
    for _ in range(40):
        middle_s = (low_s * high_s) ** 0.5
        low_s, high_s = (low_s, middle_s) if gpus_usd_h(split_for(fleet, middle_s)) <= usd_h else (middle_s, high_s)
    return split_for(fleet, high_s)


def gpus_usd_h(fleet: Fleet) -> float:
    """Dollars per hour of all GPUs."""
    plan = fleet.plan
    trainer = fleet.ranks * gpu_price(fleet, plan.trainer, plan.trainer_market)
    return trainer + fleet.sampling_gpus * gpu_price(fleet, plan.engine, plan.engine_market)


def _split(fleet: Fleet, ranks: int, factor: float) -> Fleet:
    """The fleet with ``ranks`` and ``factor`` times the engines, rounded up per region; rollouts fill the places,
    within the staleness window.
    """
    engines = tuple(max(1, int(-(-count * factor // 1))) for count in fleet.engines)
    rollouts = fleet.config.rollouts
    window = (rollouts.max_staleness + 1) * rollouts.rollouts_per_step
    concurrency = max(rollouts.group_size, min(window, sum(engines) * fleet.config.engine.max_running))
    config = fleet.config.model_copy(update={"rollouts": rollouts.model_copy(update={"concurrency": concurrency})})
    return replace(fleet, config=config, ranks=ranks, engines=engines)
