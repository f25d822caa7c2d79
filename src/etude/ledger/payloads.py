"""The bulky half of a turn, its routes and kept sets, as files beside the ledger.

A turn of a large model has kilobytes of routes per token. They are written once, by the gateway, and read once, by the
trainer; everything between handles a :class:`~etude.types.PayloadRef`: 64 characters of digest and a size.

    payloads/3f/3f9a…c2.safetensors      named by the SHA-256 of its bytes; metadata: the session it is from

Owns the files' form, their verification and removal. Does not own what routes mean or whether they fit a model
(:class:`~etude.types.RouteSpace`). A write is complete or absent after ``kill -9`` of any process; a power cut may
lose the last ones, which reading then says by name.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.errors import DamagedError
from etude.types import KeptSets, PayloadRef, Turn

ROUTES, KEPT_OFFSETS, KEPT_IDS = "routes", "kept_offsets", "kept_ids"
"""Names of the tensors: uint16 [P + C − 1, layers, k], int64 [C + 1], int32 [Σ kept]."""


class Payloads:
    """The payload files of one run; any number of processes may use the folder at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stow(self, turn: Turn, session: str) -> Turn:
        """The same turn with a reference in place of its routes and kept sets, which are written to disk.

        A turn that has neither comes back as it is. ``session`` goes into the file, so that equal turns of one session
        share it and those of two sessions do not: either rollout can be done with before the other.
        """
        arrays = _arrays(turn)
        if not arrays:
            return turn
        data = save(arrays, metadata={"session": session})
        ref = PayloadRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        self._write(self._file(ref), data)
        return replace(turn, routes=None, kept=None, payload=ref)

    def fetch(self, turn: Turn) -> Turn:
        """The turn that :meth:`stow` was given. Raises :class:`~etude.errors.DamagedError` naming the file."""
        if turn.payload is None:
            return turn
        file = self._file(turn.payload)
        try:
            data = file.read_bytes()
            if hashlib.sha256(data).hexdigest() != turn.payload.digest:
                raise DamagedError(f"payload {file} does not match its name, a SHA-256; {_WAY_OUT}")
            arrays = load(data)
            offsets = arrays.get(KEPT_OFFSETS)
            kept = None if offsets is None else KeptSets(offsets=offsets, token_ids=arrays[KEPT_IDS])
            return replace(turn, routes=arrays.get(ROUTES), kept=kept, payload=None)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise DamagedError(f"payload {file} cannot be read: {error}; {_WAY_OUT}") from error

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Remove files whose rollouts will not be read again; those that are gone already are no fault."""
        for ref in refs:
            self._file(ref).unlink(missing_ok=True)

    def _file(self, ref: PayloadRef) -> Path:
        return self._folder / ref.digest[:2] / f"{ref.digest}.safetensors"

    def _write(self, file: Path, data: bytes) -> None:
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.stem}.{uuid4().hex}")
        try:
            partial.write_bytes(data)
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


_WAY_OUT = "restore it from a copy of the run folder: what an engine did cannot be computed again"


def _arrays(turn: Turn) -> dict[str, npt.NDArray[np.generic]]:
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    if turn.routes is not None:
        arrays[ROUTES] = np.ascontiguousarray(turn.routes)
    if turn.kept is not None:
        arrays[KEPT_OFFSETS] = np.ascontiguousarray(turn.kept.offsets)
        arrays[KEPT_IDS] = np.ascontiguousarray(turn.kept.token_ids)
    return arrays
