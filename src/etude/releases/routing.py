"""Routing tables from the states of releases, and the arm that each engine holds under one. Pure.

A table depends only on the releases, so a process that dies between a move and its table can derive the table again
from the ledger. Owns the routing decisions; the classes are in :mod:`etude.routing_table`.
"""

import hashlib
from collections.abc import Sequence

from etude.releases.states import Release, ReleaseState, former_release, live_release
from etude.routing_table import CANARY, FALLBACK, LIVE, SHADOW, Arm, RoutingTable


def routing_table(
    releases: Sequence[Release], shares: Sequence[float], before: RoutingTable | None
) -> RoutingTable | None:
    """The table for the releases of a run; ``before`` itself if it is unchanged, ``None`` without a release.

    ``shares`` are the canary's shares by stage. The salt is the canary's digest, so that each experiment draws users
    anew. The former release stays as the fallback until another candidate needs an engine.
    """
    live = live_release(releases)
    if live is None:
        return None
    canary, shadow = _in_state(releases, ReleaseState.CANARY), _in_state(releases, ReleaseState.SHADOW)
    former = None if canary or shadow else former_release(releases)
    share = 0.0 if canary is None else shares[canary.stage]
    arms = (_arm(LIVE, live, 1 - share), *(() if canary is None else (_arm(CANARY, canary, share),)))
    table = RoutingTable(
        generation=1 if before is None else before.generation + 1,
        salt=(canary or live).digest,
        arms=arms,
        shadow=None if shadow is None else _arm(SHADOW, shadow),
        fallback=None if former is None else _arm(FALLBACK, former),
    )
    return before if before is not None and _same(table, before) else table


def held_arm(table: RoutingTable, engine: int, engines: int) -> Arm:
    """The arm that engine ``engine`` of ``engines`` holds; all engines compute the same result.

    The newest arm takes engines from the top of an order derived from its digest, the older arm from the bottom. So an
    engine with a canary keeps it after its release, and the last engine in that order never had it: it still has the
    former release, so that a rollback transfers no bytes.
    """
    tried = table.canary or table.shadow
    newest = tried or table.live
    rank = sorted(range(engines), key=lambda index: _place(newest.digest, index)).index(engine)
    if tried is not None:
        number = max(round(tried.share * engines), 1)  # one for a shadow, which has no share of the users
        return tried if rank < min(number, engines - 1) else table.live
    return table.fallback if table.fallback is not None and engines > 1 and rank == engines - 1 else table.live


def _in_state(releases: Sequence[Release], state: ReleaseState) -> Release | None:
    """The release in a state, if any."""
    return next((release for release in releases if release.state is state), None)


def _arm(name: str, release: Release, share: float = 0.0) -> Arm:
    return Arm(name=name, version=release.version, digest=release.digest, share=share)


def _same(one: RoutingTable, other: RoutingTable) -> bool:
    """Return true if two tables differ only in their generation."""

    def content(table: RoutingTable) -> tuple[object, ...]:
        return table.salt, table.arms, table.shadow, table.fallback

    return content(one) == content(other)


def _place(digest: str, engine: int) -> bytes:
    return hashlib.sha256(f"{digest} {engine}".encode()).digest()
