"""In-place weight updates of a third-party engine, in any layout of its parameters.

    probe, once        codes of all numbers ──loader──▶ runtime parameters ──▶ Placement, checked with random bits
    while serving      changed numbers ──Placement──▶ positions and bits on the device: a Scatter
    at any time        digest(): the resident weights, read through the same map, are the published ones

The engine supplies only its parameters and its own loader: sharding, fusing, permuting and padding are inferred from
what the loader does. If a loader computes (scales, quantises, sums), this is detected, and the engine has to be loaded
as a whole. The map is learned in ``layout_probe.py`` and stored in ``weights/placement.py``.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import final

import numpy as np
import torch
from torch import Tensor

from etude.engines.scatter import Load, Scatter, Write, check_change, numbers_of, scatter_of, write_to
from etude.engines.vllm.layout_probe import LayoutProbe, Parameter
from etude.errors import UserError
from etude.types import TensorSpec
from etude.weights.device import digest_tensor
from etude.weights.digest import Digest, layout_digest
from etude.weights.placement import Block, Placement, Places, Rectangle
from etude.weights.replica import ChangedNumbers
from etude.weights.state import Region, spec_key
from etude.weights.tensors import TORCH_TYPES

PROBE_SHARE = 4
"""A probe may use 1/``PROBE_SHARE`` of the machine's memory; larger engines are read in groups of parameters, with one
series of loads each.
"""


@final
class InPlaceWeights:
    """The weights of one engine, updated in place.

    The constructor probes the loader and leaves nonsense in the parameters: load real weights next.
    """

    def __init__(
        self,
        runtime: Mapping[str, Tensor],
        load: Load,
        specs: Sequence[TensorSpec],
        *,
        probe_bytes: int | None = None,
    ) -> None:
        """Learn where ``load`` writes the tensors that ``specs`` describes.

        ``runtime`` are the parameters that it writes, by any name. Takes one load per digit of the largest code (four
        for up to four billion bfloat16 numbers) and three more. Raises :class:`~etude.errors.UserError` for a parameter
        that is not contiguous or of a type that is not stored.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._parameters = {name: Parameter(name, tensor) for name, tensor in runtime.items()}
        limit_bytes = probe_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PROBE_SHARE
        probe = LayoutProbe(self._parameters, load, tuple(self._specs.values()), limit_bytes)
        self.placement = Placement(probe.blocks())
        self.misfit = self._find_misfit(probe.computed)
        """Reason why the weights cannot be updated in place, but have to be loaded as a whole; empty if they can."""

    def prepare(self, changes: Mapping[str, Sequence[ChangedNumbers]]) -> Scatter:
        """Copy the new bits of changed numbers and their positions to the device; the serving weights are not touched.

        Safe in a thread beside the engine's. Raises :class:`~etude.errors.UserError` for tensors that were not probed.
        """
        if unknown := changes.keys() - self._specs.keys():
            raise UserError(
                f"tensor {min(unknown)!r} changed, but was not there when the engine was probed; probe again"
            )
        parts: dict[str, list[tuple[Places, Tensor]]] = {}
        for name, runs in changes.items():
            for run in runs:
                self._place(self._specs[name], run, parts)
        return scatter_of(self._write(name, placed) for name, placed in parts.items())

    def digest(self) -> str:
        """The state digest, in hex, of the resident weights; differs from the published one if the weights differ."""
        parts = (_digest(self._parameters[b.parameter], b, self._specs[b.tensor]) for b in self.placement.witnesses)
        return (layout_digest(self._specs.values()) + sum(parts, start=Digest.ZERO)).hex()

    def _find_misfit(self, computed: Collection[str]) -> str:
        """Description of the first part that is not an exact copy of all numbers."""
        if computed:
            return f"the engine computes {min(computed)!r}"
        for block in self.placement.blocks:
            if not self._parameters[block.parameter].keeps(self._specs[block.tensor]):
                return f"the engine keeps {block.tensor!r} in another form"
        for spec in self._specs.values():
            if (resident := self.placement.resident(spec.name)) < numbers_of(spec):
                return f"the engine holds {resident} of the {numbers_of(spec)} numbers of {spec.name!r}"
        return ""

    def _place(self, spec: TensorSpec, run: ChangedNumbers, parts: dict[str, list[tuple[Places, Tensor]]]) -> None:
        check_change(spec, run)
        for placed in self.placement.place(spec.name, run.indices):
            values = torch.from_numpy(run.bits[placed.chosen]).view(TORCH_TYPES[spec.dtype])
            parts.setdefault(placed.parameter, []).append((placed.positions, values))

    def _write(self, name: str, parts: Sequence[tuple[Places, Tensor]]) -> Write:
        parameter = self._parameters[name]
        positions = torch.from_numpy(np.concatenate([places for places, _ in parts]))
        return write_to(parameter.bits, positions, torch.cat([parameter.cast(values) for _, values in parts]))


def _digest(parameter: Parameter, block: Block, spec: TensorSpec) -> Digest:
    """The share of one block's resident numbers in the digest; takes device memory for a copy of the block."""
    key = spec_key(spec)
    if isinstance(block, Rectangle):
        shape, strides = (block.region.rows, block.region.width), (block.row_step, block.column_step)
        start = parameter.bits.storage_offset() + block.position
        return digest_tensor(
            parameter.stored(parameter.bits.as_strided(shape, strides, start), spec), key, block.region
        )
    values = parameter.stored(parameter.bits[torch.from_numpy(block.positions).to(parameter.bits.device)], spec)
    ends = np.flatnonzero(np.diff(block.indices) != 1) + 1
    total = Digest.ZERO
    for start, stop in pairwise((0, *ends.tolist(), block.count)):
        first = int(block.indices[start])
        total += digest_tensor(values[start:stop], key, Region.run(first, first + stop - start))
    return total
