"""Proof that every published version can be had, for ``etude weights verify``.

This file owns the walk over the log; what is proven about one version is exactly what :mod:`etude.weights.pull` proves
before anyone uses it. Nothing is repaired here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from etude.errors import DamagedError
from etude.types import WeightVersion
from etude.weights.log import read_commit, versions
from etude.weights.pull import PulledWeights, pull
from etude.weights.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCheck:
    """Whether one version can be had, bit for bit."""

    version: int
    record: WeightVersion | None
    """``None`` when the commit record itself is damaged."""
    fault: str | None
    """What is broken (record, object, state, or a version that this one rests on); ``None`` when all is well."""


def verify(store: ObjectStore) -> Iterator[VersionCheck]:
    """Check all committed versions, oldest first, one result each; every sound chain is read once.

    A version that rests on a broken one is broken too, and its fault names the object at the root. Storage that does
    not answer raises :class:`~etude.errors.InfrastructureError`.
    """
    held: PulledWeights | None = None
    for version in versions(store):
        record = None
        try:
            record = read_commit(store, version)
            held = pull(store, version, have=held)
            yield VersionCheck(version=version, record=record, fault=None)
        except DamagedError as error:
            yield VersionCheck(version=version, record=record, fault=str(error))
