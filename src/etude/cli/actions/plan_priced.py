"""`etude plan run --hardware`: a plan for GPUs without an earlier run, with its cost.

Owns the reading of the plan's file and the output. Figures are computed by :mod:`etude.simulation.priced` and
:mod:`etude.simulation.split`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from etude.config.loading import apply_override, read_toml
from etude.config.recipe import RunConfig
from etude.config.section import Section
from etude.dashboard import formatting
from etude.dashboard.statistics import Estimate
from etude.dashboard.terminal import DIM, light_table
from etude.errors import ConfigError
from etude.run.hardware import load_gpus
from etude.run.preflight import spec_of_recipe
from etude.run.pretend import resolved_there
from etude.simulation.figures import HOUR_S, RunFigures, bottleneck
from etude.simulation.priced import Costs, Fleet, PricedPlan
from etude.simulation.run import SimulatedEvents
from etude.simulation.split import (
    FleetSimulation,
    Goal,
    SimulationExtent,
    SplitCandidate,
    engine_s,
    gpus_usd_h,
    search,
    simulate_fleet,
    steps_by_hour,
    trainer_s,
)
from etude.simulation.steady import SteadyState
from etude.types import Json


def load_plan(hardware: str, assume: Sequence[str] = ()) -> PricedPlan:
    """The plan of a GPU's name or of a file, with other values of some keys, such as ``workload.turns=40``.

    Raises :class:`~etude.errors.ConfigError`.
    """
    values: dict[str, Any]
    values = {"engine": hardware, "trainer": hardware} if hardware in load_gpus() else _read(Path(hardware))
    for setting in assume:
        apply_override(values, setting, option="--assume", form="KEY=VALUE, such as workload.turns=40")
    try:
        return PricedPlan.model_validate(values, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{hardware}: {key}: {first['msg']}, not {first['input']!r}") from error


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"--hardware {str(file)!r} is neither a GPU ({', '.join(load_gpus())}) nor a file")
    return read_toml(file)


def show_priced(
    config: RunConfig,
    plan: PricedPlan,
    goal: Goal | None,
    seed: int,
    *,
    extent: SimulationExtent,
    as_json: bool,
) -> None:
    """Simulate a plan, for some hours or a few steps, and print it; with a goal, the best split for it."""
    resolved, hours = resolved_there(config), extent.hours
    console = Console(stderr=as_json)
    with console.status("simulating"):
        fleet, others = Fleet.of(resolved, spec_of_recipe(resolved), plan), list[tuple[SplitCandidate, Estimate]]()
        if goal is None:
            simulated = simulate_fleet(fleet, seed=seed, extent=extent)
        else:
            chosen, left = search(fleet, goal, seed=seed)
            fleet, simulated = chosen.fleet, chosen.simulation
            others = [(other, other.longer_than(chosen)) for other in left]
    figures, events, factor = simulated.figures, simulated.events, simulated.small.factor
    shows_hours = hours is not None and (extent.precision is None or any(region.lent for region in fleet.regions))
    by_hour = steps_by_hour(events, simulated.small) if shows_hours else {}
    if as_json:
        hourly = {"steps_by_hour": {str(hour): round(steps, 2) for hour, steps in by_hour.items()}} if by_hour else {}
        inferred = {} if simulated.steady is None else {"intervals": steady_json(simulated.steady)}
        compared = {"others": [other_json(other, longer) for other, longer in others]} if goal is not None else {}
        judged = {"goal": goal_json(goal[1], simulated)} if goal is not None and goal[0] == "steps" else {}
        print(json.dumps(priced_json(fleet, figures, events, factor) | hourly | inferred | judged | compared, indent=2))
        return
    table = light_table("plan", "predicted", broken=["predicted"])
    for label, words in priced_rows(fleet, figures, events, factor):
        table.add_row(label, words)
    if hours is not None:
        table.add_row(*hours_row(fleet, simulated, hours))
    if simulated.steady is not None:
        table.add_row("95% intervals", intervals_words(simulated.steady, len(events.steps)))
    if goal is not None and goal[0] == "steps":
        table.add_row("goal", goal_words(goal[1], simulated))
    for other, longer in others:
        table.add_row("other split", other_words(other, longer))
    if by_hour:
        table.add_row("steps, by hour of day", ", ".join(f"{hour}h {steps:.1f}" for hour, steps in by_hour.items()))
    console.print(table)
    console.print(Text(" ".join(bottleneck(figures))), soft_wrap=True)
    for line in assumptions_of(fleet, factor):
        console.print(Text(line, DIM), soft_wrap=True)


def priced_json(fleet: Fleet, figures: RunFigures, events: SimulatedEvents, factor: float) -> dict[str, Json]:
    """The plan as one JSON object."""
    costs = Costs.of(fleet, figures)
    return {
        "gpus": {"trainer": fleet.ranks, "engines": fleet.sampling_gpus},
        "engines": {region.name: count for region, count in zip(fleet.regions, fleet.engines, strict=True)},
        "step_s": round(figures.step_s, 2),
        "steps_per_hour": round(figures.steps_per_hour, 3),
        "by_arithmetic_s": {"trainer": round(trainer_s(fleet), 2), "engines": round(engine_s(fleet), 2)},
        "busy": {"trainer": round(figures.trainer_busy, 4), "engine": round(figures.engine_busy, 4)},
        "inference_to_training": {
            "gpus": round(fleet.sampling_gpus / fleet.ranks, 3),
            "flops": round(fleet.sampling_flops / fleet.training_flops, 3),
        },
        "staleness": {"mean": round(figures.staleness, 3), "tokens": list(figures.token_ages)},
        "sandboxes_max": round(events.most_sandboxes * factor),
        "delta": {
            "bytes": round(fleet.delta_bytes),
            "wan_bytes_per_step": round(fleet.delta_bytes * fleet.remote_regions),
            "seconds": round(fleet.delta_s, 1),
        },
        "usd": {
            "step": round(costs.usd_step, 2),
            "hour": round(costs.usd_h, 2),
            "engines_hour": round(costs.engine_usd_h, 2),
            "trainer_hour": round(costs.trainer_usd_h, 2),
            "egress_step": round(costs.egress_usd_step, 4),
        },
        "scale": round(factor, 3),
        "bottleneck": bottleneck(figures)[0],
        "change": bottleneck(figures)[1],
        "assumptions": list(assumptions_of(fleet, factor)),
    }


def priced_rows(fleet: Fleet, figures: RunFigures, events: SimulatedEvents, factor: float) -> Iterator[tuple[str, str]]:
    """Label and words of each figure."""
    costs, plan = Costs.of(fleet, figures), fleet.plan
    tokens = sum(figures.token_ages)
    ages = ", ".join(f"{age}: {formatting.percent(count / tokens)}" for age, count in enumerate(figures.token_ages))
    regions = ", ".join(f"{count} in {region.name}" for region, count in zip(fleet.regions, fleet.engines, strict=True))
    yield "GPUs that train", f"{fleet.ranks:,} {plan.trainer}"
    yield "GPUs that sample", f"{fleet.sampling_gpus:,} {plan.engine}, engines of {fleet.engine_gpus}: {regions}"
    yield "rollouts at a time", f"{fleet.config.rollouts.concurrency:,} (rollouts.concurrency of all processes)"
    yield "a step", f"{_seconds(figures.step_s)}, {figures.steps_per_hour:.2f} an hour"
    yield "trainer busy", formatting.percent(figures.trainer_busy)
    yield "engines busy", formatting.percent(figures.engine_busy)
    ratio = fleet.sampling_flops / fleet.training_flops
    yield "inference : training", f"{fleet.sampling_gpus / fleet.ranks:.2f} in GPUs, {ratio:.2f} in operations"
    yield "staleness of tokens", ages
    yield "sandboxes at most", f"{round(events.most_sandboxes * factor):,}"
    yield "new weights", f"{formatting.size(round(fleet.delta_bytes))}, in use after {_seconds(fleet.delta_s)}"
    yield "between regions", f"{formatting.size(round(fleet.delta_bytes * fleet.remote_regions))} a step"
    yield "money", f"${costs.usd_step:,.2f} a step, ${costs.usd_h:,.0f} an hour"
    share = formatting.percent(costs.engine_usd_h / max(1e-9, costs.engine_usd_h + costs.trainer_usd_h))
    yield "share of engines", f"{share}; ${costs.egress_usd_step:.2f} a step for bytes between regions"


def hours_row(fleet: Fleet, simulated: FleetSimulation, hours: float) -> tuple[str, str]:
    """Label and words of the steps and the cost of some hours."""
    costs, steady = Costs.of(fleet, simulated.figures), simulated.steady
    width = "" if steady is None else f" ± {steady.step_s.relative:.1%}"
    steps = simulated.figures.steps_per_hour * hours
    return f"in {hours:,.0f} hours", f"{steps:,.0f} steps{width}, ${costs.usd_h * hours:,.0f}"


def intervals_words(steady: SteadyState, steps: int) -> str:
    """Half the width of each 95 % interval, and the number of simulated steps."""
    shares = ", ".join(f"{name} ± {relative:.1%}" for name, relative in _relative(steady).items())
    return f"{shares}; from {steps:,} simulated steps"


def goal_words(steps_h: float, simulated: FleetSimulation) -> str:
    """A goal in steps an hour, and if the chosen split meets it."""
    step_s = HOUR_S / steps_h
    words = f"{steps_h:g} steps an hour, {_seconds(step_s)} each: "
    words += "met" if simulated.figures.step_s <= step_s else "not met"
    return words + (", but within the 95% interval of a step" if simulated.includes_step(step_s) else "")


def goal_json(steps_h: float, simulated: FleetSimulation) -> dict[str, Json]:
    """The same as one JSON object."""
    step_s = HOUR_S / steps_h
    return {
        "steps_per_hour": steps_h,
        "met": simulated.figures.step_s <= step_s,
        "within_interval": simulated.includes_step(step_s),
    }


def other_words(other: SplitCandidate, longer: Estimate) -> str:
    """Another split that a search has simulated with the same rollouts as the chosen one, compared with it."""
    fleet = other.fleet
    split = f"{fleet.ranks:,} train, {fleet.sampling_gpus:,} sample, ${gpus_usd_h(fleet):,.0f} an hour"
    step = f"a step {longer.value:+.1%} (95%: {longer.low:+.1%} to {longer.high:+.1%})"
    return f"{split}: {step}{'' if is_told_apart(longer) else ', no proven difference'}"


def other_json(other: SplitCandidate, longer: Estimate) -> dict[str, Json]:
    """The same as one JSON object."""
    return {
        "gpus": {"trainer": other.fleet.ranks, "engines": other.fleet.sampling_gpus},
        "usd_hour": round(gpus_usd_h(other.fleet), 2),
        "step_longer": {"share": round(longer.value, 5), "low": round(longer.low, 5), "high": round(longer.high, 5)},
        "told_apart": is_told_apart(longer),
    }


def is_told_apart(longer: Estimate) -> bool:
    """True if the interval of a difference excludes zero."""
    return not longer.low <= 0 <= longer.high


def steady_json(steady: SteadyState) -> dict[str, Json]:
    """Half the width of each 95 % interval, as a share of its mean, and the number of steps that they are from."""
    shares = {name.replace(" ", "_"): round(relative, 5) for name, relative in _relative(steady).items()}
    return {"steps": steady.steps, "relative": dict(shares)}


def _relative(steady: SteadyState) -> dict[str, float]:
    estimates = {
        "step": steady.step_s,
        "trainer busy": steady.trainer_busy,
        "engines busy": steady.engine_busy,
        "staleness": steady.staleness,
    }
    return {name: mean.relative for name, mean in estimates.items()}


def assumptions_of(fleet: Fleet, factor: float) -> Iterator[str]:
    """The assumptions of a plan, as sentences and as keys with their values."""
    plan = fleet.plan
    yield (
        "scheduling decisions are made by a run's own code; engines, agents, trainer and links are modelled; "
        "evaluations are left out"
    )
    if factor > 1:
        yield f"simulated at a reduced scale: one group or engine stands for {factor:.3g} (simulation/split.py)"
    yield _listed("workload", plan.workload)
    yield _listed("assumptions", fleet.assumptions)
    for name, market in dict.fromkeys(((plan.trainer, plan.trainer_market), (plan.engine, plan.engine_market))):
        price = fleet.sheet(name).price(market)
        if price is not None:
            yield f"{name}, {market}: ${price.value:g} an hour, {price.source}, read {price.read}"


def _listed(name: str, section: Section) -> str:
    return f"[{name}] " + ", ".join(f"{key} = {value}" for key, value in section.model_dump().items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < HOUR_S / 30 else f"{seconds / 60:.1f} min"
