"""`etude plan`: predicts memory, speed and course of a recipe's run, also for GPUs that you do not have.

Owns the options. Output is in modules of ``cli/actions``, which are imported when they are needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.options import Json as AsJson
from etude.cli.options import Overrides, RecipePath, group
from etude.errors import ConfigError

DEFAULT = "h100x8"
Pretend: TypeAlias = Annotated[
    str, typer.Option("--pretend", metavar="MACHINE", help=f"Machine to plan for (default: {DEFAULT}).")
]
Fleet: TypeAlias = Annotated[Path | None, typer.Option("--fleet", metavar="FILE", help="A fleet of such machines.")]

app = group()


@app.callback()
def plan() -> None:
    """Predict memory, speed, utilisation, staleness and cost of a recipe's run before you start it."""


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
        if search and hours is not None:
            raise ConfigError("--search simulates a few steps of each split: leave --hours out, then plan the result")
        if precision is not None and hours is None:
            raise ConfigError(f"--precision {precision:g} needs --hours, such as --hours 720")
        from etude.cli.actions.plan_priced import load_plan, show_priced
        from etude.config.loading import load_recipe
        from etude.simulation.split import SimulationExtent, parse_goal

        goal, extent = parse_goal(search) if search else None, SimulationExtent(hours=hours, precision=precision)
        plan = load_plan(hardware, assume or ())
        show_priced(load_recipe(recipe, overrides), plan, goal, seed, extent=extent, as_json=as_json)
        return
    refuse({"--assume": assume, "--search": search}, "a plan from a run takes its speeds from there and has no prices")
    refuse({"--hours": hours, "--precision": precision}, "a plan from a run has that run's steps")
    from etude.cli.actions.plan_run import regions_of, show_plan, simulate_like
    from etude.config.loading import load_recipe

    config = load_recipe(recipe, overrides)
    regions = regions_of(config, fleet, link or ())
    events = simulate_like(source, config, regions, cores=None if fleet is not None else cores, seed=seed)
    show_plan(config, events, page, as_json=as_json)


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise :class:`~etude.errors.ConfigError` for the first option that is given."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name} would have no effect: {why}; leave it out")


@app.command()
def memory(
    recipe: RecipePath,
    *,
    overrides: Overrides,
    pretend: Pretend = "",
    fleet: Fleet = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a machine without a name.")] = 0,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each, such as 80GB.")] = "",
    as_json: AsJson = False,
) -> None:
    """Count the bytes that a recipe's trainer and engines need on each GPU, part by part.

    Of the model, only config.json is needed.
    """
    from etude.cli.actions.plan_memory import machine_of, show_memory

    machine = machine_of(pretend, gpus, gpu_memory, default=DEFAULT)
    show_memory(recipe, overrides, machine, fleet, as_json=as_json)


@app.command()
def roofline(recipe: RecipePath, *, overrides: Overrides, pretend: Pretend = "", as_json: AsJson = False) -> None:
    """Predict the time of a decode step and of a training pass from their bytes and operations.

    Of the model, only config.json is needed. Every assumption is printed.
    """
    from etude.cli.actions.plan_roofline import show_roofline

    show_roofline(recipe, overrides, pretend or DEFAULT, as_json=as_json)
