"""Bulky parts of rollouts, as objects beside the ledger: files, or in a bucket.

    payloads/turns/81/81d0…7e.safetensors   the turns of a rollout (:mod:`etude.ledger.turns`); metadata: its id
    payloads/3f/3f9a…c2.safetensors         routes and sampling mask of one turn; metadata: the session it is from

All are named by the SHA-256 of their bytes, which are compressed by zstd (those that are not are read as they are);
everything between handles a :class:`~etude.types.PayloadRef`: 64 characters of digest and a size.

**Turns** are written once, by the rollouts process, before a row of the ledger names them, and stay for as long as one
does. **Routes and masks**, kilobytes per token of a large model, are written by the gateway and read by the trainer;
they go when the step that learnt from them is committed.

A turn reads again what the turns before it read. Its object has the routes of the tokens that are new in it; those
before are of the turn that it goes on from. In memory the routes of a branch are one array, which those of its turns
are views of, so that storage and memory grow with what was read, not with the square of it.

Owns the objects' form, their verification and removal. Does not own where they are kept and whether a write outlives a
power cut (:mod:`etude.objects`), what routes mean or whether they fit a model (:class:`~etude.types.RouteSpace`). A
write is complete or absent after ``kill -9`` of any process.

Where only sampled tokens are replayed, it has the routes of the tokens that produced these alone, under another name: a
prompt is most of what an agent's turn reads, and the way to the trainer may be long. What was left out comes back as
``NO_ROUTE``.

Array legend: P prompt tokens of a turn, C sampled tokens of a turn, R rows of routes that its object has.
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
"""Names of the tensors: uint16 [R, layers, k] of the last R tokens that were read, int64 [C + 1], int32 [Σ kept]."""
SAMPLED_ROUTES = "sampled_routes"
"""In place of ``ROUTES``: uint16 [C, layers, k] of the tokens that produced the sampled ones."""
TURNS = "turns"
"""Folder of the objects with turns."""
_READERS, _ALONE = 16, 4
"""Payloads that are read at a time, and the fewest for which threads are started."""
_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class Payloads:
    """The payloads of one run; any number of processes may use them at a time. Safe to share between threads.

    Every method raises :class:`~etude.errors.InfrastructureError` when the storage does not do its part.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def at_once(self, read: Callable[[_Question], _Answer], questions: Sequence[_Question]) -> list[_Answer]:
        """The answers of ``read``, several of which are waited for at a time where each takes a round trip."""
        if len(questions) < _ALONE or "://" not in self._objects.url:
            return [read(one) for one in questions]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, questions))

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
        ref = self._put(save(arrays, metadata={"session": session}), _key)
        return replace(turn, routes=None, sampling_mask=None, payload=ref)

    def stow_turns(self, turns: Sequence[Turn], rollout_id: str) -> PayloadRef:
        """Store the turns of a rollout. Raises ``ValueError`` for one whose routes or sampling masks are in memory."""
        return self._put(encode_turns(turns, rollout_id), _turns_key)

    def fetch_turns(self, ref: PayloadRef) -> tuple[Turn, ...]:
        """The turns that :meth:`stow_turns` was given, with references to their routes and masks.

        Raises :class:`~etude.errors.DamagedError` naming the object.
        """
        try:
            return decode_turns(self._get(ref, _turns_key))
        except ValueError as error:
            raise DamagedError(f"{self._name(ref, _turns_key)} cannot be read: {error}; {_FIX}") from error

    def fetch(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns that :meth:`stow` was given: all those of a rollout, in their order, stowed or not.

        Routes that were left out on purpose are ``NO_ROUTE``.

        Raises :class:`~etude.errors.DamagedError` naming the object.
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
        """The content of an object, which has its digest."""
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
        """Remove routes and masks that will not be read again; those that are gone already are no fault."""
        self._objects.delete(*dict.fromkeys(map(_key, refs)))

    def delete(self, digest: str, named: "NamedTurns") -> bool:
        """Remove the turns of that digest for good, unless a row names them still; returns whether none did.

        ``named`` is the ledger's (:meth:`~etude.ledger.stored_turns.StoredTurns.named`): the row forgets them first. A
        bucket that keeps versions of objects keeps this one, too, until its own rules remove it.
        """
        if named([digest]):
            return False
        self._objects.delete(_turns_key(PayloadRef(digest=digest, size_bytes=0)))
        return True

    def sweep(self, in_use: Callable[[], Iterable[PayloadRef]], named: "NamedTurns", *, older_than_s: float) -> int:
        """Remove what has been there for so many seconds and nothing refers to; returns how many objects that were.

        Routes and masks are referred to by what is ``in_use``, turns by rows that have ``named`` them; both are asked
        only where there are objects of that age, by the storage's own time. A rollout is recorded when it ends, so that
        has to take less time. What writers that were killed left half written goes, too.
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
        """A payload in messages."""
        return f"payload {self._objects.url}/{key_of(ref)}"


NamedTurns = Callable[[Sequence[str]], Collection[str]]
"""Filters digests of turns: those that rows of the ledger refer to."""
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
