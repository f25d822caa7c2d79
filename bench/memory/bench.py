"""`bench memory`: what a training step takes, beside the plan of it, and beside transformers' Trainer and TRL.

``formula_error``: each small model takes two steps on the CPU; of the second the bytes of all tensors that are alive
are counted, operation by operation (:mod:`bench.memory.counter`), and the peak is compared with what `etude plan
memory` would say.

``peak_vs_trl``: contestants of `bench trainer` take the same steps on a small model with a real vocabulary, one after
the other, in a process each; compared is the most memory that a process had during a step, its programs included. Ours
makes log-probabilities, entropies and importance weights of the sampled tokens, theirs the next-token loss of the same.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.engine.models import BenchModel
from bench.memory.counter import CASES, DENSE, formula_and_counter
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trainer.bench import TrainerOptions, bench_trainer
from bench.trainer.contestants import Setup
from etude.types import Json

FORMULA_ERROR = Goal(
    "formula_error", "at most", 0.05, "Error of `etude plan memory`, as a share of the counted bytes; the worst model."
)
PEAK_VS_TRL = Goal("peak_vs_trl", "at most", 0.5, "Peak memory of a training step, over the lowest of the others'.")
CONTESTANTS = ("etude-fast", "transformers-padded", "trl-padded")
VOCABULARY = BenchModel(
    name="dense, vocabulary of 151,936",
    spec=replace(DENSE, vocab_size=151_936, layers=4, tied=True),
)
SETUP = Setup(
    contestant=CONTESTANTS[0], folder="", device="cpu", dtype="float32", threads=2, vocabulary=151_936, sequences=16,
    longest=512, microbatch_tokens=8 * 512, steps=1, seed=0,
)  # fmt: skip
"""Two passes of up to 4,096 tokens a step."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--quick", action="store_true", help="leave the other libraries out")
    parser.add_argument("--case", choices=CASES, action="append", help="a model of these alone")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure, and return the bench object."""
    started_s, rows = time.perf_counter(), list[Json]()
    errors: dict[str, float] = {}
    with so_far() as state:
        for case in options.case or CASES:
            spec, recomputes = CASES[case]
            formula, counted = formula_and_counter(spec, recomputes=recomputes)
            errors[case] = abs(formula / counted - 1)
            rows.append({"case": case, "contestant": "etude", "formula_bytes": formula, "counted_bytes": counted,
                         "error": round(errors[case], 4)})  # fmt: skip
        beside = [] if options.quick else _contestants()
    rows += beside
    goals = {FORMULA_ERROR.name: FORMULA_ERROR.judge_worst(errors), PEAK_VS_TRL.name: _judged(beside)}
    figures: dict[str, Json] = {"results": rows, "goals": dict(goals)}
    return envelope("memory", time.perf_counter() - started_s, figures, interrupted=state.interrupted)


def _contestants() -> list[dict[str, Json]]:
    result = bench_trainer(TrainerOptions(contestants=CONTESTANTS, model=VOCABULARY, setup=SETUP, apart=True))
    rows = result["results"]
    assert isinstance(rows, list)
    return [{"case": VOCABULARY.name, **row} for row in rows if isinstance(row, dict)]


def _judged(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Our peak over the lowest of others'."""
    peaks = {str(row["contestant"]): row["memory_bytes"] for row in rows if row["missing"] is None}
    ours, others = peaks.pop(CONTESTANTS[0], None), [peak for peak in peaks.values() if isinstance(peak, int)]
    if not isinstance(ours, int) or not others:
        return PEAK_VS_TRL.judge(None, "; ".join(str(row["missing"]) for row in rows if row["missing"]) or "left out")
    return PEAK_VS_TRL.judge(round(ours / min(others), 3))


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    columns = ("case", "contestant", "formula_bytes", "counted_bytes", "error", "memory_bytes", "step_s")
    return results_page(result, columns, "CPU, peak of a step")
