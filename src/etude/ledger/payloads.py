"""Large parts of rollouts, stored as objects beside the ledger: in files or in a bucket.

    payloads/turns/81/81d0…7e.safetensors   the turns of a rollout (:mod:`etude.ledger.turns`); metadata: its id
    payloads/3f/3f9a…c2.safetensors         routes and sampling mask of one turn; metadata: its session

Objects are named by the SHA-256 of their bytes, compressed by zstd (uncompressed ones can also be read). All other code
handles a :class:`~etude.types.PayloadRef`: 64 characters of digest and a size.

**Turns** are written once, by the rollouts process, before a row of the ledger references them, and are kept while a
row does. **Routes and masks**, kilobytes per token for a large model, are written by the gateway and read by the
trainer; they are removed when the step that trained on them is committed.

A turn's prompt repeats the tokens of earlier turns. Its object has only the routes of its new tokens; the earlier ones
are in the turn that it continues. In memory the routes of a branch are one array, and its turns have views of it, so
storage and memory grow linearly with the tokens read, not quadratically.

If only sampled tokens are replayed, an object has, under another name, only the routes of the tokens that produced
them: the prompt is most of an agent's turn, and the network to the trainer may be slow. Omitted routes are read as
``NO_ROUTE``.

Owns the format, verification and removal of objects. Does not own their storage and its durability
(:mod:`etude.objects`), nor the meaning of routes and their match with a model (:class:`~etude.types.RouteSpace`). A
write is complete or absent after ``kill -9`` of any process.

Array legend: P prompt tokens of a turn, C sampled tokens of a turn, R rows of routes in its object.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.errors import DamagedError
from etude.ledger.turns import decode_turns, encode_turns
from etude.objects import Objects
from etude.types import NO_ROUTE, PayloadRef, Routes, SamplingMask, Turn

ROUTES, KEPT_OFFSETS, KEPT_IDS = "routes", "kept_offsets", "kept_ids"
"""Names of the tensors: uint16 [R, layers, k] of the last R tokens read, int64 [C + 1], int32 [Σ kept]."""
SAMPLED_ROUTES = "sampled_routes"
"""Replaces ``ROUTES``: uint16 [C, layers, k] of the tokens that produced the sampled ones."""
TURNS = "turns"
"""Folder of the objects with turns."""
_READERS, _ALONE = 16, 4
"""Maximum concurrent reads of payloads, and the minimum number of payloads for which threads start."""
_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class Payloads:
    """The payloads of one run, for any number of processes; safe to share between threads.

    Every method raises :class:`~etude.errors.InfrastructureError` if the storage fails.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def at_once(self, read: Callable[[_Question], _Answer], questions: Sequence[_Question]) -> list[_Answer]:
        """The results of ``read`` for all ``questions``; concurrent if each takes a network round trip."""
        if len(questions) < _ALONE or "://" not in self._objects.url:
            return [read(one) for one in questions]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, questions))

    def store(self, turn: Turn, session: str, stored: int = 0, *, sampled_only: bool = False) -> Turn:
        """Store a turn's routes and sampling mask; return the turn with a reference instead of them.

        The first ``stored`` rows of its routes are omitted, because an earlier turn, which this one continues, has
        them. With ``sampled_only``, the rows of all prompt tokens but the last are omitted. A turn with neither routes
        nor mask is returned unchanged. ``session`` is part of the object, so that equal turns of one session share it
        but those of two sessions do not: each session's objects can be removed independently.
        """
        arrays = _arrays(turn, stored, sampled_only=sampled_only)
        if not arrays:
            return turn
        ref = self._put(save(arrays, metadata={"session": session}), _key)
        return replace(turn, routes=None, sampling_mask=None, payload=ref)

    def store_turns(self, turns: Sequence[Turn], rollout_id: str) -> PayloadRef:
        """Store the turns of a rollout. Raises ``ValueError`` for one whose routes or sampling masks are in memory."""
        return self._put(encode_turns(turns, rollout_id), _turns_key)

    def fetch_turns(self, ref: PayloadRef) -> tuple[Turn, ...]:
        """The turns that :meth:`store_turns` stored, with references to their routes and masks.

        Raises :class:`~etude.errors.DamagedError` naming the object.
        """
        try:
            return decode_turns(self._get(ref, _turns_key))
        except ValueError as error:
            raise DamagedError(f"{self._name(ref, _turns_key)} cannot be read: {error}; {_FIX}") from error

    def fetch(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns that :meth:`store` stored, for all turns of a rollout in order; some may have no payload.

        Routes that ``sampled_only`` omitted are ``NO_ROUTE``. Raises :class:`~etude.errors.DamagedError` naming the
        object.
        """
        payloads = self.at_once(self._read, [turn.payload for turn in turns])
        sampled_only = any(SAMPLED_ROUTES in arrays for arrays in payloads)
        fresh = [arrays.get(SAMPLED_ROUTES if sampled_only else ROUTES) for arrays in payloads]
        routes = _joined(turns, fresh, sampled_only=sampled_only)
        return tuple(
            turn if turn.payload is None else self._restored(turn, turn.payload, arrays, rows)
            for turn, arrays, rows in zip(turns, payloads, routes, strict=True)
        )

    def _put(self, content: bytes, key_of: "_KeyOf") -> PayloadRef:
        data = zstandard.compress(content)
        ref = PayloadRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        self._objects.put_if_absent(key_of(ref), data)
        return ref

    def _get(self, ref: PayloadRef, key_of: "_KeyOf") -> bytes:
        """The content of an object, after a check of its digest."""
        data, name = self._objects.get(key_of(ref)), self._name(ref, key_of)
        if data is None:
            raise DamagedError(f"{name} is missing; {_FIX}")
        if hashlib.sha256(data).hexdigest() != ref.digest:
            raise DamagedError(f"{name} does not match its name, a SHA-256; {_FIX}")
        try:
            return zstandard.decompress(data) if data.startswith(zstandard.FRAME_HEADER) else data
        except zstandard.ZstdError as error:
            raise DamagedError(f"{name} cannot be read: {error}; {_FIX}") from error

    def _read(self, ref: PayloadRef | None) -> dict[str, npt.NDArray[Any]]:
        if ref is None:
            return {}
        try:
            return load(self._get(ref, _key))
        except (SafetensorError, ValueError, KeyError) as error:
            raise DamagedError(f"{self._name(ref, _key)} cannot be read: {error}; {_FIX}") from error

    def _restored(
        self, turn: Turn, ref: PayloadRef, arrays: dict[str, npt.NDArray[Any]], routes: Routes | None
    ) -> Turn:
        try:
            offsets = arrays.get(KEPT_OFFSETS)
            mask = None if offsets is None else SamplingMask(offsets=offsets, token_ids=arrays[KEPT_IDS])
            return replace(turn, routes=routes, sampling_mask=mask, payload=None)
        except (ValueError, KeyError) as error:
            raise DamagedError(f"{self._name(ref, _key)} is of another turn: {error}; {_FIX}") from error

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Remove routes and masks that will not be read again; missing ones are not an error."""
        self._objects.delete(*dict.fromkeys(map(_key, refs)))

    def delete(self, digest: str, named: "NamedTurns") -> bool:
        """Delete the turns of a digest unless a row references them; return true if none did.

        ``named`` is the ledger's (:meth:`~etude.ledger.stored_turns.StoredTurns.named`): remove the reference from the
        row first. A bucket with object versions keeps this one until its own rules remove it.
        """
        if named([digest]):
            return False
        self._objects.delete(_turns_key(PayloadRef(digest=digest, size_bytes=0)))
        return True

    def sweep(self, in_use: Callable[[], Iterable[PayloadRef]], named: "NamedTurns", *, older_than_s: float) -> int:
        """Remove unreferenced objects older than ``older_than_s``; return the number of removed objects.

        ``in_use`` gives the referenced routes and masks, ``named`` the referenced turns; both are called only if there
        are objects of that age, by the storage's own clock. A rollout is recorded when it ends, so it must take less
        time. Incomplete writes of killed writers are also removed.
        """
        entries = self._objects.entries("")
        before_s = self._objects.now() - older_than_s if entries else 0.0
        old = [entry.key for entry in entries if entry.modified_s < before_s]
        turns = {PurePosixPath(key).stem: key for key in old if key.startswith(f"{TURNS}/")}
        unused = set(old) - set(turns.values())
        if unused:
            unused -= set(map(_key, in_use()))
        if turns:
            unused |= {turns[digest] for digest in turns.keys() - named([*turns])}
        self._objects.delete(*sorted(unused))
        return len(unused) + self._objects.remove_partial(older_than_s)

    def _name(self, ref: PayloadRef, key_of: "_KeyOf") -> str:
        """A payload's name in messages."""
        return f"payload {self._objects.url}/{key_of(ref)}"


NamedTurns = Callable[[Sequence[str]], Collection[str]]
"""Filter of turn digests that rows of the ledger reference."""
_KeyOf = Callable[[PayloadRef], str]


def _key(ref: PayloadRef) -> str:
    return f"{ref.digest[:2]}/{ref.digest}.safetensors"


def _turns_key(ref: PayloadRef) -> str:
    return f"{TURNS}/{_key(ref)}"


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
    """The routes of all tokens that each turn read, of which ``fresh`` [R, layers, k] are the last.

    Each branch is assembled once, for its last turn; the other turns get views of it. Rows that no earlier turn has
    stay missing; with ``sampled_only`` they are ``NO_ROUTE``.
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
    """For each turn, the newest earlier turn that it continues; ``None`` if there is none or the turn has no rows."""
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
    """For each turn, the earlier turn with all rows that it lacks; ``None`` if it lacks none or no turn has them."""
    above: list[int | None] = []
    complete: dict[tuple[int, ...], list[int]] = {}  # shape of all rows → turns, oldest first
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
    """The number of rows: one per token except the last sampled one."""
    return turn.length - 1
