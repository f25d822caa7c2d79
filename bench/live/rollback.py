"""A rollback under load: seconds from a person's wish until nobody new meets the version, and until engines are back.

    64 sessions ──calls all the time──▶ product gateway ──▶ two native engines: the release, and the one before
    wish in the ledger ──▶ release process ──▶ routing table ──▶ gateway, engines

All of it are the processes of a run, started as `etude run` starts them, around a tiny model with random weights. No
session may break: each call gets an answer, also those that are under way when the table changes.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import torch

from etude.clock import unix_s
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.engines.http import http_engines
from etude.errors import InfrastructureError
from etude.models.checkpoint import load_checkpoint
from etude.protocols import Engine
from etude.releases.controller import ReleaseDecision, ReleaseMove
from etude.releases.states import Release, ReleaseState
from etude.releases.store import ReleaseRequest, ReleaseStore, RequestKind
from etude.run.fleet_plan import process_spec
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.phase_models import make_start
from etude.run.placement import place_here
from etude.run.process_name import PRODUCT, PRODUCTION, RELEASE, ProcessName
from etude.run.supervision import Supervisor
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.weights.publish import Publisher
from etude.weights.tensors import to_stored

SESSIONS = 64
"""Sessions in flight."""
TOKENS = 48
"""Tokens of each answer: enough that many answers are in progress when the table changes."""
BEFORE_S, AFTER_S = 6.0, 8.0
"""Load before the rollback and after it."""
READY_S = 300.0
"""Longest time for the processes to start."""
SHAPE = ("hidden_size=32", "layers=1", "heads=2", "kv_heads=2", "head_dim=16", "experts=4", "expert_size=32")
RELEASED = ReleaseState.RELEASED
CHANGED = 1e-3
"""Standard deviation of the second version's differences from the first."""


