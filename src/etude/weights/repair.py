"""Mending a damaged log: what can be had elsewhere or made again is put back, what misleads is removed.

Packs are named by their content, so a copy from anywhere is as good as the original, and a frame that is encoded again
from the same two versions is the same frame. Links are conveniences: a broken one is removed. Nothing here invents
weights; what cannot be mended is said.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from etude.errors import DamagedError
from etude.types import WeightPack, WeightVersion
from etude.weights.frames import Codec
from etude.weights.log import WeightLog
from etude.weights.packs import fill_packs
from etude.weights.pull import Receiver
from etude.weights.records import LOG_KEY, Link, LogStart, commit_key, layout_key, pack_key
from etude.weights.shards import Share
from etude.weights.verify import packs_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was done about one fault."""

    name: str
    """The object."""
    fault: str
    action: str
    """What was done, in words."""
    mended: bool


def repair(log: WeightLog, mirror: WeightLog | None = None) -> Iterator[Repair]:
    """Mend what can be mended, oldest first; one result per fault found.

    ``mirror`` is another store of the same log (a region's, say) to take sound objects from.
    """
    yield from _mend_start(log)
    for version in log.versions():
        yield from _mend_version(log, mirror, version)
    for key in log.store.list("links"):
        yield from _mend_link(log, key)


def _mend_start(log: WeightLog) -> Iterator[Repair]:
    try:
        fault = None if log.records.read_again(LogStart, LOG_KEY) else "it is missing"
    except DamagedError as error:
        fault = str(error)
    if fault and (log_id := log.records.log_id()) is not None:
        log.records.begin_again(log_id)
        yield Repair(name=LOG_KEY, fault=fault, action="written again, as the versions say", mended=True)


def _mend_version(log: WeightLog, mirror: WeightLog | None, version: int) -> Iterator[Repair]:
    try:
        record = log.read(version)
    except DamagedError as error:
        mended, record = _mend_record(log, mirror, version, str(error))
        yield mended
    for digest in record.layouts if record else ():
        yield from _mend_layout(log, mirror, digest)
    for pack in record.packs if record else ():
        fault = packs_fault(log, (pack,))
        if record and fault:
            action = _mend_pack(log, mirror, record, pack)
            yield Repair(name=pack_key(pack.digest), fault=fault, action=action or "left as it is", mended=bool(action))


def _mend_record(
    log: WeightLog, mirror: WeightLog | None, version: int, fault: str
) -> tuple[Repair, WeightVersion | None]:
    """What was done about a commit record, and the record if it can be read now."""
    key = commit_key(version)
    data = mirror.store.get(key) if mirror else None
    try:
        record = log.records.parse(data or b"", WeightVersion, key)
    except DamagedError:
        action = "left as it is: the next version goes around"
        return Repair(name=key, fault=fault, action=action, mended=False), None
    log.store.renew(key, data or b"")
    return Repair(name=key, fault=fault, action="copied from the mirror", mended=True), record


def _mend_layout(log: WeightLog, mirror: WeightLog | None, digest: str) -> Iterator[Repair]:
    if (fault := _layout_fault(log, digest)) is None:
        return
    data = mirror.layout(digest) if mirror and _layout_fault(mirror, digest) is None else None
    if data is not None:
        log.put_layout(data)
    action = "left as it is" if data is None else "copied from the mirror"
    yield Repair(name=layout_key(digest), fault=fault, action=action, mended=data is not None)


def _layout_fault(log: WeightLog, digest: str) -> str | None:
    try:
        return None if log.layout(digest) is not None else "it is missing"
    except DamagedError as error:
        return str(error)


def _mend_pack(log: WeightLog, mirror: WeightLog | None, record: WeightVersion, pack: WeightPack) -> str | None:
    data = _from_mirror(mirror, pack)
    action = "copied from the mirror"
    if data is None:
        data, action = _made_again(log, record, pack), "encoded again"
    if data is None:
        return None
    log.put_pack(data)
    return action


def _from_mirror(mirror: WeightLog | None, pack: WeightPack) -> bytes | None:
    try:
        return mirror.pack(pack) if mirror else None
    except DamagedError:
        return None


def _made_again(log: WeightLog, record: WeightVersion, pack: WeightPack) -> bytes | None:
    """The pack, encoded from the version and its base, if both can be had some other way."""
    try:
        target = _share(log, record.version, record.layouts, pack.rank)
        if target is None:
            return None
        if record.base is None:
            return _matching(pack, [(index, target.full(target.layout.chunks[index])) for index in _range(pack)])
        for codec in (Codec.GAPS, Codec.CLASSES):
            share = _share(log, record.base, record.layouts, pack.rank)
            data = None if share is None else _matching(pack, _moves(share, target, codec, pack))
            if data is not None:
                return data
    except DamagedError:
        return None
    return None


def _share(log: WeightLog, version: int, layouts: tuple[str, ...], rank: int) -> Share | None:
    """One rank's share of a version in its own memory, if that version is laid out as ``layouts`` say."""
    with Receiver(log) as receiver:
        receiver.advance(version)
        return receiver.replica.shares[rank] if receiver.replica.record.layouts == layouts else None


def _moves(share: Share, target: Share, codec: Codec, pack: WeightPack) -> list[tuple[int, bytes]]:
    moves = (share.advance(share.layout.chunks[index], target.tensors, codec) for index in _range(pack))
    return [(move.chunk.index, move.frame) for move in moves if move]


def _matching(pack: WeightPack, frames: list[tuple[int, bytes]]) -> bytes | None:
    """The frames as one pack, if that is the pack that was lost."""
    filled = next(fill_packs(frames, pack_bytes=1 << 62), None)
    return filled.data if filled and hashlib.sha256(filled.data).hexdigest() == pack.digest else None


def _range(pack: WeightPack) -> range:
    return range(pack.first, pack.last + 1)


def _mend_link(log: WeightLog, key: str) -> Iterator[Repair]:
    try:
        link = log.records.read(Link, key)
        fault = packs_fault(log, link.packs) if link else None
    except DamagedError as error:
        fault = str(error)
    if fault:
        log.store.delete(key)
        yield Repair(name=key, fault=fault, action="removed: other ways remain", mended=True)
