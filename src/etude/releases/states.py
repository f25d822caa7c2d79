"""The states of a release, as a table.

    candidate ──▶ gated ──▶ shadow ──▶ canary ──▶ released ──▶ superseded
        │           │          │          └────────────┴──▶ rolled_back
        └───────────┴──────────┴──▶ rejected

A candidate is one weight version of the run's log. Stages that the recipe omits are skipped, and the first release of a
run moves from gated to released: there is no other to compare it with. A canary moves to canary when its share grows.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class ReleaseState(StrEnum):
    """State of a weight version on its way to users."""

    CANDIDATE = "candidate"
    """Published and chosen for a release; not measured yet."""
    GATED = "gated"
    """Passed the offline gate; waits for approval if that is required."""
    SHADOW = "shadow"
    """Samples the prompts of users, who do not see it."""
    CANARY = "canary"
    """Answers a share of the users."""
    RELEASED = "released"
    """Answers all users."""
    SUPERSEDED = "superseded"
    """A later release answers the users."""
    REJECTED = "rejected"
    """Never answered users, and never will."""
    ROLLED_BACK = "rolled_back"
    """Answered users, and was withdrawn."""


RELEASE_MOVES: Mapping[ReleaseState, frozenset[ReleaseState]] = MappingProxyType(
    {
        ReleaseState.CANDIDATE: frozenset({ReleaseState.GATED, ReleaseState.REJECTED}),
        ReleaseState.GATED: frozenset(
            {ReleaseState.SHADOW, ReleaseState.CANARY, ReleaseState.RELEASED, ReleaseState.REJECTED}
        ),
        ReleaseState.SHADOW: frozenset({ReleaseState.CANARY, ReleaseState.REJECTED}),
        ReleaseState.CANARY: frozenset({ReleaseState.CANARY, ReleaseState.RELEASED, ReleaseState.ROLLED_BACK}),
        ReleaseState.RELEASED: frozenset({ReleaseState.SUPERSEDED, ReleaseState.ROLLED_BACK}),
        ReleaseState.SUPERSEDED: frozenset({ReleaseState.RELEASED}),  # restored by a rollback
        ReleaseState.REJECTED: frozenset(),
        ReleaseState.ROLLED_BACK: frozenset(),
    }
)
"""State of a release → permitted next states."""

PENDING_STATES = frozenset({ReleaseState.CANDIDATE, ReleaseState.GATED, ReleaseState.SHADOW, ReleaseState.CANARY})
"""States of an undecided release; at most one release is in these states at a time."""
TAKEN_BACK = frozenset({ReleaseState.REJECTED, ReleaseState.ROLLED_BACK})
"""States after which the trainer reverts to the released weights, unless the candidate could not be measured."""


def move_release(state: ReleaseState, to: ReleaseState) -> ReleaseState:
    """The state after a move from ``state`` ``to`` another. Raises ``ValueError`` if the table has no such move."""
    if to not in RELEASE_MOVES[state]:
        allowed = ", ".join(sorted(RELEASE_MOVES[state])) or "nothing: that is an end"
        raise ValueError(f"no move of a release from {state!s} to {to!s}; from {state!s} it may become {allowed}")
    return to


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A weight version on its way to users, as stored in the ledger."""

    version: int
    """Version of the run's log, which identifies the release."""
    digest: str
    state: ReleaseState
    stage: int = 0
    """Number of a canary's share in ``release.canary_shares``, from 0."""
    since: float = 0.0
    """Time of its last move, in seconds since 1970."""
    replaces: int | None = None
    """Version of the release that it is, or was, compared with; ``None`` for the first one."""
    loaded: str = ""
    """Proposed checkpoint from which its weights were loaded; empty for weights from training."""


def pending_release(releases: Sequence[Release]) -> Release | None:
    """The release that is neither accepted nor rejected yet."""
    return next((release for release in releases if release.state in PENDING_STATES), None)


def live_release(releases: Sequence[Release]) -> Release | None:
    """The release that answers users."""
    return next((release for release in releases if release.state is ReleaseState.RELEASED), None)


def release_to_take_back(releases: Sequence[Release]) -> Release | None:
    """The release that a rollback withdraws: the pending one, else the one that answers users."""
    return pending_release(releases) or live_release(releases)


def former_release(releases: Sequence[Release]) -> Release | None:
    """The last release, with different weights, before the one that answers users."""
    live = live_release(releases)
    there = [release for release in releases if release.state is ReleaseState.SUPERSEDED]
    others = [release for release in there if live is None or release.digest != live.digest]
    return max(others, key=lambda release: (release.since, release.version), default=None)
