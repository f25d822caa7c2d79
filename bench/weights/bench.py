"""`bench weights`: what a change of weights costs in bytes and in seconds, ours beside what others use.

    pairs of real training (real_deltas.py) ─┬─ each as it is ────▶ everyone                     bytes and speed
                                             └─ one, tiled to GBs ▶ all but Fireworks' package,  speed that no cache
                                                                    which would take an hour     helps with

Speeds are gigabytes of model per CPU second of this process, all its threads counted, and the median of several runs,
so that neither what else runs on the machine nor the first call, which compiles, decides. Whatever is decoded is
compared with the new state bit by bit. ``etude-publish`` is all that a publisher does for a version: comparing,
encoding, digests, its own copy, packs and the commit, into a store in memory.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bench.report import Goal, envelope, so_far
from bench.sync.rehearsal import CACHE, PublishedPair, Rehearsal, published_pairs, state_over
from bench.tables import results_page
from bench.weights.contestants import CONTESTANTS, DeltaContestant, FireworksContestant
from bench.weights.floors import Floors, floors_of
from etude.errors import DamagedError, UserError
from etude.objects import ObjectStore
from etude.types import Json
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.state import State

GB = 1e9
MOST_RUNS = 25
TOO_FAST = "too fast to measure; raise the size"
_WEIGHT_BYTES = 2

StartPublishing: TypeAlias = Callable[[State], AbstractContextManager[Callable[[State], int]]]
"""Publishes a first state, uncounted; what it gives out publishes the next one and returns the bytes of its packs."""


# All but the last are at the smallest learning rate.
BYTES_VS_ARC_V3 = Goal(
    "bytes_vs_arc_v3",
    "at most",
    0.48,
    "Bytes of a change of weights, over those of Fireworks' arc_v3 codec at its best.",
)
BYTES_VS_ARC_V2 = Goal(
    "bytes_vs_arc_v2", "at most", 0.34, "Bytes of a change of weights, over those of Fireworks' arc_v2 codec."
)
ENCODE_VS_MEMCPY = Goal(
    "encode_vs_memcpy", "at least", 0.4, "Speed of encoding a change, over that of copying the weights in memory."
)
ENCODE_VS_ARC_V3 = Goal(
    "encode_vs_arc_v3",
    "at least",
    100.0,
    "Speed of encoding a change, over that of Fireworks' arc_v3 codec at its fastest.",
)
PUBLISH_VS_MEMCPY = Goal(
    "publish_vs_memcpy",
    "at least",
    0.15,
    "Speed of publishing a version, all work included, over that of copying the weights in memory.",
)
BYTES_VS_ENTROPY = Goal(
    "bytes_vs_entropy",
    "at most",
    1.10,
    "Bytes of a change of weights, over the entropy of what changed; the worst case.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pair of states to encode."""

    rate: float
    """The learning rate that lies between the two states."""
    copies: int
    """Number of copies of the real pair in it."""
    state_bytes: int
    """Size of one state."""
    floors: Floors
    """Floors of the real pair."""

    @property
    def changed(self) -> int:
        """Weights that differ."""
        return self.copies * self.floors.changed

    @property
    def changed_share(self) -> float:
        """Share of all weights that differ."""
        return _WEIGHT_BYTES * self.changed / self.state_bytes

    @property
    def label(self) -> str:
        """For rows."""
        return f"lr {self.rate:g}, {self.changed_share:.2%} changed, {self.state_bytes / GB:.3g} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one contestant in one case; ``None``: not available."""

    contestant: str
    case: Case
    size_bytes: float | None = None
    encode_s: float | None = None
    decode_s: float | None = None
    missing: str | None = None
    """Why it could not run."""

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        case = self.case
        is_change = self.size_bytes is not None and self.size_bytes < case.state_bytes / 2
        change = self.size_bytes if is_change else None
        return {
            "contestant": self.contestant,
            "case": case.label,
            "learning_rate": case.rate,
            "changed_share": round(case.changed_share, 5),
            "state_bytes": case.state_bytes,
            "bytes": None if self.size_bytes is None else round(self.size_bytes),
            "bytes_per_changed": _ratio(change, case.changed, 3),
            "ratio": _ratio(case.state_bytes, self.size_bytes, 1),
            "encode_gb_per_s": _ratio(case.state_bytes / GB, self.encode_s, 3),
            "decode_gb_per_s": _ratio(case.state_bytes / GB, self.decode_s, 3),
            "of_gaps_floor": _ratio(change, case.copies * case.floors.gaps_bytes, 3),
            "of_context_floor": _ratio(change, case.copies * case.floors.context_bytes, 3),
            "missing": self.missing,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One encoding and one decoding."""

    size_bytes: int
    encode_s: float
    decode_s: float


@contextmanager
def publish_into_memory(first: State) -> Iterator[Callable[[State], int]]:
    """A real publisher on one encoding thread, its store in memory; version 0 is ``first``."""
    options = PublishOptions(codec="gaps", encoders=1, uploads=1, anchor_every=0, compact=False)
    with Publisher(WeightLog(ObjectStore("memory://")), options) as publisher:
        versions = iter(range(sys.maxsize))

        def publish(state: State) -> int:
            version = next(versions)
            return publisher.publish(state, version=version, step=version).result().size_bytes

        publish(first)
        yield publish


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Contestants, and numbers of repetitions."""

    contestants: Sequence[DeltaContestant] = CONTESTANTS
    repeats: int = 3
    """Runs of each at least."""
    least_s: float = 0.3
    """CPU seconds that the runs of each take together at least, unless there are ``MOST_RUNS`` of them."""
    start_publishing: StartPublishing = publish_into_memory

    def wants_more(self, seconds: Sequence[float]) -> bool:
        """True if runs that took ``seconds`` are too few or too short."""
        return len(seconds) < self.repeats or (sum(seconds) < self.least_s and len(seconds) < MOST_RUNS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--size-gb", type=float, default=2.0, help="size of the tiled state")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_weights(size_gb=options.size_gb)


def bench_weights(
    *, size_gb: float = 2.0, plan: Plan | None = None, rehearsal: Rehearsal | None = None, cache: Path = CACHE
) -> dict[str, Json]:
    """Measure every contestant on every pair and return the bench object.

    The pair of the smallest learning rate, by which the goals are judged, is also tiled to states of ``size_gb``, which
    takes six times that as memory. The pairs are made on the first call, by all cores, and read from ``cache`` later.
    Raises :class:`~etude.errors.UserError` for sizes and repeats that measure nothing,
    :class:`~etude.errors.DamagedError` when a contestant does not restore the new state.
    """
    plan = plan or Plan()
    if size_gb <= 0 or not 1 <= plan.repeats <= MOST_RUNS:
        raise UserError(
            f"bench weights: size_gb={size_gb} must be positive and repeats={plan.repeats} between 1 and {MOST_RUNS}"
        )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        pairs = published_pairs(rehearsal or Rehearsal(), cache, _say)
        torch.set_num_threads(1)
        started_s = time.perf_counter()
        judged = min(pair.rate for pair in pairs)
        rows: list[Row] = []
        with so_far() as measured:
            for pair in pairs:
                rows += _rows_of(pair, size_gb if pair.rate == judged else 0.0, plan)
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, Json] = {"results": [row.to_json() for row in rows], "goals": _goals(rows)}
    return envelope("weights", time.perf_counter() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    columns = ("contestant", "bytes_per_changed", "ratio", "encode_gb_per_s", "decode_gb_per_s", "of_gaps_floor",
               "of_context_floor")  # fmt: skip
    return results_page(result, columns, under="case")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows_of(pair: PublishedPair, size_gb: float, plan: Plan) -> Iterator[Row]:
    """All rows of one pair: as it is, then, unless ``size_gb`` is 0, tiled to that size."""
    floors = floors_of(pair)
    case = Case(rate=pair.rate, copies=1, state_bytes=pair.new.nbytes, floors=floors)
    yield Row(contestant="floor: gaps and steps", case=case, size_bytes=floors.gaps_bytes)
    yield Row(contestant="floor: with exponents", case=case, size_bytes=floors.context_bytes)
    yield from _race(plan, case, pair)
    if size_gb:
        copies = max(2, -int(-size_gb * GB // case.state_bytes))
        case = replace(case, copies=copies, state_bytes=copies * case.state_bytes)
        unhurried = [one for one in plan.contestants if not isinstance(one, FireworksContestant)]
        yield from _race(replace(plan, contestants=unhurried), case, _tiled(pair, copies))


def _race(plan: Plan, case: Case, pair: PublishedPair) -> Iterator[Row]:
    """Everyone in turn, round after round, so that a machine that slows down slows down all of them.

    Before each run the old state is copied back, in one piece, to where it is decoded in place: that is ``memcpy``.
    """
    old, new = pair.states()
    runs: dict[str, list[_Run]] = {one.name: [] for one in plan.contestants if one.missing is None}
    copies_s: list[float] = []
    held_bits = pair.old.copy()
    current = state_over(pair.specs, held_bits)
    for _ in range(MOST_RUNS):
        for contestant in plan.contestants:
            if contestant.missing is None and plan.wants_more([one.encode_s for one in runs[contestant.name]]):
                copies_s.append(_copy(pair.old, held_bits))
                runs[contestant.name].append(_run(contestant, old, new, current))
    copy_s = statistics.median(copies_s)
    yield Row(contestant="memcpy", case=case, size_bytes=case.state_bytes, encode_s=copy_s, decode_s=copy_s)
    for contestant in plan.contestants:
        if contestant.missing is not None:
            yield Row(contestant=contestant.name, case=case, missing=contestant.missing)
            continue
        done = runs[contestant.name]
        yield Row(
            contestant=contestant.name,
            case=case,
            size_bytes=done[0].size_bytes,
            encode_s=statistics.median(run.encode_s for run in done),
            decode_s=statistics.median(run.decode_s for run in done),
        )
    yield publish_all_in(plan, case, old, new)


def _run(contestant: DeltaContestant, old: State, new: State, current: State) -> _Run:
    """One encoding and decoding. ``current`` equals ``old`` and may be the new state afterwards."""
    started_s = time.process_time()
    packets = contestant.encode(old, new)
    encoded_s = time.process_time()
    decoded = contestant.decode(packets, current)
    decoded_s = time.process_time()
    for name, tensor in new.items():
        if not np.array_equal(decoded[name].data, tensor.data):
            raise DamagedError(f"{contestant.name} did not restore tensor {name!r}: its figures would mean nothing")
    size_bytes = sum(memoryview(packet).nbytes for packet in packets)
    return _Run(size_bytes=size_bytes, encode_s=encoded_s - started_s, decode_s=decoded_s - encoded_s)


def _copy(source: npt.NDArray[np.uint16], target: npt.NDArray[np.uint16]) -> float:
    """Copy all weights; returns the CPU seconds that took."""
    started_s = time.process_time()
    np.copyto(target, source)
    return time.process_time() - started_s


def publish_all_in(plan: Plan, case: Case, old: State, new: State) -> Row:
    """Cost of publishing a version; alternates between two states, so that every run publishes the same change."""
    seconds: list[float] = []
    sizes: list[int] = []
    with plan.start_publishing(old) as publish:
        while plan.wants_more(seconds):
            started_s = time.process_time()
            sizes.append(publish(old if len(sizes) % 2 else new))
            seconds.append(time.process_time() - started_s)
    return Row(contestant="etude-publish", case=case, size_bytes=sizes[0], encode_s=statistics.median(seconds))


def _tiled(pair: PublishedPair, copies: int) -> PublishedPair:
    """``copies`` times the same tensors under different names, each in its own memory."""
    specs = [replace(spec, name=f"{index:03}.{spec.name}") for index in range(copies) for spec in pair.specs]
    return replace(pair, specs=tuple(specs), old=np.tile(pair.old, copies), new=np.tile(pair.new, copies))


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _goals(rows: Sequence[Row]) -> dict[str, Json]:
    """Every goal with its value; without one, and not met, where a contestant is missing."""
    rate = min(row.case.rate for row in rows)
    real = {row.contestant: row for row in rows if row.case.copies == 1 and row.case.rate == rate}
    tiled = {row.contestant: row for row in rows if row.case.copies > 1 and row.case.rate == rate}
    ours = min(_bytes(real["etude-gaps"]), _bytes(real["etude-classes"]))
    arc_v2, arc_v3 = real["arc_v2"], (real["arc_v3"], real["arc_v3-patient"])
    gaps_s, copy_s = real["etude-gaps"].encode_s, tiled["memcpy"].encode_s
    values = (
        (BYTES_VS_ARC_V3, _ratio(ours, _least(row.size_bytes for row in arc_v3)), arc_v3[0].missing),
        (BYTES_VS_ARC_V2, _ratio(ours, arc_v2.size_bytes), arc_v2.missing),
        (ENCODE_VS_MEMCPY, _ratio(copy_s, tiled["etude-gaps"].encode_s), None),
        (ENCODE_VS_ARC_V3, _ratio(_least(row.encode_s for row in arc_v3), gaps_s), arc_v3[0].missing),
        (PUBLISH_VS_MEMCPY, _ratio(copy_s, tiled["etude-publish"].encode_s), None),
        (BYTES_VS_ENTROPY, max(_of_floor(row) for row in rows), None),
    )
    return {goal.name: goal.judge(value, reason or TOO_FAST) for goal, value, reason in values}


def _of_floor(row: Row) -> float:
    """Size from one of our codecs on a real pair, as a multiple of its floor; 0 for other rows."""
    if row.case.copies > 1:
        return 0.0
    if row.contestant == "etude-gaps":
        return _bytes(row) / row.case.floors.gaps_bytes
    return _bytes(row) / row.case.floors.context_bytes if row.contestant == "etude-classes" else 0.0


def _least(figures: Iterable[float | None]) -> float | None:
    """The best of a contestant's variants, whichever that is; ``None`` when they could not run."""
    return min((figure for figure in figures if figure is not None), default=None)


def _bytes(row: Row) -> float:
    assert row.size_bytes is not None, row.contestant
    return row.size_bytes


def _ratio(one: float | None, other: float | None, digits: int | None = None) -> float | None:
    """``one / other``, optionally rounded; ``None`` if either is missing or the divisor is 0."""
    if one is None or not other:
        return None
    return one / other if digits is None else round(one / other, digits)
