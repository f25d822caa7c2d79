"""`bench roofline`: shares of a GPU's bandwidth and peak that étude's steps would reach, from bytes and operations.

The shares are predicted: formula and constants are :mod:`etude.run.roofline`'s, fitted to what an H200 measured
(docs/gpu.md). What a decode step asks of its host, and the bytes of the cache that the attention kernel asks for, are
counted where there is no GPU, on a pretended device and in Triton's interpreter (``tests/support/decode_counts.py``).
The same formula is held against this machine's processor (:mod:`bench.roofline.here`).
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import orjson

from bench.engine.card import BATCH, CONTEXTS, QWEN3_8B
from bench.report import Goal, envelope
from bench.roofline.here import check_here
from bench.tables import results_page
from etude.cli.actions.plan_roofline import assumptions
from etude.run.gpu_machine import GpuMachine
from etude.run.roofline import DecodeStep, Rates, TrainingStep
from etude.types import Json

BANDWIDTH = Goal(
    "decode_bandwidth_share",
    "at least",
    0.6,
    "Predicted share of a GPU's copy bandwidth that decoding reaches: Qwen3-8B, 64 sequences of 8,192 tokens.",
)
MFU = Goal(
    "mfu",
    "at least",
    0.4,
    "Predicted share of a GPU's peak of products that training reaches: Qwen3-8B, activations recomputed.",
)
CACHE = Goal(
    "kv_bytes_vs_least",
    "at most",
    1.15,
    "Bytes of the key-value cache that the attention kernel reads, over those that the sequences have.",
)
WAITS = Goal("host_waits_per_step", "at most", 1.0, "Times that the host waits for the device in a decode step.")
COUNTS = Path(__file__).parents[2] / "tests" / "support" / "decode_counts.py"
PASS_TOKENS = 16_384


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--pretend", default="h100x8", metavar="MACHINE", help="such as h100x8")
    parser.add_argument("--quick", action="store_true", help="measure nothing on this machine")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Compute, and return the bench object."""
    started_s, machine = time.perf_counter(), GpuMachine.parse(options.pretend)
    assert machine.kind is not None, "it was named"
    rates, longest = Rates.of_gpu(machine.kind), max(CONTEXTS)
    decode = DecodeStep.of(QWEN3_8B, batch=BATCH, context=longest, item=2)
    training = TrainingStep.of(QWEN3_8B, tokens=PASS_TOKENS, length=2048, recomputes=True)
    counts = decode_counts()
    shares = (decode.bandwidth_share(rates), training.utilisation(rates))
    sheet = training.utilisation(rates, peak=machine.kind.flops)
    rows: list[Json] = [
        {"case": f"decode step, {BATCH} × {longest:,}", "contestant": "etude",
         "ms": round(decode.seconds(rates) * 1e3, 1), "share": round(shares[0], 3)},
        {"case": f"training pass, {PASS_TOKENS:,} tokens", "contestant": "etude",
         "ms": round(training.seconds(rates) * 1e3, 1), "share": round(shares[1], 3), "of_data_sheet": round(sheet, 3)},
        {"case": "decode step, counted", "contestant": "etude", **counts},
        *([] if options.quick else check_here()),
    ]  # fmt: skip
    goals = {goal.name: goal.judge(value) for goal, value in zip((BANDWIDTH, MFU), shares, strict=True)}
    goals |= {goal.name: goal.judge(counts[goal.name]) for goal in (CACHE, WAITS)}
    figures: dict[str, Json] = {"results": rows, "goals": dict(goals), "assumptions": list(assumptions(machine))}
    return envelope("roofline", time.perf_counter() - started_s, figures)


def decode_counts() -> dict[str, float]:
    """Costs of a decode step in addition to its arithmetic, by name."""
    counted = subprocess.run([sys.executable, COUNTS], check=True, capture_output=True)
    counts: dict[str, float] = orjson.loads(counted.stdout)
    return counts


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    lines = result["assumptions"]
    assert isinstance(lines, list)
    columns = (
        "case",
        "least_ms",
        "ms",
        "share",
        "of_data_sheet",
        "host_waits_per_step",
        "launches_per_step",
        "kv_bytes_vs_least",
    )
    return results_page(result, columns, "Qwen3-8B, predicted", notes=map(str, lines))
