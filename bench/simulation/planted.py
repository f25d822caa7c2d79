"""Planted bugs: each changes one decision of production, and has to be found by what a run under fire comes to.

A bench that finds nothing says nothing unless it is seen to find. They are put in while one seed is played, and taken
out again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from etude.gateway.routing.router import EngineRecord, EngineState
from etude.ledger import changes, leases, rows, states
from etude.ledger.database import Database, Interrupted
from etude.ledger.leases import Lease
from etude.ledger.ledger import Ledger, OpenSlot
from etude.ledger.states import GroupState
from etude.ledger.transactions import Transactions
from etude.rollouts import runner, worker
from etude.rollouts.admission import Admission
from etude.types import Rollout, RolloutStatus

Plant = tuple[object, str, Callable[[Any], Any]]
"""The owner of a function, its name, and what makes the wrong one of the right one."""


def _wide_window(right: Callable[..., int]) -> Callable[..., int]:
    def window(self: Admission, version: int, *rest: Any) -> int:
        return right(self, version + 1, *rest)

    return window


def _any_ready(right: object) -> Callable[..., dict[str, int] | None]:
    def next_batch(db: Database, num_groups: Mapping[str, int]) -> dict[str, int] | None:
        last = dict[str, int]()
        for purpose, number in num_groups.items():
            unused = rows.unused_groups(db, purpose, 1_000)
            ready = [index for index, state in unused if state is GroupState.READY][:number]
            if len(ready) < number:
                return None
            if ready:
                last[purpose] = ready[-1]
        return last

    return next_batch


def _used_again(right: object) -> Callable[[Database, int], None]:
    def consume_groups(db: Database, step: int) -> None:
        db.execute("UPDATE groups SET state = 'ready' WHERE step = ? AND state = 'claimed'", step)

    return consume_groups


def _first_attempts(right: Callable[..., list[OpenSlot]]) -> Callable[..., list[OpenSlot]]:
    def open_slots(self: Ledger, purpose: str) -> list[OpenSlot]:
        return [replace(slot, attempt=0) for slot in right(self, purpose)]

    return open_slots


def _any_version(right: Callable[..., Any]) -> Callable[..., Any]:
    def fetch_turns(session: Any, admitted_version: int, *rest: Any) -> Any:
        return right(session, 0, *rest)

    return fetch_turns


def _zero_for_failure(right: Callable[..., Any]) -> Callable[..., Any]:
    async def run_rollout(*arguments: Any, **keywords: Any) -> Rollout:
        rollout: Rollout = await right(*arguments, **keywords)
        if rollout.status is RolloutStatus.GRADED:
            return rollout
        return replace(rollout, status=RolloutStatus.GRADED, reward=0.0, reason="submit")

    return run_rollout


def _left_open(right: object) -> Callable[..., Any]:
    class Closing:
        def __init__(self, start: worker.RolloutStart, context: worker.RolloutContext) -> None:
            self._sandbox = start.sandbox

        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            await self._sandbox.close()

    return Closing


def _trusted(right: Callable[..., None]) -> Callable[..., None]:
    def move(self: EngineRecord, state: EngineState, reason: str) -> None:
        if state is EngineState.HEALTHY or self.health is None:
            right(self, state, reason)

    return move


def _reply_believed(right: object) -> Callable[..., Any]:
    def once(self: Transactions, work: Callable[[Database], Any]) -> Any:
        database = self._database
        try:
            database.begin()
            if self.lease is not None:
                leases.prove(rows.lease(database, self.lease.name), self.lease)
            result = work(database)
        except BaseException:
            database.rollback()
            raise
        try:
            database.commit()
        except Interrupted:
            database.rollback()
        return result

    return once


def _nothing_taken_over(right: object) -> Callable[..., None]:
    return lambda *_: None


def _same_token(right: Callable[..., Lease | None]) -> Callable[..., Lease | None]:
    def take(lease: Lease, holder: str, *, silent: bool) -> Lease | None:
        taken = right(lease, holder, silent=silent)
        return None if taken is None else replace(taken, token=max(1, lease.token))

    return take


def _quorum_of_one(right: object) -> Callable[[int], int]:
    return lambda size: 1


PLANTED: Mapping[str, Plant] = MappingProxyType(
    {
        "the window is a version too wide": (Admission, "window", _wide_window),
        "a batch has any groups that are ready": (changes, "_next_batch", _any_ready),
        "a step leaves its groups to the next one": (rows, "consume_groups", _used_again),
        "a restart forgets attempts": (Ledger, "open_slots", _first_attempts),
        "tokens of any version are taken": (worker, "_fetch_turns", _any_version),
        "a failure of a machine is worth zero": (runner, "run_rollout", _zero_for_failure),
        "a failed rollout leaves its session open": (worker, "_closing", _left_open),
        "an engine that fails stays healthy": (EngineRecord, "move", _trusted),
        "a commit without a reply counts as kept": (Transactions, "_once", _reply_believed),
        "slots of a dead process are not taken over": (changes, "take_over", _nothing_taken_over),
        "a lease is taken under the token that it had": (leases, "take", _same_token),
        "one graded rollout makes a group": (states, "quorum", _quorum_of_one),
    }
)
"""Name → the decision that it changes."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Production with a bug, while the context is open; ``None``: as it is."""
    if name is None:
        yield
        return
    owner, attribute, wrong = PLANTED[name]
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong(right))
    try:
        yield
    finally:
        setattr(owner, attribute, right)
