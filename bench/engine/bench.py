"""`bench engine`: what a sampled token costs, our engine beside the others, on the same weights and one machine.

    model × type ──▶ a worker per contestant ──▶ batch × temperature: warm-up, then round after round, in turn
    in this process ──▶ pauses of weight swaps beside reloads (swaps.py), prefixes reused (sessions.py), the same tokens
                        with and without drafts (drafts.py)

All workers of a model are started together and then asked in turn, one at a time, so that a machine that slows down
slows down all of them; a figure is the median over rounds and printed with its extremes, a ratio is the median of the
rounds' ratios. Tokens per CPU second count all threads and processes of a contestant and its reading of the prompts.
On a GPU the bandwidth of decoding is measured besides (card.py).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch

from bench.engine import card as engine_card
from bench.engine import drafts, sessions
from bench.engine import swaps as engine_swaps
from bench.engine.contestants import Setup
from bench.engine.models import BenchModel, write_model
from bench.engine.options import NATIVE, EngineOptions, engine_options
from bench.engine.worker import Load, Timing, Worker, available_cores
from bench.options import add_contestants, names
from bench.report import Goal, envelope, heading, so_far
from bench.tables import draw, page, results_of
from etude.errors import InfrastructureError
from etude.types import Json

JUDGED_BATCHES = (16, 64)
"""Batches at which engines are compared: what rollouts keep busy."""
FIRST_TOKENS = 8
"""New tokens of a batch that is timed for its first tokens, and of a warm-up."""


NATIVE_VS_VLLM = Goal(
    "native_vs_vllm", "at least", 1.0, "Tokens per CPU second over vLLM's; the worst case of our better arithmetic."
)
NATIVE_VS_CONTINUOUS = Goal(
    "native_vs_transformers_cb",
    "at least",
    4.0,
    "Tokens per CPU second over those of transformers' continuous batching; the worst case of our better arithmetic.",
)
INVARIANT_SLOWDOWN = Goal(
    "invariant_slowdown",
    "at most",
    1.5,
    "Tokens per CPU second in fast arithmetic, over those in invariant arithmetic; the worst case.",
)
SWAP_VS_RELOAD = Goal(
    "swap_pause_vs_reload",
    "at least",
    20.0,
    "Time to load a checkpoint, over the pause of the engine for new weights; the worst case.",
)
PREFIX_REUSE = Goal(
    "prefix_reuse",
    "at least",
    0.9,
    "Share of the prompt tokens of a session's later turns that are not computed again.",
)
_COLUMNS = ("contestant", "tokens_per_cpu_s", "tokens_per_cpu_s_range", "tokens_per_s", "first_token_s", "peak_bytes")
_DRAFT_COLUMNS = ("case", "tokens_per_s", "without", "ratio", "accepted_share", "tokens_per_step")
_SWAP_COLUMNS = ("case", "changed_bytes", "pause_s", "in_place_s", "reload_s", "reload_disk_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing that everybody does."""

    model: BenchModel
    dtype: str
    batch: int
    temperature: float

    @property
    def label(self) -> str:
        """For rows and goals."""
        drawing = "sampled" if self.temperature else "greedy"
        return f"{self.model.name} {self.dtype}, batch {self.batch}, {drawing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one contestant in one cell, by round."""

    contestant: str
    cell: Cell
    rounds: tuple[Timing, ...] = ()
    first_token_s: float | None = None
    """Median over completions."""
    missing: str | None = None
    """Why it could not run."""

    @property
    def rates(self) -> list[float]:
        """Sampled tokens per CPU second of each round."""
        return [timing.tokens / timing.cpu_s for timing in self.rounds]

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        row: dict[str, Json] = {"contestant": self.contestant, "case": self.cell.label, "missing": self.missing}
        if not self.rounds:
            return row
        return row | {
            "tokens_per_cpu_s": round(statistics.median(self.rates), 1),
            "tokens_per_cpu_s_range": [round(min(self.rates), 1), round(max(self.rates), 1)],
            "tokens_per_s": round(statistics.median(one.tokens / one.wall_s for one in self.rounds), 1),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 5),
            "peak_bytes": max(timing.peak_bytes for timing in self.rounds),
        }


