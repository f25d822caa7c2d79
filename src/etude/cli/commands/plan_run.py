"""`etude plan run`: predicts a recipe's run by a simulation that is calibrated by an earlier run.

Owns options, table and page. The simulation is :mod:`etude.simulation.run`.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.commands.plan_priced import load_plan, show_priced
from etude.cli.options import Json as AsJson
from etude.cli.options import Overrides, RecipePath, group
from etude.config.loading import load_fleet, load_recipe
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
from etude.simulation.split import SimulationExtent, parse_goal
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


app = group()
"""The commands of `etude plan`; those of :mod:`etude.cli.commands.plan` are added there."""


@app.command()
def run(
    recipe: RecipePath,
    *,
    overrides: Overrides,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run whose events give the speeds.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="GPU|FILE", help="Instead of a run: a GPU by name, or a file with a plan.")
    ] = "",
    assume: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override a value of the plan: workload.turns=40.")
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            metavar="steps=N|usd=N",
            help="Find the cheapest split of GPUs for N steps an hour, or the fastest for N dollars an hour.",
        ),
    ] = "",
    hours: Annotated[
        float | None,
        typer.Option(min=1.0, help="With --hardware: hours to simulate, from midnight (default: a few steps)."),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=0.1,
            metavar="SHARE",
            help="With --hours: stop once each mean is this precise, such as 0.01, and extrapolate to the hours.",
        ),
    ] = None,
    fleet: Annotated[Path | None, typer.Option("--fleet", metavar="FILE", help="The machines (default: one).")] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link", metavar="REGION=MS[,S]", help="Round trip to a region in ms, and seconds for a weight version."
        ),
    ] = None,
    cores: Annotated[
        int, typer.Option(min=0, help="CPU cores that a run on CPUs shares (default: those of this machine).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict utilisation, step time and staleness of a recipe by simulation.

    With --from, an earlier run gives the speeds: it is simulated first, to calibrate the model. With --hardware, they
    follow from GPUs, a workload and assumptions, and the cost is predicted as well.
    """
    if (source is None) == (not hardware):
        raise ConfigError("a plan is made from a run (--from RUN) or for GPUs (--hardware GPU|FILE): name one of them")
    if source is None:
        refuse({"--fleet": fleet, "--link": link, "--page": page}, "a file for --hardware has regions and links")
        goal = parse_goal(search) if search else None
        if goal is not None and hours is not None:
            raise ConfigError("--search simulates a few steps of each split: leave --hours out, then plan the result")
        plan = load_plan(hardware, assume or ())
        if precision is not None and hours is None:
            raise ConfigError(f"--precision {precision:g} needs --hours, such as --hours 720")
        extent = SimulationExtent(hours=hours, precision=precision)
        show_priced(load_recipe(recipe, overrides), plan, goal, seed, extent=extent, as_json=as_json)
        return
    refuse({"--assume": assume, "--search": search}, "a plan from a run takes its speeds from there and has no prices")
    refuse({"--hours": hours, "--precision": precision}, "a plan from a run has that run's steps")
    config, folder = load_recipe(recipe, overrides), RunFolder.open(source, writes=False)
    regions = regions_of(config, fleet, link or ())
    console = Console(stderr=as_json)
    with console.status(f"calibrating by {source}"):
        recorded = folder.config()
        logged = EventReader(folder.events).new()
        shared = shared_cores(recorded, cores)
        calibration = calibrate(recorded, logged, regions_of(recorded, None, ()), cores=shared)
        if fleet is not None:
            calibration = replace(calibration, cores=math.inf)
    with console.status("simulating"):
        events = simulate(config, calibration, regions, seed=seed)
    figures = RunFigures.of_events(events.logged, skipped=skipped_steps(config))
    if page is not None:
        page.write_text(plan_page(config, figures, events), encoding="utf-8")
    if as_json:
        print(json.dumps(plan_json(figures, events), indent=2))
    else:
        draw(figures, events, console)


def shared_cores(config: RunConfig, cores: int) -> float:
    """The processors that trainer, engines, agents and graders of a recorded run shared; infinite where it had GPUs."""
    on_cpus = "cpu" in (config.trainer.device, config.engine.device)
    return float(cores or (len(os.sched_getaffinity(0)) if on_cpus else math.inf))


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise :class:`~etude.errors.ConfigError` for the first option that is given."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name} would have no effect: {why}; leave it out")


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
