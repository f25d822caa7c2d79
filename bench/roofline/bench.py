"""`bench roofline`: shares of a GPU's bandwidth and peak that étude's steps would reach, from bytes and operations.

Nothing is timed: the formula and its constants are :mod:`etude.run.roofline`'s, which reproduce what an H200 measured
(docs/gpu.md) within a tenth. Bytes of the cache are those that the attention kernel's own cut reads.
"""

import argparse
import time

from bench.engine.card import BATCH, CONTEXTS, QWEN3_8B
from bench.report import Goal, envelope
from bench.tables import results_page
from etude.cli.commands.plan import assumptions
from etude.models.kernels.pages import PAGE
from etude.run.gpu_machine import GpuMachine
from etude.run.roofline import DecodeStep, Rates, TrainingStep
from etude.types import Json

BANDWIDTH = Goal("decode_bandwidth_share", "at least", 0.6)
"""Qwen3-8B, 64 sequences of 8,192, of the bandwidth of copies."""
MFU = Goal("mfu", "at least", 0.4)
"""Qwen3-8B, activations recomputed, of the peak of products."""
CACHE = Goal("kv_bytes_vs_least", "at most", 1.15)
"""Bytes of the cache that the kernel reads over those that the sequences have."""
LENGTHS = (1024, 8192, 100, 20_000)
"""Tokens of sequences whose cache is read."""
PASS_TOKENS = 16_384


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--pretend", default="h100x8", metavar="MACHINE", help="such as h100x8")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Compute, and return the bench object."""
    started_s, machine = time.perf_counter(), GpuMachine.parse(options.pretend)
    assert machine.kind is not None, "it was named"
    rates, longest = Rates.of_gpu(machine.kind), max(CONTEXTS)
    decode = DecodeStep.of(QWEN3_8B, batch=BATCH, context=longest, item=2)
    training = TrainingStep.of(QWEN3_8B, tokens=PASS_TOKENS, length=2048, recomputes=True)
    shares = (decode.bandwidth_share(rates), training.utilisation(rates), cache_overhead())
    sheet = training.utilisation(rates, peak=machine.kind.flops)
    rows: list[Json] = [
        {"case": f"decode step, {BATCH} × {longest:,}", "contestant": "etude",
         "ms": round(decode.seconds(rates) * 1e3, 1), "share": round(shares[0], 3)},
        {"case": f"training pass, {PASS_TOKENS:,} tokens", "contestant": "etude",
         "ms": round(training.seconds(rates) * 1e3, 1), "share": round(shares[1], 3), "of_data_sheet": round(sheet, 3)},
    ]  # fmt: skip
    goals = {goal.name: goal.judge(value) for goal, value in zip((BANDWIDTH, MFU, CACHE), shares, strict=True)}
    figures: dict[str, Json] = {"results": rows, "goals": dict(goals), "assumptions": list(assumptions(machine))}
    return envelope("roofline", time.perf_counter() - started_s, figures)


def cache_overhead() -> float:
    """Positions that the attention kernel reads over those that there are, of sequences of :data:`LENGTHS`."""
    from etude.models.kernels.gpu.paged_attention import tuned  # of Triton, which other benches need not have

    spec = QWEN3_8B.attention
    cut = tuned(spec.heads // spec.key_heads, spec.key_width + spec.value_width, 2, single=True)
    block = cut.pages * PAGE
    return sum(-(-length // block) * block for length in LENGTHS) / sum(LENGTHS)


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    lines = result["assumptions"]
    assert isinstance(lines, list)
    columns = ("case", "ms", "share", "of_data_sheet")
    return results_page(result, columns, "Qwen3-8B, predicted", notes=map(str, lines))
