"""`etude plan run`: predicts a recipe's run by a simulation that is calibrated by an earlier run.

Owns table and page. The simulation is :mod:`etude.simulation.run`.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.dashboard.page import html_page
from etude.dashboard.plots import TALL, Line, line_plot, share_bars
from etude.dashboard.terminal import DIM, light_table
from etude.errors import ConfigError
from etude.run.folder import RunFolder
from etude.simulation.figures import RunFigures, bottleneck
from etude.simulation.fit import calibrate
from etude.simulation.run import RegionModel, SimulatedEvents, simulate, skipped_steps
from etude.telemetry.log import EventReader
from etude.types import Json

HERE = "here"
"""Name of the one region of a run without a fleet."""

ASSUMPTIONS = (
    "engines, agents, sandboxes, trainer and links are modelled; scheduling decisions are made by a run's own code",
    "each rollout repeats one that the earlier run recorded at about the same step of training",
    "an engine is as fast as in that run, whatever else its machine does; evaluations are left out",
)
"""Assumptions of a plan, as sentences."""


def simulate_like(
    source: Path, config: RunConfig, regions: Sequence[RegionModel], *, cores: int | None, seed: int
) -> SimulatedEvents:
    """Simulate a recipe at the speeds of the run in ``source``, which is simulated first.

    Its processes share ``cores`` processors (0: those of this machine; ``None``: each process has its own). Raises
    :class:`~etude.errors.UserError`.
    """
    console = Console(stderr=True)
    folder = RunFolder.open(source, writes=False)
    with console.status(f"calibrating by {source}"):
        recorded = folder.config()
        logged = EventReader(folder.events).new()
        shared = shared_cores(recorded, cores or 0)
        calibration = calibrate(recorded, logged, regions_of(recorded, None, ()), cores=shared)
        if cores is None:
            calibration = replace(calibration, cores=math.inf)
    with console.status("simulating"):
        return simulate(config, calibration, regions, seed=seed)


def show_plan(config: RunConfig, events: SimulatedEvents, page: Path | None, *, as_json: bool) -> None:
    """Print a plan; also write it as a ``page``, if one is named."""
    figures = RunFigures.of_events(events.logged, skipped=skipped_steps(config))
    if page is not None:
        page.write_text(plan_page(config, figures, events), encoding="utf-8")
    if as_json:
        print(json.dumps(plan_json(figures, events), indent=2))
    else:
        draw(figures, events, Console())


def shared_cores(config: RunConfig, cores: int) -> float:
    """The processors that trainer, engines, agents and graders of a recorded run shared; infinite where it had GPUs."""
    on_cpus = "cpu" in (config.trainer.device, config.engine.device)
    return float(cores or (len(os.sched_getaffinity(0)) if on_cpus else math.inf))


def regions_of(config: RunConfig, fleet: Path | None, links: Sequence[str]) -> list[RegionModel]:
    """The regions with engines, of a fleet or of one machine. Raises :class:`~etude.errors.ConfigError`."""
    if fleet is None:
        if links:
            raise ConfigError(f"--link {links[0]}: one machine has no links; name a fleet with --fleet")
        return [RegionModel(name=HERE, engines=config.engine.replicas, shares_cores=True)]
    engines = {region.name: region.engines for region in load_fleet(fleet).regions if region.engines}
    times = dict(parse_link(link) for link in links)
    if unknown := sorted(set(times) - set(engines)):
        raise ConfigError(f"--link {unknown[0]}: no region of that name has engines; there are {', '.join(engines)}")
    return [
        RegionModel(name=name, engines=count, rtt_s=rtt_s, arrival_s=arrival_s)
        for name, count in engines.items()
        for rtt_s, arrival_s in [times.get(name, (0.0, 0.0))]
    ]


def parse_link(text: str) -> tuple[str, tuple[float, float]]:
    """Parse ``eu=80,12``: the region, the seconds of a round trip, and the seconds that a weight version takes.

    Raises :class:`~etude.errors.ConfigError`.
    """
    name, _, times = text.partition("=")
    rtt_ms, _, arrival_s = times.partition(",")
    try:
        seconds = float(rtt_ms) / 1e3, float(arrival_s or 0)
    except ValueError:
        seconds = -1.0, -1.0
    if min(seconds) < 0:
        raise ConfigError(f"--link {text!r}: expected REGION=MS or REGION=MS,S, such as eu=80,12")
    return name, seconds


def plan_json(figures: RunFigures, events: SimulatedEvents) -> dict[str, Json]:
    """The plan as one JSON object."""
    sentence, change = bottleneck(figures)
    return {
        "step_s": round(figures.step_s, 3),
        "steps_per_hour": round(figures.steps_per_hour, 2),
        "busy": {"trainer": round(figures.trainer_busy, 4), "engine": round(figures.engine_busy, 4)},
        "inference_to_training": round(figures.inference_to_training, 3),
        "staleness": {"mean": round(figures.staleness, 3), "tokens": list(figures.token_ages)},
        "sandboxes_max": events.most_sandboxes,
        "bottleneck": sentence,
        "change": change,
        "assumptions": list(ASSUMPTIONS),
    }


def plan_rows(figures: RunFigures, events: SimulatedEvents) -> list[tuple[str, str]]:
    """Label and words of each figure."""
    tokens = sum(figures.token_ages)
    ages = ", ".join(f"{age}: {formatting.percent(count / tokens)}" for age, count in enumerate(figures.token_ages))
    return [
        ("a step", f"{figures.step_s:.1f} s, {figures.steps_per_hour:.1f} an hour"),
        ("trainer busy", formatting.percent(figures.trainer_busy)),
        ("engines busy", formatting.percent(figures.engine_busy)),
        ("inference : training", f"{figures.inference_to_training:.2f} in busy seconds"),
        ("staleness of tokens", ages),
        ("sandboxes at most", formatting.count(events.most_sandboxes)),
    ]


def draw(figures: RunFigures, events: SimulatedEvents, console: Console) -> None:
    """Draw the plan, the bottleneck and the assumptions."""
    table = light_table("plan", "predicted")
    for label, words in plan_rows(figures, events):
        table.add_row(label, words)
    console.print(table)
    sentence, change = bottleneck(figures)
    console.print(Text(f"{sentence} {change}"), soft_wrap=True)
    for line in ASSUMPTIONS:
        console.print(Text(line, DIM), soft_wrap=True)


def plan_page(config: RunConfig, figures: RunFigures, events: SimulatedEvents) -> str:
    """The plan as a page of HTML."""
    sentence, change = bottleneck(figures)
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(words)}</td></tr>'
        for label, words in plan_rows(figures, events)
    )
    busy = [("trainer", figures.trainer_busy), ("engines", figures.engine_busy)]
    bars = share_bars("Busy", [(name, share, formatting.percent(share)) for name, share in busy])
    ends_s = [each.at_s for each in events.steps]
    steps = [(float(step), end - begin) for step, (begin, end) in enumerate(pairwise(ends_s), 2)]
    plots = line_plot("Seconds of a step", [Line(points=steps, label="", style="main")], height=TALL)
    open_line = Line(points=[(at_s, float(count)) for at_s, count in events.sandboxes], label="", style="main")
    plots += line_plot("Sandboxes that are open", [open_line], height=TALL, axis="seconds")
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in ASSUMPTIONS)
    return html_page(
        f"Plan of {config.name}",
        f"<header><p>plan</p><h1>{escape(config.name)}</h1><p>{escape(sentence)} {escape(change)}</p></header>"
        f"<h2>Predicted</h2><table>{rows}</table><h2>Time</h2>{bars}{plots}<h2>Assumptions</h2>{notes}",
    )
