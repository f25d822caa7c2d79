"""The release process: turns facts about versions and users into routing tables.

    ledger: releases, requests, sessions by arm ─┐                       ┌─▶ ledger: moves with evidence, trainer.load
    weight log: versions ────────────────────────┼──▶ ReleaseController ─┤
    evaluations, in a process of their own ──────┘                       └─▶ routing table ──▶ gateway, engines

    consumes: all on the left, by polling      waits for: nothing; a gate runs in the background
    produces: moves, tables                    on shutdown: cancelled between two polls; a measurement is ended

Moves are recorded first; the table follows from the record and is written if it differs from the one in the store. So
the process may die at any point: its successor finds the decisions in the ledger and their effects in the store.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import TypeAlias, final

from etude.clock import unix_s
from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.gateway.routing.shadow import ShadowCall
from etude.releases.controller import (
    LoadFacts,
    ReleaseController,
    ReleaseDecision,
    ReleaseFacts,
    ShadowFacts,
    canary_facts,
)
from etude.releases.experiment import ArmMetrics
from etude.releases.gate import GateFacts
from etude.releases.routing import routing_table
from etude.releases.states import (
    Release,
    ReleaseState,
    live_release,
    pending_release,
    release_to_take_back,
)
from etude.releases.store import ReleaseRequest, ReleaseStore, RequestKind
from etude.routing_table import RoutingTable
from etude.run.folder import RunFolder
from etude.run.parent import tell_person
from etude.run.release_gate import GateMeasurements
from etude.run.routing_tables import RoutingTables
from etude.run.serving import run_until_signal
from etude.run.store_outages import StoreOutages
from etude.run.stores import open_releases
from etude.run.weight_log import open_log
from etude.weights.log import WeightLog

POLL_S = 0.2
"""Pause between two polls; it is part of the time that a rollback takes to reach users."""

Measure: TypeAlias = Callable[[Release, Release | None], Coroutine[None, None, GateFacts]]
"""Measures a candidate, compared with the release that users have; raises :class:`~etude.errors.UserError` if it
cannot.
"""

logger = logging.getLogger(__name__)


def run_release(folder: RunFolder) -> None:
    """Release versions until a stop signal."""
    run_until_signal(_serve(folder, folder.config()))


async def _serve(folder: RunFolder, config: RunConfig) -> None:
    if not config.release.enabled:
        raise UserError(f"{folder.path} releases nothing: its recipe has release.every_steps = 0")
    with ExitStack() as stack:
        store = stack.enter_context(open_releases(folder))
        outages = stack.enter_context(StoreOutages(folder.store, config.rollouts.max_outage_s))
        log = await asyncio.to_thread(open_log, folder, outages)
        gate = GateMeasurements(folder, config.release)
        process = ReleaseProcess(folder, store, log, store, gate.measure)
        tell_person(f"releases of {folder.path}: every {config.release.every_steps} steps a candidate")
        try:
            while True:
                await process.look()
                await asyncio.sleep(POLL_S)
        finally:
            await process.close()


@final
class ReleaseProcess:
    """Gathers facts, queries the controller and acts; each :meth:`look` makes at most one decision."""

    def __init__(
        self, folder: RunFolder, store: ReleaseStore, log: WeightLog, metrics: ArmMetrics, measure: Measure
    ) -> None:
        config = folder.config()
        self._config = config.release
        self._first = config.live.after_steps
        self._store = store
        self._log = log
        self._metrics = metrics
        self._tables = RoutingTables.open(folder)
        self._controller = ReleaseController(self._config, first=self._first)
        self._measure = measure
        self._gate: tuple[int, asyncio.Task[GateFacts]] | None = None
        self._table: RoutingTable | None = None
        self._shadow_calls: dict[str, ShadowCall] = {}

    async def look(self) -> None:
        """Make the next decision, if any, and update the routing table."""
        releases = self._store.releases()
        await asyncio.to_thread(self._route, releases)
        rollback = self._requests(releases)
        facts = await self._facts(releases, rollback)
        decision = self._controller.decide(facts)
        if decision is not None:
            self._store.apply(decision, unix_s(), None if rollback is None else rollback.number)
            _tell(decision)
            await asyncio.to_thread(self._route, self._store.releases())
        elif rollback is not None:
            self._store.close_request(rollback.number, "there is no earlier release to go back to")

    async def close(self) -> None:
        """Cancel a running measurement."""
        if self._gate is not None:
            _, task = self._gate
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _route(self, releases: tuple[Release, ...]) -> None:
        """Write the table that follows from the releases, unless it is stored already; a newer table of another writer
        wins.
        """
        self._table = self._tables.after(self._table) or self._table
        table = routing_table(releases, self._config.canary_shares, self._table)
        if table is None or table is self._table:
            return
        is_written = self._tables.write(table)
        if not is_written:
            newest = self._tables.newest()
            if newest is not None and newest.generation >= table.generation:
                self._table = newest
                return
            table = self._tables.numbered_last(table)
            is_written = self._tables.write(table)
        if is_written:
            self._table = table
            logger.warning("routing table %d: %s", table.generation, _words(table))

    def _requests(self, releases: tuple[Release, ...]) -> ReleaseRequest | None:
        """Answer users' requests except a rollback, which is returned for the controller to decide."""
        due = release_to_take_back(releases)
        for request in self._store.requests(is_open=True):
            match request.kind:
                case RequestKind.ROLLBACK if request.version is not None and (
                    due is None or due.version != request.version
                ):
                    self._store.close_request(request.number, f"version {request.version} was taken back or replaced")
                case RequestKind.ROLLBACK:
                    return request
                case RequestKind.APPROVE:
                    self._store.close_request(request.number, "counted")
                case RequestKind.PROPOSE if not pending_release(releases) and not self._store.loads().pending:
                    self._store.load_checkpoint(request.number, request.checkpoint)
        return None

    async def _facts(self, releases: tuple[Release, ...], rollback: ReleaseRequest | None) -> ReleaseFacts:
        pending, loads = pending_release(releases), self._store.loads()
        gate, failure = await self._measured(pending, live_release(releases))
        return ReleaseFacts(
            releases=releases,
            versions={} if pending is not None else await asyncio.to_thread(self._versions, loads),
            loads=loads,
            gate=gate,
            gate_failure=failure,
            approved_by=self._approved(pending),
            shadow=await asyncio.to_thread(self._shadow, pending),
            canary=canary_facts(self._metrics, self._config, pending, self._table),
            rollback_by="" if rollback is None else rollback.by,
        )

    async def _measured(self, pending: Release | None, live: Release | None) -> tuple[GateFacts | None, str]:
        """The measurements of a candidate, which run in the background, or the reason why there will be none."""
        if pending is None or pending.state is not ReleaseState.CANDIDATE:
            await self.close()
            self._gate = None
            return None, ""
        if self._gate is None or self._gate[0] != pending.version:
            await self.close()
            self._gate = pending.version, asyncio.create_task(self._measure(pending, live))
        _, task = self._gate
        if not task.done():
            return None, ""
        try:
            return task.result(), ""
        except UserError as error:
            return None, str(error)

    def _versions(self, loads: LoadFacts) -> Mapping[int, str]:
        """Digests of the newest version that is due and of the one that a loaded checkpoint became, by version."""
        latest = self._log.latest()
        if latest is None:
            return {}
        due = latest - (latest - self._first) % self._config.every_steps
        numbers = {*((due,) if due >= self._first else ()), *(() if loads.version is None else (loads.version,))}
        records = {number: self._log.read(number) for number in numbers if number <= latest}
        return {number: record.digest for number, record in records.items() if record is not None}

    def _approved(self, pending: Release | None) -> frozenset[str]:
        if pending is None:
            return frozenset()
        approvals = (one for one in self._store.requests() if one.kind is RequestKind.APPROVE)
        return frozenset(one.by for one in approvals if one.version == pending.version)

    def _shadow(self, pending: Release | None) -> ShadowFacts | None:
        if pending is None or pending.state is not ReleaseState.SHADOW:
            self._shadow_calls.clear()
            return None
        self._tables.shadow_calls(pending.digest, self._shadow_calls)
        calls = [call for call in self._shadow_calls.values() if call.digest == pending.digest]
        answered = [call for call in calls if not call.failed]
        return ShadowFacts(
            calls=len(calls),
            failures=len(calls) - len(answered),
            seconds=sum(call.seconds for call in answered),
            live_seconds=sum(call.live_seconds for call in answered),
        )


def _tell(decision: ReleaseDecision) -> None:
    for move in decision.moves:
        logger.warning("version %d is %s: %s", move.release.version, move.to, move.reason)
    if decision.load is not None:
        logger.warning("the trainer goes back to version %d", decision.load)


def _words(table: RoutingTable) -> str:
    arms = [f"{arm.name} v{arm.version} {arm.share:.0%}" for arm in table.arms]
    arms += [f"{arm.name} v{arm.version}" for arm in (table.shadow, table.fallback) if arm is not None]
    return ", ".join(arms)
