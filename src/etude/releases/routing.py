"""Routing tables from the states of releases, and the arm that each engine holds under one. Pure.

A table follows from the releases alone, so whoever dies between a move and its table finds out from the ledger what the
table has to be. Owns what is routed where; the noun is :mod:`etude.routing_table`'s.
"""

import hashlib
from collections.abc import Sequence

from etude.releases.states import Release, ReleaseState, former_release, live_release
from etude.routing_table import CANARY, FALLBACK, LIVE, SHADOW, Arm, RoutingTable


def routing_table(
    releases: Sequence[Release], shares: Sequence[float], before: RoutingTable | None
) -> RoutingTable | None:
    """The table that the releases of a run ask for; ``before`` itself where that is so already, ``None`` without a
    release.

    ``shares`` are the canary's by its stage. The salt is the candidate's digest: each experiment draws users anew. The
    former release is kept as the fallback until there is another candidate to hold an engine for.
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
    """The arm that engine ``engine`` of ``engines`` holds, which all engines compute alike.

    The newest arm takes engines from the top of an order that its digest gives, the older one from the bottom. So an
    engine that held a canary goes on holding it when it is released, and the last one of that order never held it: it
    still has the former release, and going back moves no bytes.
    """
    tried = table.canary or table.shadow
    newest = tried or table.live
    rank = sorted(range(engines), key=lambda index: _place(newest.digest, index)).index(engine)
    if tried is not None:
        number = round(tried.share * engines) if table.canary is not None else 1
        return tried if rank < min(max(number, 1), engines - 1) else table.live
    return table.fallback if table.fallback is not None and engines > 1 and rank == engines - 1 else table.live


def _in_state(releases: Sequence[Release], state: ReleaseState) -> Release | None:
    """The release that is in a state; at most one is pending."""
    return next((release for release in releases if release.state is state), None)


def _arm(name: str, release: Release, share: float = 0.0) -> Arm:
    return Arm(name=name, version=release.version, digest=release.digest, share=share)


def _same(one: RoutingTable, other: RoutingTable) -> bool:
    """True if two tables differ by their generation alone."""

    def content(table: RoutingTable) -> tuple[object, ...]:
        return table.salt, table.arms, table.shadow, table.fallback

    return content(one) == content(other)


def _place(digest: str, engine: int) -> bytes:
    return hashlib.sha256(f"{digest} {engine}".encode()).digest()
