"""Weights that change where they lie: an update costs what changed, in whatever layout the engine keeps them.

    probe, once        codes of all numbers ──loader──▶ runtime parameters ──▶ Placement, checked with random bits
    while serving      changed numbers ──Placement──▶ positions and bits on the device: a Scatter
    in the pause       scatter.apply(): plain writes, idempotent
    at any time        digest(): the resident weights, read through the same map, are the published ones

The engine brings its parameters and its own loader, nothing else: sharding, fusing, permuting and padding are seen for
what the loader does. What it computes instead of copies (scales, quantises, sums) is noticed and loaded again in full
when one of its sources changes. This file owns the writes and the proof; the map is learned in ``probe.py`` and kept
in ``weights/placement.py``. Works on any device that torch has.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from etude.engines.weights.parameters import Parameter, as_values, numbers_of
from etude.engines.weights.probe import Loader, Probe
from etude.errors import UserError
from etude.types import TensorSpec
from etude.weights.digest import Digest, layout_digest
from etude.weights.kernels import put_numbers
from etude.weights.placement import Placement, Places, has_codes
from etude.weights.replica import ChangedNumbers

PROBE_BYTES = 8 << 30
"""Host memory a probe may take: larger engines are read some parameters at a time, at one series of loads each."""
RELOAD_SHARE = 8
"""One number in so many, and a full load moves no more bytes than positions (8) and bits (2) of what changed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """New bits for some positions of one parameter, on its device."""

    parameter: Tensor
    """[n] the parameter's values as integers of their width; shares its memory."""
    positions: Tensor
    """[k] int64"""
    bits: Tensor
    """[k]"""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scatter:
    """A prepared update. Applying it twice, or again after a crash half-way, gives the same weights."""

    writes: tuple[Write, ...]
    reload: Callable[[], None] | None
    """Loads everything instead, when something changed that the loader does not merely copy."""

    @property
    def numbers(self) -> int:
        """How many values the writes set."""
        return sum(len(write.positions) for write in self.writes)

    @torch.no_grad()
    def apply(self) -> None:
        """Write. Nothing may read the weights meanwhile; on a GPU, what is launched after it on the stream sees it."""
        if self.reload is not None:
            self.reload()
        for write in self.writes:
            if write.parameter.is_cuda:
                write.parameter.index_put_((write.positions,), write.bits)
            else:  # torch takes twice as long
                put_numbers(*(tensor.numpy() for tensor in (write.parameter, write.positions, write.bits)))


