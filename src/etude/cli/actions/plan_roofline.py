"""`etude plan roofline`: the time of a decode step and of a training pass, as a table or JSON.

Figures are computed by :mod:`etude.run.roofline`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.terminal import DIM, light_table
from etude.run.gpu_machine import GpuMachine
from etude.run.preflight import spec_of_recipe
from etude.run.pretend import resolved_there
from etude.run.roofline import COPY_SHEET, PRODUCT_SHEET, SCORED_SHARE, Rates, decode_steps, training_pass
from etude.types import Json


def show_roofline(recipe: Path, overrides: Sequence[str], pretend: str, *, as_json: bool) -> None:
    """Print what a recipe reaches on the machine of a name. Raises :class:`~etude.errors.ConfigError`."""
    machine = GpuMachine.parse(pretend)
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
