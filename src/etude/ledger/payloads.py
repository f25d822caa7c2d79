"""The bulky half of a turn, its routes and sampling mask, as objects beside the ledger: files, or in a bucket.

A turn of a large model has kilobytes of routes per token. They are written once, by the gateway, and read once, by the
trainer; everything between handles a :class:`~etude.types.PayloadRef`: 64 characters of digest and a size.

    payloads/3f/3f9a…c2.safetensors      named by the SHA-256 of its bytes; metadata: the session it is from

Its bytes are compressed by zstd: a route takes 16 bits and says about half as much. One that is not is read as it is.

A turn reads again what the turns before it read. Its object has the routes of the tokens that are new in it; those
before are of the turn that it goes on from. In memory the routes of a branch are one array, which those of its turns
are views of, so that storage and memory grow with what was read, not with the square of it.

Owns the objects' form, their verification and removal. Does not own where they are kept (:mod:`etude.objects`), what
routes mean or whether they fit a model (:class:`~etude.types.RouteSpace`). A write is complete or absent after
``kill -9`` of any process; a power cut may lose the last ones in a folder, which reading then says by name.

Where only sampled tokens are replayed, it has the routes of the tokens that produced these alone, under another name: a
prompt is most of what an agent's turn reads, and the way to the trainer may be long. What was left out comes back as
``NO_ROUTE``.

Array legend: P prompt tokens of a turn, C sampled tokens of a turn, R rows of routes that its object has.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.errors import DamagedError
from etude.objects import Objects
from etude.types import NO_ROUTE, PayloadRef, Routes, SamplingMask, Turn

ROUTES, KEPT_OFFSETS, KEPT_IDS = "routes", "kept_offsets", "kept_ids"
"""Names of the tensors: uint16 [R, layers, k] of the last R tokens that were read, int64 [C + 1], int32 [Σ kept]."""
SAMPLED_ROUTES = "sampled_routes"
"""In place of ``ROUTES``: uint16 [C, layers, k] of the tokens that produced the sampled ones."""
_READERS, _ALONE = 16, 4
"""Payloads of a rollout that are read at a time, and the fewest for which threads are started."""


class Payloads:
    """The payloads of one run; any number of processes may use them at a time. Safe to share between threads.

    Every method raises :class:`~etude.errors.InfrastructureError` when the storage does not do its part.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def stow(self, turn: Turn, session: str, stored: int = 0, *, sampled_only: bool = False) -> Turn:
        """The same turn with a reference in place of its routes and sampling mask, which are stored.

        The first ``stored`` rows of its routes are left out: all that an earlier turn of the conversation has, from
        which this one goes on. With ``sampled_only`` those of its whole prompt but the last token are. A turn that has
        neither comes back as it is. ``session`` goes into the object, so that equal turns of one session share it and
        those of two sessions do not: either rollout can be done with before the other.
        """
        arrays = _arrays(turn, stored, sampled_only=sampled_only)
        if not arrays:
            return turn
        data = zstandard.compress(save(arrays, metadata={"session": session}))
        ref = PayloadRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        self._objects.put_if_absent(_key(ref), data)
        return replace(turn, routes=None, sampling_mask=None, payload=ref)

    def fetch(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns that :meth:`stow` was given: all those of a rollout, in their order, stowed or not.

        Routes that were left out on purpose are ``NO_ROUTE``.

        Raises :class:`~etude.errors.DamagedError` naming the object.
        """
        payloads = self._read_all([turn.payload for turn in turns])
        sampled_only = any(SAMPLED_ROUTES in arrays for arrays in payloads)
        fresh = [arrays.get(SAMPLED_ROUTES if sampled_only else ROUTES) for arrays in payloads]
        routes = _joined(turns, fresh, sampled_only=sampled_only)
        return tuple(
            turn if turn.payload is None else self._restored(turn, turn.payload, arrays, rows)
            for turn, arrays, rows in zip(turns, payloads, routes, strict=True)
        )

    def _read_all(self, refs: Sequence[PayloadRef | None]) -> list[dict[str, npt.NDArray[Any]]]:
        """The arrays of some payloads, several of which are read at a time: of a bucket each takes a round trip."""
        if sum(ref is not None for ref in refs) < _ALONE:
            return [self._read(ref) for ref in refs]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self._read, refs))

    def _read(self, ref: PayloadRef | None) -> dict[str, npt.NDArray[Any]]:
        if ref is None:
            return {}
        data = self._objects.get(_key(ref))
        if data is None:
            raise DamagedError(f"{self._name(ref)} is missing; {_FIX}")
        if hashlib.sha256(data).hexdigest() != ref.digest:
            raise DamagedError(f"{self._name(ref)} does not match its name, a SHA-256; {_FIX}")
        try:
            return load(zstandard.decompress(data) if data.startswith(zstandard.FRAME_HEADER) else data)
        except (SafetensorError, zstandard.ZstdError, ValueError, KeyError) as error:
            raise DamagedError(f"{self._name(ref)} cannot be read: {error}; {_FIX}") from error

    def _restored(
        self, turn: Turn, ref: PayloadRef, arrays: dict[str, npt.NDArray[Any]], routes: Routes | None
    ) -> Turn:
        try:
            offsets = arrays.get(KEPT_OFFSETS)
            mask = None if offsets is None else SamplingMask(offsets=offsets, token_ids=arrays[KEPT_IDS])
            return replace(turn, routes=routes, sampling_mask=mask, payload=None)
        except (ValueError, KeyError) as error:
            raise DamagedError(f"{self._name(ref)} is of another turn: {error}; {_FIX}") from error

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Remove the payloads of rollouts that will not be read again; those that are gone already are no fault."""
        self._objects.delete(*dict.fromkeys(map(_key, refs)))

    def sweep(self, in_use: Callable[[], Iterable[PayloadRef]], *, older_than_s: float) -> int:
        """Remove payloads that have been there for so many seconds and are not ``in_use``; returns how many those were.

        The time is the storage's own. What is in use is asked only where there are such payloads. A turn is referred to
        when its rollout ends, so that has to take less time.
        """
        entries = self._objects.entries("")
        if not entries:
            return 0
        before_s = self._objects.now() - older_than_s
        old = {entry.key for entry in entries if entry.modified_s < before_s}
        if old:
            old -= set(map(_key, in_use()))
        self._objects.delete(*sorted(old))
        return len(old)

    def _name(self, ref: PayloadRef) -> str:
        """A payload in messages."""
        return f"payload {self._objects.url}/{_key(ref)}"


def _key(ref: PayloadRef) -> str:
    return f"{ref.digest[:2]}/{ref.digest}.safetensors"


_FIX = "restore it from a copy of the run: what an engine did cannot be computed again"


def _arrays(turn: Turn, stored: int, *, sampled_only: bool) -> dict[str, npt.NDArray[np.generic]]:
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    if turn.routes is not None and sampled_only:
        arrays[SAMPLED_ROUTES] = np.ascontiguousarray(turn.routes[len(turn.prompt_ids) - 1 :])
    elif turn.routes is not None:
        arrays[ROUTES] = np.ascontiguousarray(turn.routes[stored:])
    if turn.sampling_mask is not None:
        arrays[KEPT_OFFSETS] = np.ascontiguousarray(turn.sampling_mask.offsets)
        arrays[KEPT_IDS] = np.ascontiguousarray(turn.sampling_mask.token_ids)
    return arrays


def _joined(
    turns: Sequence[Turn], fresh: Sequence[Routes | None], *, sampled_only: bool = False
) -> list[Routes | None]:
    """The routes of all that each turn read, of which ``fresh`` [R, layers, k] are the last ones.

    Each branch is put together once, for the last of its turns; the others get views of it. Where rows are missing that
    no earlier turn has, they stay missing; with ``sampled_only`` they are ``NO_ROUTE``.
    """
    above = _continued(turns, fresh) if sampled_only else _predecessors(turns, fresh)
    whole: list[Routes | None] = [None] * len(turns)
    for index in reversed(range(len(turns))):
        rows = fresh[index]
        if rows is None or whole[index] is not None:
            continue
        if above[index] is None and not sampled_only:
            whole[index] = rows
            continue
        branch = np.full((_rows_read(turns[index]), *rows.shape[1:]), NO_ROUTE, rows.dtype)
        place: int | None = index
        while place is not None and (part := fresh[place]) is not None:
            end = _rows_read(turns[place])
            branch[end - len(part) : end] = part
            whole[place] = branch[:end] if whole[place] is None else whole[place]
            place = above[place]
    return whole


def _continued(turns: Sequence[Turn], fresh: Sequence[Routes | None]) -> list[int | None]:
    """For each turn the newest earlier one that it goes on from; ``None`` for none, and where it has no rows."""
    shapes = [None if rows is None else rows.shape[1:] for rows in fresh]
    return [
        next(
            (
                place
                for place in reversed(range(index))
                if shapes[place] == shapes[index] and turn.continues(turns[place])
            ),
            None,
        )
        if shapes[index] is not None
        else None
        for index, turn in enumerate(turns)
    ]


def _predecessors(turns: Sequence[Turn], fresh: Sequence[Routes | None]) -> list[int | None]:
    """For each turn the earlier one that has all rows that its own lack; ``None``: they lack none, or no turn has."""
    above: list[int | None] = []
    complete: dict[tuple[int, ...], list[int]] = {}  # by the shape of all their rows, oldest first
    for index, (turn, rows) in enumerate(zip(turns, fresh, strict=True)):
        place = None
        if rows is not None:
            missing = _rows_read(turn) - len(rows)
            having = complete.get((missing, *rows.shape[1:]), ()) if missing > 0 else ()
            place = next((one for one in reversed(having) if turn.continues(turns[one])), None)
            if missing == 0 or place is not None:
                complete.setdefault((_rows_read(turn), *rows.shape[1:]), []).append(index)
        above.append(place)
    return above


def _rows_read(turn: Turn) -> int:
    """A row for every token but the last one that was sampled."""
    return turn.length - 1
