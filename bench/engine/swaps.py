"""How long sampling pauses for new weights, beside loading them the usual way.

    two states that differ in a share of their numbers ──▶ log in memory ──follower──▶ engine.swap(): the pause

With spare weights the pause is an exchange of references, without it is the writing of what changed, so it grows with
the changed bytes. A reload loads all weights of the same version through the model's loader, from memory or from disk.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.engine.models import END_ID, INIT_STD, PAD_ID
from etude.config.inference import EngineConfig, NativeOptions, NumericsConfig
from etude.engines.native.opener import NativeUpdater
from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.objects import ObjectStore
from etude.run.numerics import largest_state, load_published, serving_model
from etude.run.weight_follower import WeightFollower
from etude.types import Json
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.replica import PulledWeights
from etude.weights.state import State, StoredTensor, state_bytes
from etude.weights.tensors import to_stored, to_tensors

_NUMBER_BYTES = 2
_FLIPPED_BIT = np.uint16(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One share of changes."""

    state_bytes: int
    changed_bytes: int
    pause_s: float
    """With spare weights."""
    in_place_s: float
    """Without."""
    reload_s: float
    """All weights, from host memory."""
    reload_disk_s: float
    """From a checkpoint in the page cache."""

    @property
    def changed_share(self) -> float:
        """Changed bytes as a share of all bytes."""
        return self.changed_bytes / self.state_bytes

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        return {
            "case": f"{self.state_bytes / 1e6:.0f} MB, {self.changed_share:.2%} changed",
            "changed_bytes": self.changed_bytes,
            "pause_s": round(self.pause_s, 8),
            "in_place_s": round(self.in_place_s, 6),
            "reload_s": round(self.reload_s, 5),
            "reload_disk_s": round(self.reload_disk_s, 5),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """Swaps to time."""

    shares: tuple[float, ...] = (0.001, 0.01, 0.1)
    """Shares of all numbers that change."""
    repeats: int = 5
    """Swaps of each share, and reloads; medians are taken."""

    @property
    def swaps(self) -> tuple[float, ...]:
        """The share of every swap in turn; the first is not counted, it compiles."""
        return (self.shares[0], *(share for share in self.shares for _ in range(self.repeats)))


def measure(spec: ModelSpec, scratch: Path, threads: int, plan: SwapPlan) -> list[Swap]:
    """Swap a bfloat16 model of this shape in two engines, with and without spare weights."""
    torch.set_num_threads(threads)
    model = Decoder(spec).to(torch.bfloat16)
    model.initialise(0, INIT_STD)
    first = {name: _copied(stored) for name, stored in to_stored(state_of(model)).items()}
    save_checkpoint(scratch / "swaps", spec, to_tensors(first), end_id=END_ID, pad_id=PAD_ID)
    memory_s, disk_s = _reloads(model, first, scratch / "swaps", plan.repeats)
    spare_s, in_place_s = zip(*_pauses(spec, first, plan), strict=True)
    return [
        Swap(
            state_bytes=state_bytes(first),
            changed_bytes=_NUMBER_BYTES * sum(_changed(len(stored.numbers), share) for stored in first.values()),
            pause_s=statistics.median(spare_s[start : start + plan.repeats]),
            in_place_s=statistics.median(in_place_s[start : start + plan.repeats]),
            reload_s=memory_s,
            reload_disk_s=disk_s,
        )
        for start, share in zip(range(1, len(spare_s), plan.repeats), plan.shares, strict=True)
    ]


def _pauses(spec: ModelSpec, first: State, plan: SwapPlan) -> Iterator[tuple[float, float]]:
    """The pause of every swap, with and without spare weights, of engines that follow ``first`` and its successors."""
    log = WeightLog(ObjectStore("memory://"))
    options = PublishOptions(encoders=1, uploads=1, anchor_every=0, compact=False)
    with (
        Publisher(log, options) as publisher,
        closing(WeightFollower(log, largest_state(spec))) as spare,
        closing(WeightFollower(log, largest_state(spec))) as lone,
    ):
        publisher.publish(first, version=0, step=0).result()
        pairs = [
            (spare, open_engine(spare.start(), spec, spare=True)),
            (lone, open_engine(lone.start(), spec, spare=False)),
        ]
        for version, state in enumerate(_successors(first, plan), 1):
            publisher.publish(state, version=version, step=version).result()
            spare_s, in_place_s = (_swapped(follower, updater) for follower, updater in pairs)
            yield spare_s, in_place_s


def open_engine(pulled: PulledWeights, spec: ModelSpec, *, spare: bool) -> NativeUpdater:
    """A bfloat16 engine on a CPU, for one call at a time."""
    numerics, config = (
        NumericsConfig(dtype="bfloat16"),
        EngineConfig(max_running=1, options=NativeOptions(spare_weights=spare)),
    )
    make_model, load = partial(serving_model, spec, numerics, "cpu"), partial(load_published, config=numerics)
    return NativeUpdater.open(pulled, config, make_model, load)


def _swapped(follower: WeightFollower, updater: NativeUpdater) -> float:
    """Move an engine to the newest version; returns the pause."""
    _, pause_s = asyncio.run(follower.update(updater))
    updater.settle()
    return pause_s


def _successors(first: State, plan: SwapPlan) -> Iterator[State]:
    """States that each differ from the one before in the last bit of a share of the numbers of every tensor."""
    random = np.random.default_rng(0)
    state = first
    for share in plan.swaps:
        state = {name: _copied(stored) for name, stored in state.items()}
        for stored in state.values():
            numbers = stored.numbers
            numbers[random.choice(len(numbers), _changed(len(numbers), share), replace=False)] ^= _FLIPPED_BIT
        yield state


def _changed(numbers: int, share: float) -> int:
    return max(1, round(numbers * share))


def _reloads(model: Decoder, state: State, folder: Path, repeats: int) -> tuple[float, float]:
    """Median seconds of loading everything: from tensors in memory, and from the checkpoint."""
    tensors = to_tensors(state)
    memory_s, disk_s = [], []
    for _ in range(repeats):
        started_s = time.perf_counter()
        load_state(model, tensors)
        loaded_s = time.perf_counter()
        load_state(model, load_checkpoint(folder)[1])
        memory_s.append(loaded_s - started_s)
        disk_s.append(time.perf_counter() - loaded_s)
    return statistics.median(memory_s), statistics.median(disk_s)


def _copied(stored: StoredTensor) -> StoredTensor:
    return StoredTensor(spec=stored.spec, data=stored.data.copy())
