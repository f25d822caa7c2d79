"""`etude plan`: predicts memory, speed and course of a recipe's run, also for GPUs that you do not have.

Owns the output of plans of memory and speed; :mod:`etude.cli.commands.plan_run` owns that of whole runs. Figures are
computed by :mod:`etude.run.memory_plan` and :mod:`etude.run.roofline`.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.commands.plan_run import app
from etude.cli.options import Json as AsJson
from etude.cli.options import Overrides, RecipePath
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
from etude.run.roofline import COPY_SHEET, PRODUCT_SHEET, SCORED_SHARE, Rates, decode_steps, training_pass
from etude.types import Json

DEFAULT = "h100x8"
Pretend: TypeAlias = Annotated[
    str, typer.Option("--pretend", metavar="MACHINE", help=f"Machine to plan for (default: {DEFAULT}).")
]
Fleet: TypeAlias = Annotated[Path | None, typer.Option("--fleet", metavar="FILE", help="A fleet of such machines.")]


@app.callback()
def plan() -> None:
    """Predict memory, speed, utilisation, staleness and cost of a recipe's run before you start it."""


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


@app.command()
def roofline(recipe: RecipePath, *, overrides: Overrides, pretend: Pretend = "", as_json: AsJson = False) -> None:
    """Predict the time of a decode step and of a training pass from their bytes and operations.

    Of the model, only config.json is needed. Every assumption is printed.
    """
    machine = GpuMachine.parse(pretend or DEFAULT)
    config = resolved_there(load_recipe(recipe, overrides))
    rows = roofline_rows(config, machine)
    if as_json:
        print(json.dumps({"machine": machine.name, "rows": rows, "assumptions": list(assumptions(machine))}, indent=2))
        return
    console = Console()
    table = light_table("per GPU", ">GB read", ">TFLOP", ">ms", ">share", "of")
    for row in rows:
        figures = (f"{float(str(row[name])):.{digits}f}" if name in row else "–" for name, digits in FIGURES)
        table.add_row(str(row["what"]), *figures, str(row["of"]))
    console.print(table)
    for line in assumptions(machine):
        console.print(Text(line, DIM), soft_wrap=True)


FIGURES = (("read_gb", 1), ("tflop", 1), ("ms", 1), ("share", 2))
"""Columns of the table and their decimals."""


def roofline_rows(config: RunConfig, machine: GpuMachine) -> list[dict[str, Json]]:
    """A row for each step that is predicted."""
    assert machine.kind is not None, "it was named"
    rates, spec, rows = Rates.of_gpu(machine.kind), spec_of_recipe(config), list[dict[str, Json]]()
    for context, step in decode_steps(config, spec).items():
        what = f"decode step, {config.engine.max_running} sequences of {context:,}"
        share = step.bandwidth_share(rates)
        ms, tflop = step.seconds(rates) * 1e3, step.flops / 1e12
        rows.append({"what": what, "read_gb": step.least_bytes / 1e9, "tflop": tflop, "ms": ms,
                     "share": share, "of": f"{rates.bytes_per_s / 1e12:.2f} TB/s of copies"})  # fmt: skip
    training = training_pass(config, spec)
    seconds, sent = training.seconds(rates), training.sent_bytes / 1e9
    links = f"; meanwhile links carry {sent:.1f} GB, {sent / seconds:.0f} GB/s" if sent else ""
    rows.append({"what": f"training pass, {config.trainer.microbatch_tokens:,} tokens",
                 "tflop": training.flops / 1e12, "ms": seconds * 1e3, "share": training.utilisation(rates),
                 "of": f"{rates.flops / 1e12:.0f} TFLOP/s of products{links}"})  # fmt: skip
    return rows


def assumptions(machine: GpuMachine) -> list[str]:
    """The formula and its constants, as sentences."""
    assert machine.kind is not None, "it was named"
    rates = Rates.of_gpu(machine.kind)
    bandwidth, peak = f"{machine.kind.bytes_per_s / 1e12:.2f} TB/s", f"{machine.kind.flops / 1e12:.0f} TFLOP/s"
    return [
        "time = max(bytes / (bandwidth · share), operations / (peak · share)) + fixed times",
        f"bandwidth = {COPY_SHEET:.2f} · {bandwidth}, peak = {PRODUCT_SHEET:.2f} · {peak}: the data sheet's values "
        "times the shares that an H200 reached",
        f"share of the bandwidth, as étude's kernels reached on the H200: matrices {rates.matrix_bytes}, experts "
        f"{rates.grouped_bytes}, cache {rates.cache_bytes}, latent attention {rates.latent_bytes}; fixed times: "
        f"{rates.layer_s * 1e6:.0f} µs per layer, {rates.step_s * 1e3:.1f} ms per step",
        f"share of the peak in training: {rates.training}, mixtures of experts {rates.grouped_training}; recomputed "
        f"operations take time but do not count in the column share; {SCORED_SHARE:.0%} of tokens have a loss; the "
        f"output head is computed twice",
        "vLLM and SGLang: the same shares, not measured; times of links are not predicted",
    ]
