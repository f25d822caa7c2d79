"""The weights of a third-party engine: a verified copy on the host, and the engine's own loader.

    patch or checkpoint ──proof──▶ HostCopy ──loader──▶ the engine's parameters
                                      └─InPlaceWeights, if its parameters are accessible─▶ only the changes

The copy is compared with the published digest before anything is loaded, so a wrong patch does not change the engine.
Runs inside the engine's process, which needs only numpy, torch, numba, orjson and zstandard of étude's dependencies.
``extension.py`` transfers the changes.
"""

from collections.abc import Mapping
from typing import final

import numpy as np
from torch import Tensor

from etude.engines.scatter import Load
from etude.engines.vllm.inplace import InPlaceWeights
from etude.engines.vllm.patches import Patch
from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.digest import Digest, digest_change, state_digest
from etude.weights.replica import ChangedNumbers
from etude.weights.state import Numbers, State, snapshot, spec_key
from etude.weights.tensors import to_tensors

Undo = list[tuple[Numbers, ChangedNumbers, Numbers]]
"""(a tensor's numbers, a change, the previous values)."""


@final
class HostCopy:
    """A checkpoint in host memory that is updated by patches, and its digest."""

    def __init__(self, state: State, digest: str) -> None:
        """Copy ``state``. Raises :class:`~etude.errors.DamagedError` unless it has this ``digest``."""
        self._state = snapshot(state)
        if (actual := self.read_digest()) != digest:
            raise DamagedError(f"the checkpoint is the state {actual[:12]}, not {digest[:12]}: it is another version")
        self.digest = digest

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of its tensors."""
        return tuple(stored.spec for stored in self._state.values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, sharing its memory: to be read only, and before the next patch."""
        return to_tensors(self._state)

    def follow(self, patch: Patch) -> None:
        """Apply a patch, at the cost of what it changes.

        Raises :class:`~etude.errors.DamagedError` if it was made for another state or does not result in its digest;
        then nothing has changed.
        """
        if patch.base != self.digest:
            raise DamagedError(f"the patch changes the state {patch.base[:12]}, {self.digest[:12]} is here")
        undo: Undo = []
        total = Digest.parse(self.digest)
        try:
            for name, runs in patch.changes.items():
                for run in runs:
                    total += self._write(name, run, undo)
            if total.hex() != patch.digest:
                raise DamagedError(f"the patch leads to the state {total.hex()[:12]}, not {patch.digest[:12]}")
        except DamagedError:
            for numbers, run, before in reversed(undo):
                numbers[run.indices] = before
            raise
        self.digest = patch.digest

    def read_digest(self) -> str:
        """The digest of the current memory, computed again."""
        return state_digest(self._state)

    def _write(self, name: str, run: ChangedNumbers, undo: Undo) -> Digest:
        """Set some numbers and return the change of the digest."""
        stored = self._state.get(name)
        if stored is None or stored.numbers.dtype != run.bits.dtype:
            raise DamagedError(f"the patch changes {name!r} of {run.bits.dtype}, which is not here")
        numbers = stored.numbers
        if len(run.indices) and int(run.indices.max()) >= len(numbers):
            raise DamagedError(f"the patch changes number {run.indices.max()} of {name!r}, which has {len(numbers)}")
        before = numbers[run.indices]
        undo.append((numbers, run, before))
        numbers[run.indices] = run.bits
        return digest_change(spec_key(stored.spec), run.indices.astype(np.uint64), before, run.bits)


@final
class RuntimeWeights:
    """An engine's weights, updated from version to version through its own loader."""

    def __init__(self, copy: HostCopy, load: Load, runtime: Mapping[str, Tensor] | None) -> None:
        """Load the weights of ``copy``.

        ``runtime`` are the parameters that the engine computes with, if they can be read and written in place: then an
        update writes only the changes, and the digest is computed from them. ``None`` if the engine packs them (vLLM on
        a CPU passes its linear layers to oneDNN): then, and if it computes with anything other than copies, every
        update loads everything, and the digest is that of the copy.
        """
        self._copy = copy
        self._load = load
        placed = None if runtime is None else InPlaceWeights(runtime, load, copy.specs)
        self._placed = None if placed is None or placed.misfit else placed
        self._is_whole = False
        self._load_all()

    def follow(self, patch: Patch) -> None:
        """Update to a patch's state; raises as :meth:`HostCopy.follow` does, with the weights unchanged."""
        self._copy.follow(patch)
        if self._placed is None:
            self._load_all()
            return
        scatter = self._placed.prepare(patch.changes)
        self._is_whole = False
        scatter.apply()
        self._is_whole = True

    def replace(self, copy: HostCopy) -> None:
        """Update to another checkpoint of the same model."""
        self._copy = copy
        self._load_all()

    def digest(self) -> str:
        """The state digest of the current weights, computed again. Raises :class:`~etude.errors.DamagedError` if a load
        was interrupted.
        """
        if not self._is_whole:
            raise DamagedError("a load broke off half-way: the engine holds parts of two versions; start it again")
        return self._copy.read_digest() if self._placed is None else self._placed.digest()

    def _load_all(self) -> None:
        self._is_whole = False
        self._load(self._copy.tensors())
        self._is_whole = True
