"""Verification that every published version can be read, and repair of broken ones.

Owns the walk over the log. What is proven about one version is exactly what :mod:`etude.weights.pull` proves before it
is used; :func:`verify` changes nothing. :func:`repair` puts back what can be had elsewhere or encoded again, and
removes what misleads: packs are named by their content, so a copy from anywhere is as good as the original, and a frame
that is encoded again from the same two versions is the same frame. Links are conveniences: a broken one is removed.
Nothing here invents weights; what cannot be fixed is said.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from etude.errors import DamagedError
from etude.types import WeightPack, WeightVersion
from etude.weights.codecs.codec import Codec
from etude.weights.frames import parse, sparse_codecs
from etude.weights.log import WeightLog
from etude.weights.packs import fill_packs, read_pack
from etude.weights.pull import Receiver
from etude.weights.records import (
    LOG_KEY,
    Link,
    LogStart,
    commit_key,
    layout_key,
    link_key,
    pack_key,
    parse_link_key,
)
from etude.weights.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Proof that one version can be had, bit for bit, or one link be followed; or what is broken."""

    version: int
    link: Link | None
    """The link that was checked, empty but for its ends if it cannot be read; ``None`` for the version itself."""
    fault: str | None
    """The thing that is broken (record, pack, state, or a version that this one rests on); ``None`` when all is
    well.
    """
    detour: bool = False
    """The version can be had, but not the way that its own record says."""

    @property
    def name(self) -> str:
        """The version or link, for people."""
        if self.link is None:
            return f"version {self.version}"
        source = "anchor" if self.link.source is None else f"{self.link.source} →"
        return f"{source} {self.link.target}"


def verify(log: WeightLog) -> Iterator[VerifyResult]:
    """Check all committed versions, oldest first, then all links; every sound chain is read once.

    A version that rests on a broken one is broken too unless a link leads around. Storage that does not answer raises
    :class:`~etude.errors.InfrastructureError`.
    """
    with Receiver(log) as receiver:
        for version in log.versions():
            try:
                arrival = receiver.advance(version)
                fault = next(iter(arrival.faults), None)
                yield VerifyResult(version=version, link=None, fault=fault, detour=fault is not None)
            except DamagedError as error:
                yield VerifyResult(version=version, link=None, fault=str(error))
    for key in log.store.list("links"):
        if (ends := parse_link_key(key)) is not None:
            yield _check_link(log, *ends)


def _check_link(log: WeightLog, source: int | None, target: int) -> VerifyResult:
    unread = Link(source=source, source_digest=None, target=target, digest="", layout="", packs=())
    try:
        link = log.records.read(Link, link_key(source, target))
    except DamagedError as error:
        return VerifyResult(version=target, link=unread, fault=str(error))
    return VerifyResult(version=target, link=link or unread, fault=packs_fault(log, link.packs) if link else None)


def packs_fault(log: WeightLog, packs: tuple[WeightPack, ...]) -> str | None:
    """The fault of the first unsound pack; ``None`` when all are there and can be read."""
    for pack in packs:
        try:
            for _, frame in read_pack(log.pack(pack)):
                parse(frame)
        except DamagedError as error:
            return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """One fault, and what was done about it."""

    name: str
    """The object."""
    fault: str
    action: str
    """The fix, in words."""
    is_fixed: bool


def repair(log: WeightLog, mirror: WeightLog | None = None) -> Iterator[RepairResult]:
    """Fix what can be fixed, oldest first; one result per fault found.

    ``mirror`` is another store of the same log (a region's, say) to take sound objects from.
    """
    yield from _fix_start(log)
    for version in log.versions():
        yield from _fix_version(log, mirror, version)
    for key in log.store.list("links"):
        yield from _fix_link(log, key)


def _fix_start(log: WeightLog) -> Iterator[RepairResult]:
    try:
        fault = None if log.records.read_again(LogStart, LOG_KEY) else "it is missing"
    except DamagedError as error:
        fault = str(error)
    if fault and (log_id := log.records.log_id()) is not None:
        log.records.begin_again(log_id)
        yield RepairResult(name=LOG_KEY, fault=fault, action="written again, as the versions say", is_fixed=True)


