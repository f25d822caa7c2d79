"""`etude plan`: the memory and the speed of a recipe on GPUs that need not be here.

Owns how plans are shown. What is computed is :mod:`etude.run.memory_plan`'s and :mod:`etude.run.roofline`'s.
"""

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.options import Json as AsJson
from etude.cli.options import Overrides, RecipePath, group
from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet, load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.dashboard.terminal import DIM, GOOD, WARN, light_table
from etude.errors import ConfigError
from etude.run.gpu_machine import GpuMachine, parse_size
from etude.run.memory_plan import DeviceUse, MemoryPlan, ProcessMemory
from etude.run.preflight import spec_of_recipe
from etude.run.pretend import resolved_there, uses_there
from etude.types import Json

DEFAULT = "h100x8"
Pretend: TypeAlias = Annotated[
    str, typer.Option("--pretend", metavar="MACHINE", help=f"Such as {DEFAULT}, the default.")
]
Fleet: TypeAlias = Annotated[Path | None, typer.Option("--fleet", metavar="FILE", help="A fleet of such machines.")]

app = group()


@app.callback()
def plan() -> None:
    """See what a recipe takes of GPUs that need not be here: memory, speed."""


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
    """Count the bytes per GPU, part by part, of a recipe's trainer and engines.

    The model's config.json is enough.
    """
    machine = _machine(pretend, gpus, gpu_memory)
    config, machines = resolved_there(load_recipe(recipe, overrides)), load_fleet(fleet) if fleet else None
    made = MemoryPlan.of(config, spec_of_recipe(config), machine.memory_bytes)
    if as_json:
        print(json.dumps(memory_json(config, made, machine, machines), indent=2))
    else:
        draw_memory(config, made, machine, machines, Console())


def _machine(pretend: str, gpus: int, gpu_memory: str) -> GpuMachine:
    if pretend and (gpus or gpu_memory):
        raise ConfigError("--pretend names a machine; --gpus and --gpu-memory describe one: leave one of them out")
    if bool(gpus) != bool(gpu_memory):
        raise ConfigError("--gpus and --gpu-memory go together, such as --gpus 8 --gpu-memory 80GB")
    if gpus:
        return GpuMachine(name=f"{gpus} GPUs", gpus=gpus, memory_bytes=parse_size(gpu_memory))
    return GpuMachine.parse(pretend or DEFAULT)


def memory_json(config: RunConfig, plan: MemoryPlan, machine: GpuMachine, fleet: FleetConfig | None) -> dict[str, Json]:
    """The plan as one JSON object."""
    uses = list(uses_there(config, plan, machine, fleet))
    return {
        "machine": machine.name,
        "gpu_bytes": machine.memory_bytes,
        "fits": not any(_problem(use, machine) for use in uses),
        "processes": [_process_json(side) for side in (plan.trainer, plan.engine)],
        "devices": [
            {"device": use.device, "total_bytes": use.total, "problem": _problem(use, machine)} for use in uses
        ],
    }


def _process_json(side: ProcessMemory) -> dict[str, Json]:
    parts: list[Json] = [
        {"name": part.name, "bytes": part.size_bytes, "words": part.words, "key": part.key} for part in side.parts
    ]
    return {"name": side.name, "count": side.count, "gpus": side.gpus, "total_bytes": side.total, "parts": parts}


def draw_memory(
    config: RunConfig, plan: MemoryPlan, machine: GpuMachine, fleet: FleetConfig | None, console: Console
) -> None:
    """Draw a table for each kind of process, and what fits."""
    for side in (plan.trainer, plan.engine):
        console.print(Text(_title(side), "bold"))
        table = light_table("of each GPU", ">GB", "key", "made up of", broken=["key"])
        for part in side.parts:
            table.add_row(part.name, _gigabytes(part.size_bytes), part.key, part.words)
        table.add_row("all", _gigabytes(side.total), "", f"of {_gigabytes(machine.memory_bytes)}")
        console.print(table)
        console.print()
    for use in uses_there(config, plan, machine, fleet):
        problem = _problem(use, machine)
        mark = Text("! ", WARN) if problem else Text("✓ ", GOOD)
        words = problem or f"{_gigabytes(use.total)} GB of {_gigabytes(machine.memory_bytes)}"
        names = " and ".join(side.name for side in use.processes)
        console.print(mark.append(f"{use.device:<8} ", DIM).append(f"{names}: {words}", "default"), soft_wrap=True)


def _title(side: ProcessMemory) -> str:
    each = f", {side.gpus} GPUs each" if side.gpus > 1 else ""
    name = "rank of the trainer" if side.name == "trainer" else side.name
    return f"{side.count} × {name}{each}"


def _problem(use: DeviceUse, machine: GpuMachine) -> str:
    """Why it does not fit, and the keys to change; empty where it does, or is on a host, whose size is not known."""
    for side in use.processes:
        if side.problem:
            return side.problem
    if use.device == "cpu" or use.total <= machine.memory_bytes:
        return ""
    fixes = ", ".join(side.fixes() for side in use.processes)
    return f"{formatting.size(use.total - machine.memory_bytes)} too much: change {fixes}"


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}"
