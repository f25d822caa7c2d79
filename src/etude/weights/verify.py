"""Proof that every published version can be had, and what is broken where one cannot.

This file owns the walk over the log; what is proven about one version is exactly what :mod:`etude.weights.pull` proves
before anyone uses it. Nothing is changed here: ``repair.py`` does that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from etude.errors import DamagedError
from etude.types import WeightPack
from etude.weights.frames import parse
from etude.weights.log import WeightLog
from etude.weights.packs import read_pack
from etude.weights.pull import Receiver
from etude.weights.records import Link, link_key, parse_link_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether one version can be had, bit for bit, or one link be followed."""

    version: int
    link: Link | None
    """The link that was checked, empty but for its ends if it cannot be read; ``None`` for the version itself."""
    fault: str | None
    """What is broken (record, pack, state, or a version that this one rests on); ``None`` when all is well."""
    detour: bool = False
    """The version can be had, but not the way that its own record says."""

    @property
    def name(self) -> str:
        """What was checked, for people."""
        if self.link is None:
            return f"version {self.version}"
        source = "anchor" if self.link.source is None else f"{self.link.source} →"
        return f"{source} {self.link.target}"


def verify(log: WeightLog) -> Iterator[Check]:
    """Check all committed versions, oldest first, then all links; every sound chain is read once.

    A version that rests on a broken one is broken too unless a link leads around. Storage that does not answer raises
    :class:`~etude.errors.InfrastructureError`.
    """
    with Receiver(log) as receiver:
        for version in log.versions():
            try:
                arrival = receiver.advance(version)
                fault = next(iter(arrival.faults), None)
                yield Check(version=version, link=None, fault=fault, detour=fault is not None)
            except DamagedError as error:
                yield Check(version=version, link=None, fault=str(error))
    for key in log.store.list("links"):
        if (ends := parse_link_key(key)) is not None:
            yield _check_link(log, *ends)


def _check_link(log: WeightLog, source: int | None, target: int) -> Check:
    unread = Link(source=source, source_digest=None, target=target, digest="", layouts=(), packs=())
    try:
        link = log.records.read(Link, link_key(source, target))
    except DamagedError as error:
        return Check(version=target, link=unread, fault=str(error))
    return Check(version=target, link=link or unread, fault=packs_fault(log, link.packs) if link else None)


def packs_fault(log: WeightLog, packs: tuple[WeightPack, ...]) -> str | None:
    """What is wrong with the first unsound pack; ``None`` when all are there and can be read."""
    for pack in packs:
        try:
            for _, frame in read_pack(log.pack(pack)):
                parse(frame)
        except DamagedError as error:
            return str(error)
    return None