Rows: TypeAlias = Mapping[tuple[str, Cell], Row]


@dataclass(slots=True)
class _Group:
    """The workers of one model and type that still run, and why others do not."""

    workers: dict[str, Worker] = field(default_factory=dict)
    settings: dict[str, Json] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)
    parser.add_argument("--threads", type=int, default=1, help="of each contestant, on a core each")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    chosen = names(options.contestants)
    return bench_engine(engine_options(chosen, quick=options.quick, threads=options.threads))


def bench_engine(options: EngineOptions | None = None) -> dict[str, Json]:
    """Measure and return the bench object.

    Contestants that cannot run, or fail, are rows with the reason. Raises :class:`~etude.errors.UserError` for options
    that cannot be measured here.
    """
    chosen = options or EngineOptions()
    started_s = time.monotonic()
    settings: dict[str, Json] = {}
    rows: dict[tuple[str, Cell], Row] = {}
    swaps: Sequence[engine_swaps.Swap] = ()
    reuse: sessions.Reuse | None = None
    drafted: Sequence[drafts.Drafting] = ()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch, so_far() as measured:
        for model in chosen.models:
            folder = Path(scratch) / model.name
            write_model(model, folder, seed=0)
            for dtype in chosen.dtypes:
                for row in _rows(model, folder, dtype, chosen, settings):
                    rows[row.contestant, row.cell] = row
        swaps = engine_swaps.measure(chosen.models[0].spec, Path(scratch), chosen.threads, chosen.swaps)
        reuse = sessions.measure(chosen.models[0].spec, chosen.threads)
        drafted = drafts.measure(chosen.models[-1].spec, chosen.threads, chosen.drafts)
    is_whole = not measured.interrupted
    figures: dict[str, Json] = {
        "threads": chosen.threads,
        "prompt_tokens": chosen.prompt_tokens,
        "new_tokens": chosen.new_tokens,
        "rounds": chosen.rounds,
        "contestants": settings,
        "results": [row.to_json() for row in rows.values()],
        "swaps": [swap.to_json() for swap in swaps],
        "drafts": [one.to_json() for one in drafted],
        "sessions": None if reuse is None else reuse.to_json(),
        "card": engine_card.measure() if is_whole and torch.cuda.is_available() else None,
        "goals": native_goals(rows)
        | {
            SWAP_VS_RELOAD.name: _swap_goal(swaps),
            PREFIX_REUSE.name: PREFIX_REUSE.judge_worst({} if reuse is None else {"later turns": reuse.share}),
        },
    }
    return envelope("engine", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """Tokens, swaps and sessions, then the goals and who is missing."""
    tokens = draw(heading(result), results_of(result), _COLUMNS, under="case")
    swaps = draw("new weights", results_of(result, "swaps"), _SWAP_COLUMNS)
    drafted = draw("drafts", results_of(result, "drafts"), _DRAFT_COLUMNS)
    card = [f"card: {result['card']}"] if result["card"] else []
    return page(result, tokens, swaps, drafted, notes=[f"sessions: {result['sessions']}", *card])


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(
    model: BenchModel, folder: Path, dtype: str, options: EngineOptions, settings: dict[str, Json]
) -> Iterator[Row]:
    """Run every contestant in every cell of one model and type; adds their setups to ``settings``."""
    with ExitStack() as stack:
        group = _start(stack, folder, dtype, options)
        settings |= group.settings
        for batch in options.batches:
            for temperature in options.temperatures:
                cell = Cell(model=model, dtype=dtype, batch=batch, temperature=temperature)
                sys.stderr.write(f"{cell.label}\n")
                yield from _race(group, cell, options)


def _start(stack: ExitStack, folder: Path, dtype: str, options: EngineOptions) -> _Group:
    """Start every contestant; they load side by side."""
    group = _Group()
    cores = available_cores()[-options.threads :]
    for name in options.contestants:
        setup = Setup(contestant=name, folder=str(folder), dtype=dtype, cores=cores)
        try:
            group.workers[name] = stack.enter_context(Worker(setup, folder.with_suffix(f".{name}.log")))
        except InfrastructureError as error:
            group.missing[name] = str(error)
    for name, worker in list(group.workers.items()):
        try:
            group.settings[name] = worker.await_ready()
        except InfrastructureError as error:
            group.missing[name] = str(error)
            del group.workers[name]
    return group


def _race(group: _Group, cell: Cell, options: EngineOptions) -> Iterator[Row]:
    """Everyone in turn, round after round. Who fails is out, in this cell and in later ones."""
    load = Load(
        batch=cell.batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        temperature=cell.temperature,
        vocabulary=cell.model.spec.vocab_size,
        seed=0,
    )
    short = replace(load, new_tokens=min(FIRST_TOKENS, options.new_tokens), stamped=True)
    rounds: dict[str, list[Timing]] = {name: [] for name in options.contestants}
    firsts: dict[str, list[float]] = {name: [] for name in options.contestants}
    for turn in range(options.rounds + 1):
        for name, worker in list(group.workers.items()):
            try:
                first = worker.run(replace(short, seed=2 * turn))
                if turn:  # the first turn compiles and allocates
                    rounds[name].append(worker.run(replace(load, seed=2 * turn + 1, least_s=options.least_s)))
                    firsts[name] += [] if first.first_token_s is None else [first.first_token_s]
            except InfrastructureError as error:
                group.missing[name] = str(error)
                del group.workers[name]
    for name in options.contestants:
        if reason := group.missing.get(name):
            yield Row(contestant=name, cell=cell, missing=reason)
        else:
            yield Row(
                contestant=name,
                cell=cell,
                rounds=tuple(rounds[name]),
                first_token_s=statistics.median(firsts[name]) if firsts[name] else None,
            )


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def native_goals(rows: Rows) -> dict[str, Json]:
    """Our engine beside the others; of its two arithmetics the one counts whose worst ratio is better."""
    judged: dict[str, Json] = {}
    for goal, other in ((NATIVE_VS_VLLM, "vllm"), (NATIVE_VS_CONTINUOUS, "transformers-continuous")):
        reasons = {str(row.missing) for row in rows.values() if row.contestant == other and row.missing}
        ratios = {name: _ratios(rows, name, other, judged_only=True) for name in NATIVE}
        best = max(NATIVE, key=lambda name: min(ratios[name].values(), default=0.0))
        judged[goal.name] = goal.judge_worst(ratios[best], "; ".join(sorted(reasons))) | {
            "arithmetic": best.removeprefix("native-"),
            "worst_of": {name: round(min(each.values()), 3) for name, each in ratios.items() if each},
        }
    slowdowns = _ratios(rows, "native-fast", "native-invariant", judged_only=False)
    judged[INVARIANT_SLOWDOWN.name] = INVARIANT_SLOWDOWN.judge_worst(slowdowns)
    return judged


def _swap_goal(swaps: Sequence[engine_swaps.Swap]) -> dict[str, Json]:
    """The pause with spare weights is judged; that without is listed, and what it takes per changed byte."""
    by_case = {f"{swap.changed_share:.2%} changed": swap for swap in swaps}
    return SWAP_VS_RELOAD.judge_worst({case: swap.reload_s / swap.pause_s for case, swap in by_case.items()}) | {
        "in_place": {case: round(swap.reload_s / swap.in_place_s, 2) for case, swap in by_case.items()},
        "in_place_ns_per_changed_byte": {
            case: round(swap.in_place_s * 1e9 / swap.changed_bytes, 3) for case, swap in by_case.items()
        },
    }


def _ratios(rows: Rows, ours: str, theirs: str, *, judged_only: bool) -> dict[str, float]:
    """Case → median over rounds of our tokens per CPU second by theirs.

    ``judged_only`` leaves out models without experts and batches other than ``JUDGED_BATCHES``.
    """
    ratios: dict[str, float] = {}
    for (name, cell), row in rows.items():
        other = rows.get((theirs, cell))
        if name != ours or other is None or not (row.rounds and other.rounds):
            continue
        if judged_only and not (cell.model.sparse and cell.batch in JUDGED_BATCHES):
            continue
        ratios[cell.label] = statistics.median(one / two for one, two in zip(row.rates, other.rates, strict=True))
    return ratios