@final
class InPlaceWeights:
    """The weights of one engine, or of one rank of it, to be changed in place.

    Making one probes the loader and leaves the parameters with nonsense in them: load real weights next.
    """

    def __init__(
        self,
        runtime: Mapping[str, Tensor],
        load: Loader,
        specs: Sequence[TensorSpec],
        *,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        """Learn where ``load`` puts the tensors that ``specs`` describes.

        ``runtime`` are the parameters it writes to, by any name. Takes a load for each digit of the largest code
        (four for up to four billion bfloat16 numbers) and three more; others to find the sources of what is computed.
        Raises :class:`~etude.errors.UserError` for a parameter that is not contiguous or of a type that is not stored.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._parameters = {name: Parameter(name, tensor) for name, tensor in runtime.items()}
        self._load = load
        probe = Probe(self._parameters, load, tuple(self._specs.values()), probe_bytes)
        self.placement = Placement(probe.blocks())
        self.computed = frozenset(probe.computed)
        """Parameters that the loader computes rather than copies."""
        self.reloading = probe.sources() | {spec.name for spec in specs if not has_codes(spec)}
        """Tensors that go into those, or whose type has no place: when one changes, everything is loaded."""

    def prepare(
        self, changes: Mapping[str, Sequence[ChangedNumbers]], whole: Mapping[str, Tensor] | None = None
    ) -> Scatter:
        """Bring the new bits of changed numbers, and where they go, to the device; what serves is not touched.

        Safe in a thread beside the engine's. ``whole`` is the new checkpoint, read only if everything has to be loaded:
        when a tensor in :attr:`reloading` changed or very much did. Raises :class:`~etude.errors.UserError` for tensors
        that were not probed, and when it has to be loaded but was not given.
        """
        if unknown := changes.keys() - self._specs.keys():
            raise UserError(
                f"tensor {min(unknown)!r} changed, but was not there when the engine was probed; probe again"
            )
        if computed := changes.keys() & self.reloading:
            if whole is None:
                raise UserError(f"a change of {min(computed)!r} needs a full load: pass the whole checkpoint")
            return self._reload(whole)
        changed = sum(len(run.indices) for runs in changes.values() for run in runs)
        if whole is not None and changed * RELOAD_SHARE > sum(map(numbers_of, self._specs.values())):
            return self._reload(whole)
        found: dict[str, list[tuple[Places, Tensor]]] = {}
        for name, runs in changes.items():
            for run in runs:
                self._place(self._specs[name], run, found)
        writes = tuple(_write(self._parameters[name], parts) for name, parts in found.items())
        for device in {write.positions.device for write in writes if write.positions.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # another stream may apply what this one copied
        return Scatter(writes=writes, reload=None)

    def content(self, names: Collection[str] | None = None) -> Digest:
        """What the weights that are resident add to the state digest, each number once; read where they lie.

        The contents of ranks add up; ``names`` restricts it to some tensors, so that one rank alone counts those that
        all have. Raises :class:`~etude.errors.UserError` for tensors that the parameters do not hold exactly.
        """
        wanted = self._specs.keys() if names is None else set(names)
        if inexact := wanted & (self.reloading | self._rounded()):
            raise UserError(f"the engine keeps {min(inexact)!r} in another form: its digest cannot be read there")
        blocks = [block for block in self.placement.witnesses if block.tensor in wanted]
        parts = (self._parameters[b.parameter].digest(b, self._specs[b.tensor]) for b in blocks)
        return sum(parts, start=Digest.ZERO)

    def digest(self) -> str:
        """The state digest, in hex, of the weights that are resident: equal to the published one, or they differ.

        Raises :class:`~etude.errors.UserError` when not all of them are here; then add up :meth:`content`.
        """
        for spec in self._specs.values():
            resident, count = self.placement.resident(spec.name), numbers_of(spec)
            if has_codes(spec) and spec.name not in self.reloading and resident < count:
                raise UserError(f"the engine holds {resident} of the {count} numbers of {spec.name!r}: it is a part")
        return (layout_digest(self._specs.values()) + self.content()).hex()

    def _reload(self, whole: Mapping[str, Tensor]) -> Scatter:
        return Scatter(writes=(), reload=lambda: self._load(whole))

    def _place(self, spec: TensorSpec, run: ChangedNumbers, found: dict[str, list[tuple[Places, Tensor]]]) -> None:
        if len(run.indices) and int(run.indices[-1]) >= numbers_of(spec):
            raise UserError(
                f"tensor {spec.name!r} has {numbers_of(spec)} numbers, number {run.indices[-1]} cannot change"
            )
        for placed in self.placement.place(spec.name, run.indices):
            values = as_values(run.bits[placed.chosen], spec)
            found.setdefault(placed.parameter, []).append((placed.positions, values))

    def _rounded(self) -> set[str]:
        """Tensors that lost something on the way into their parameter."""
        blocks = self.placement.blocks
        return {b.tensor for b in blocks if not self._parameters[b.parameter].keeps(self._specs[b.tensor])}


def _write(parameter: Parameter, parts: Sequence[tuple[Places, Tensor]]) -> Write:
    """Bring (positions, values) to a parameter's device."""
    positions = torch.from_numpy(np.concatenate([places for places, _ in parts]))
    bits = torch.cat([parameter.cast(values) for _, values in parts])
    device = parameter.bits.device
    return Write(parameter=parameter.bits, positions=positions.to(device), bits=bits.to(device))