def _fix_version(log: WeightLog, mirror: WeightLog | None, version: int) -> Iterator[RepairResult]:
    try:
        record = log.read(version)
    except DamagedError as error:
        result, record = _fix_record(log, mirror, version, str(error))
        yield result
    if record:
        yield from _fix_layout(log, mirror, record.layout)
    for pack in record.packs if record else ():
        fault = packs_fault(log, (pack,))
        if record and fault:
            action = _fix_pack(log, mirror, record, pack)
            yield RepairResult(
                name=pack_key(pack.digest), fault=fault, action=action or "left as it is", is_fixed=bool(action)
            )


def _fix_record(
    log: WeightLog, mirror: WeightLog | None, version: int, fault: str
) -> tuple[RepairResult, WeightVersion | None]:
    """The result for a commit record, and the record if it can be read now."""
    key = commit_key(version)
    data = mirror.store.get(key) if mirror else None
    try:
        record = log.records.parse(data or b"", WeightVersion, key)
    except DamagedError:
        action = "left as it is: the next version goes around"
        return RepairResult(name=key, fault=fault, action=action, is_fixed=False), None
    log.store.renew(key, data or b"")
    return RepairResult(name=key, fault=fault, action="copied from the mirror", is_fixed=True), record


def _fix_layout(log: WeightLog, mirror: WeightLog | None, digest: str) -> Iterator[RepairResult]:
    if (fault := _layout_fault(log, digest)) is None:
        return
    data = mirror.layout(digest) if mirror and _layout_fault(mirror, digest) is None else None
    if data is not None:
        log.put_layout(data)
    action = "left as it is" if data is None else "copied from the mirror"
    yield RepairResult(name=layout_key(digest), fault=fault, action=action, is_fixed=data is not None)


def _layout_fault(log: WeightLog, digest: str) -> str | None:
    try:
        return None if log.layout(digest) is not None else "it is missing"
    except DamagedError as error:
        return str(error)


def _fix_pack(log: WeightLog, mirror: WeightLog | None, record: WeightVersion, pack: WeightPack) -> str | None:
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
        target = _replica(log, record.version, record.layout)
        if target is None:
            return None
        if record.base is None:
            return _matching(pack, [(index, target.full(target.layout.chunks[index])) for index in _range(pack)])
        for codec in sparse_codecs():
            replica = _replica(log, record.base, record.layout)
            data = None if replica is None else _matching(pack, _moves(replica, target, codec, pack))
            if data is not None:
                return data
    except DamagedError:
        return None
    return None


def _replica(log: WeightLog, version: int, layout: str) -> Replica | None:
    """A version in its own memory, if it is laid out as ``layout`` says."""
    with Receiver(log) as receiver:
        receiver.advance(version)
        return receiver.replica if receiver.replica.layout.digest == layout else None


def _moves(replica: Replica, target: Replica, codec: Codec, pack: WeightPack) -> list[tuple[int, bytes]]:
    moves = (replica.advance(replica.layout.chunks[index], target.tensors, codec) for index in _range(pack))
    return [(move.chunk.index, move.frame) for move in moves if move]


def _matching(pack: WeightPack, frames: list[tuple[int, bytes]]) -> bytes | None:
    """The frames as one pack, if that is the pack that was lost."""
    filled = next(fill_packs(frames, pack_bytes=1 << 62), None)
    return filled.data if filled and hashlib.sha256(filled.data).hexdigest() == pack.digest else None


def _range(pack: WeightPack) -> range:
    return range(pack.first, pack.last + 1)


def _fix_link(log: WeightLog, key: str) -> Iterator[RepairResult]:
    try:
        link = log.records.read(Link, key)
        fault = packs_fault(log, link.packs) if link else None
    except DamagedError as error:
        fault = str(error)
    if fault:
        log.store.delete(key)
        yield RepairResult(name=key, fault=fault, action="removed: other ways remain", is_fixed=True)
