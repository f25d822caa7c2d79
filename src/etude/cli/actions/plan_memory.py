"""`etude plan memory`: the bytes that a recipe's trainer and engines need on each GPU, as a table or JSON.

Figures are computed by :mod:`etude.run.memory_plan`.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

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


def show_memory(
    recipe: Path, overrides: Sequence[str], machine: GpuMachine, fleet: Path | None, *, as_json: bool
) -> None:
    """Print the memory of a recipe on a machine, or on a ``fleet`` of such machines."""
    config, machines = resolved_there(load_recipe(recipe, overrides)), load_fleet(fleet) if fleet else None
    made = MemoryPlan.of(config, spec_of_recipe(config), machine.memory_bytes)
    if as_json:
        print(json.dumps(memory_json(config, made, machine, machines), indent=2))
    else:
        draw_memory(config, made, machine, machines, Console())


def machine_of(pretend: str, gpus: int, gpu_memory: str, *, default: str) -> GpuMachine:
    """The machine of a name (or else of the ``default``), or of a number of GPUs and their memory.

    Raises :class:`~etude.errors.ConfigError`.
    """
    if pretend and (gpus or gpu_memory):
        raise ConfigError("--pretend names a machine; --gpus and --gpu-memory describe one: leave one of them out")
    if bool(gpus) != bool(gpu_memory):
        raise ConfigError("--gpus and --gpu-memory go together, such as --gpus 8 --gpu-memory 80GB")
    if gpus:
        return GpuMachine(name=f"{gpus} GPUs", gpus=gpus, memory_bytes=parse_size(gpu_memory))
    return GpuMachine.parse(pretend or default)


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
        engines = sum(region.engines for region in fleet.regions) if fleet and side is plan.engine else side.count
        console.print(Text(_title(side, engines), "bold"))
        table = light_table("per GPU", ">GB", "key", "contents", broken=["key"])
        for part in side.parts:
            table.add_row(part.name, _gigabytes(part.size_bytes), part.key, part.words)
        table.add_row("total", _gigabytes(side.total), "", f"of {_gigabytes(machine.memory_bytes)}")
        console.print(table)
        console.print()
    for processes, alike in groupby(uses_there(config, plan, machine, fleet), lambda use: use.processes):
        uses = list(alike)
        problem = _problem(uses[0], machine)
        mark = Text("! ", WARN) if problem else Text("✓ ", GOOD)
        words = problem or f"{_gigabytes(uses[0].total)} GB of {_gigabytes(machine.memory_bytes)}"
        names = " and ".join(side.name for side in processes)
        devices = " … ".join(dict.fromkeys((uses[0].device, uses[-1].device)))
        console.print(mark.append(f"{devices:<17} ", DIM).append(f"{names}: {words}", "default"), soft_wrap=True)


def _title(side: ProcessMemory, count: int) -> str:
    each = f", {side.gpus} GPUs each" if side.gpus > 1 else ""
    name = "rank of the trainer" if side.name == "trainer" else side.name
    return f"{count} × {name}{each}"


def _problem(use: DeviceUse, machine: GpuMachine) -> str:
    """The reason why processes do not fit on a device, and the keys to change. Empty if they fit, and for a CPU, since
    the memory of its host is not known.
    """
    for side in use.processes:
        if side.problem:
            return side.problem
    if use.device == "cpu" or use.total <= machine.memory_bytes:
        return ""
    fixes = ", ".join(side.fixes() for side in use.processes)
    return f"{formatting.size(use.total - machine.memory_bytes)} too much: change {fixes}"


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}"
