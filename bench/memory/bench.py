"""`bench memory`: the plan of a training step's memory beside the bytes that torch really holds.

Each small model takes two steps on the CPU; of the second the bytes of all tensors that are alive are counted,
operation by operation (:mod:`bench.memory.counter`), and the peak is compared with what `etude plan memory` would say.
"""

import argparse
import time

from bench.memory.counter import CASES, formula_and_counter
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from etude.types import Json

FORMULA_ERROR = Goal("formula_error", "at most", 0.05)
"""Farthest that the formula is from the counter, as a share of what was counted."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
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
    figures: dict[str, Json] = {"results": rows, "goals": {FORMULA_ERROR.name: FORMULA_ERROR.judge_worst(errors)}}
    return envelope("memory", time.perf_counter() - started_s, figures, interrupted=state.interrupted)


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    return results_page(result, ("case", "formula_bytes", "counted_bytes", "error"), "bfloat16, CPU, peak of a step")