@dataclass(slots=True)
class _Calls:
    """Answers to users: start of each call and newest version that answered; and failed calls."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def measure_rollback() -> dict[str, object]:
    """Measure one rollback. Raises :class:`~etude.errors.InfrastructureError` where the processes do not start."""
    with tempfile.TemporaryDirectory(prefix="etude-rollback-") as scratch:
        folder = make_run(Path(scratch) / "run")
        with processes(folder):
            return asyncio.run(_measure(folder))


def make_run(path: Path) -> RunFolder:
    """Make a run with two versions, the second of which is released and the first the one before."""
    settings = [f"model.shape.{key}" for key in SHAPE]
    settings += ["release.every_steps=1000", "release.engines=2", "engine.max_length=256", "eval.enabled=false"]
    config = default_recipe([*settings, "release.revert=false"])
    folder = RunFolder.create(path, config)
    folder.model.mkdir()
    make_start(folder.model, config)
    _, state = load_checkpoint(folder.model)
    torch.manual_seed(0)
    second = {name: tensor + CHANGED * torch.randn_like(tensor) for name, tensor in state.items()}
    releases = []
    with Publisher(open_log(folder)) as publisher:
        for version, weights in enumerate((state, second)):
            record = publisher.publish(to_stored(weights), version=version, step=version).result()
            releases.append(Release(version=version, digest=record.digest, state=ReleaseState.CANDIDATE))
    with closing(ReleaseStore.open(folder.ledger, config.ledger)) as store:
        for release in releases:
            store.apply(ReleaseDecision(moves=(_move(release, ReleaseState.CANDIDATE),)), unix_s())
            for state_before, to in ((ReleaseState.CANDIDATE, ReleaseState.GATED), (ReleaseState.GATED, RELEASED)):
                at = Release(version=release.version, digest=release.digest, state=state_before)
                store.apply(ReleaseDecision(moves=(_move(at, to),)), unix_s())
        first = Release(version=0, digest=releases[0].digest, state=RELEASED)
        store.apply(ReleaseDecision(moves=(_move(first, ReleaseState.SUPERSEDED),)), unix_s())
    return folder


def _move(release: Release, to: ReleaseState) -> ReleaseMove:
    return ReleaseMove(release=release, to=to, reason="bench", is_new=to is ReleaseState.CANDIDATE)


@contextlib.contextmanager
def processes(folder: RunFolder) -> Iterator[Supervisor]:
    """Run the processes that users need while the context is open."""
    config: RunConfig = folder.config()
    folder.endpoints.reserve(config)
    engines = [ProcessName(command=PRODUCTION.command, replica=n) for n in range(config.release.engines)]
    with EventLog(folder.events, "supervisor") as events:
        placement = place_here(folder, config)
        specs = [process_spec(name, placement.fleet, str(folder.path)) for name in (*engines, PRODUCT, RELEASE)]
        supervisor = Supervisor(specs, placement, folder, events, heartbeat_timeout_s=config.heartbeat_timeout_s)
        try:
            supervisor.check()
            yield supervisor
        finally:
            supervisor.stop()


async def _measure(folder: RunFolder) -> dict[str, object]:
    calls, url = _Calls(), folder.endpoints.url(PRODUCT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, _connected(folder) as engines:
        key = await production_key(http, url, folder.key(KeyRole.ADMIN))
        await _ready(http, url, key)
        with closing(ReleaseStore.open(folder.ledger)) as store:
            former = next(one for one in store.releases() if one.version == 0)
            users = [asyncio.create_task(_user(http, url, key, n, calls)) for n in range(SESSIONS)]
            await asyncio.sleep(BEFORE_S)
            inflight_before = len(calls.answers)
            began_s = time.perf_counter()
            store.ask(ReleaseRequest(kind=RequestKind.ROLLBACK, by="bench", at=unix_s()))
            engines_s = await _all_back(engines, former.digest, began_s)
            await asyncio.sleep(max(0.0, AFTER_S - (time.perf_counter() - began_s)))
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    late = [at - began_s for at, version in calls.answers if version == 1 and at >= began_s]
    after = [version for at, version in calls.answers if at >= began_s]
    return {
        "sessions": SESSIONS,
        "calls_before": inflight_before,
        "calls_after": len(after),
        "of_former_release": after.count(0),
        "last_new_call_s": max(late, default=0.0),
        "engines_back_s": engines_s,
        "rollback_s": max([engines_s, *late]),
        "broken": len(calls.broken),
        "first_broken": calls.broken[:1],
    }


async def production_key(http: aiohttp.ClientSession, url: str, admin: str) -> str:
    """Make a key for users, as soon as the gateway listens."""
    headers = {"Authorization": f"Bearer {admin}"}
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(f"{url}/keys", json={"scope": "production"}, headers=headers) as answer:
                return str(json.loads(await answer.read())["api_key"])
        await asyncio.sleep(0.2)
    raise InfrastructureError(f"the gateway for users did not answer within {READY_S:g} s")


async def _ready(http: aiohttp.ClientSession, url: str, key: str) -> None:
    """Wait until a user is answered."""
    deadline_s = time.monotonic() + READY_S
    status, body = 0, b""
    while time.monotonic() < deadline_s:
        status, _, body = await call(http, url, key, "ready", "ready")
        if status == 200:
            return
        await asyncio.sleep(0.5)
    raise InfrastructureError(f"no user was answered within {READY_S:g} s: {status} {body!r}")


async def _user(http: aiohttp.ClientSession, url: str, key: str, number: int, calls: _Calls) -> None:
    """One session that asks all the time."""
    while True:
        began_s = time.perf_counter()
        status, versions, body = await call(http, url, key, f"user-{number}", f"session-{number}")
        if status == 200:
            calls.answers.append((began_s, max(versions)))
        else:
            calls.broken.append(f"{status} {body[:200]!r}")
            await asyncio.sleep(0.1)


async def call(
    http: aiohttp.ClientSession, url: str, key: str, user: str, session: str
) -> tuple[int, list[int], bytes]:
    """One call of a user: its status, the versions that answered, the body."""
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": TOKENS}
    headers = {"Authorization": f"Bearer {key}", "X-Etude-User": user, "X-Etude-Session": session}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        data, versions = await answer.read(), answer.headers.get("X-Etude-Version", "")
        return answer.status, [int(version) for version in versions.split("-") if version], data


@contextlib.asynccontextmanager
async def _connected(folder: RunFolder) -> AsyncIterator[list[Engine]]:
    """Clients of the engines for users."""
    async with http_engines(0.0, key=folder.key(KeyRole.ENGINE)) as connect:
        yield [connect(url) for url in folder.endpoints.urls(PRODUCTION.command).values()]


async def _all_back(engines: list[Engine], former: str, began_s: float) -> float:
    """Seconds until all engines have the former weights. Raises ``InfrastructureError`` after a minute."""
    while (waited_s := time.perf_counter() - began_s) < 60.0:
        if {(await engine.health()).digest for engine in engines} == {former}:
            return time.perf_counter() - began_s
        await asyncio.sleep(0.02)
    raise InfrastructureError(f"engines were not back after {waited_s:.0f} s")
