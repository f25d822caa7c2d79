"""Releases of a run, as if a release process had made them."""

from etude.releases.controller import ReleaseDecision, ReleaseMove
from etude.releases.states import Release, ReleaseState
from etude.releases.store import ReleaseStore


def release(store: ReleaseStore, version: int, replaces: int | None) -> None:
    """Release a version, which takes the place of another one."""
    states = (ReleaseState.CANDIDATE, ReleaseState.GATED, ReleaseState.RELEASED)
    for before, to in zip((states[0], *states), states, strict=False):
        one = Release(version=version, digest=f"{version}" * 32, state=before, replaces=replaces)
        move = ReleaseMove(release=one, to=to, reason="a test", is_new=to is ReleaseState.CANDIDATE)
        store.apply(ReleaseDecision(moves=(move,)), 1.0)
    if replaces is not None:
        old = Release(version=replaces, digest=f"{replaces}" * 32, state=ReleaseState.RELEASED)
        move = ReleaseMove(release=old, to=ReleaseState.SUPERSEDED, reason="a test")
        store.apply(ReleaseDecision(moves=(move,)), 2.0)
