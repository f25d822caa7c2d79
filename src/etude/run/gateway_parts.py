"""A gateway put together: engines behind a pool behind a door, with keys, sessions and what keeps them going.

    engines ◀── pool ◀── line ◀── service ◀── gateway ◀── door ◀── callers
                  ▲ watch           │ turns ──▶ recorder ──▶ payloads
                  └ announcements   keys ◀── file

Owns which parts there are and the tasks that run beside them. What a run or the command line makes of it is
:mod:`etude.run.gateway`'s.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from etude.aio import Work, supervised
from etude.clock import unix_s
from etude.config.inference import GatewayConfig
from etude.errors import DamagedError, UserError
from etude.gateway.capture.recorder import Recorder
from etude.gateway.capture.replies import Parts
from etude.gateway.capture.sessions import DEFAULT_LIMITS, SessionLimits, Sessions
from etude.gateway.http.admin_api import Facilities
from etude.gateway.http.app import Gateway
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.http.keys import Key, Keyring
from etude.gateway.http.principal import Identity
from etude.gateway.http.request_log import AccessLog
from etude.gateway.routing.admission import Admission, AdmissionLimits
from etude.gateway.routing.admission_queue import Line
from etude.gateway.routing.engine_health import EngineEntry, HealthLimits
from etude.gateway.routing.load import Load
from etude.gateway.routing.pool import EnginePool, PoolLimits
from etude.gateway.routing.router import DEFAULT_HEALTH, Router
from etude.gateway.service import Service
from etude.protocols import Clock, Engine
from etude.tokens.messages import ChatFormat

KEYS_S = 1.0
"""How often the key file is looked at: a key that was revoked is dead within this time."""
EXPIRE_S = 30.0
"""How often idle sessions are looked for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a gateway shall be."""

    chat: ChatFormat
    """How the model's conversations are written."""
    max_length: int
    """The engines' bound on prompt and completion together, in tokens."""
    recorder: Recorder
    engines: tuple[EngineEntry, ...]
    """To begin with."""
    keys: tuple[Key, ...] = ()
    """Besides those of the file."""
    health: HealthLimits = DEFAULT_HEALTH
    sessions: SessionLimits = DEFAULT_LIMITS
    access_log: Path | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A gateway and what belongs to it."""

    gateway: Gateway
    pool: EnginePool
    keyring: Keyring
    sessions: Sessions
    tasks: tuple[asyncio.Task[None], ...] = field(default=())

    async def hold(self, *others: asyncio.Task[None]) -> None:
        """Wait for ever, or for one of the tasks or of ``others`` to die, and raise what it died of."""
        done, _ = await asyncio.wait([*self.tasks, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


@contextlib.asynccontextmanager
async def running(
    plan: Plan, config: GatewayConfig, clock: Clock, connect: Callable[[str], Engine]
) -> AsyncIterator[Running]:
    """A gateway that works while the context is open; ``connect`` makes the client of an engine's URL.

    Raises :class:`~etude.errors.ConfigError` when the key file is missing, ``DamagedError`` when it is none.
    """
    admission = Admission(
        AdmissionLimits(production=config.max_production, rollouts=config.max_rollouts, waiting=config.max_waiting)
    )
    pool = EnginePool(
        connect, Router(plan.health), clock, PoolLimits(outage_s=config.engine_timeout_s), admission=admission
    )
    keyring, sessions, line = Keyring(), Sessions(plan.chat, plan.sessions), Line(admission, clock)
    key_file = KeyFile(Path(config.keys), clock.now()) if config.keys else None
    _load_keys(key_file, keyring, plan, clock)
    for entry in plan.engines:
        pool.add(entry)
    service = Service(
        Parts(chat=plan.chat, pool=pool, line=line, recorder=plan.recorder, clock=clock), max_length=plan.max_length
    )
    facilities = Facilities(identity=Identity(keyring, sessions), pool=pool, line=line, load=Load(), clock=clock)
    with contextlib.ExitStack() as stack:
        log = None if plan.access_log is None else AccessLog(plan.access_log, unix_s)
        if log is not None:
            stack.callback(log.close)
        gateway = Gateway(service, facilities, config, key_file=key_file, access_log=log)
        background: dict[str, Work] = {"engine polls": pool.watch, "session expiry": partial(_expire, gateway)}
        if key_file is not None:
            background["key file"] = partial(_follow_keys, key_file, keyring, plan, clock)
        if log is not None:
            background["access log"] = log.run
        tasks = [asyncio.create_task(supervised(name, work), name=name) for name, work in background.items()]
        try:
            yield Running(gateway=gateway, pool=pool, keyring=keyring, sessions=sessions, tasks=tuple(tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _load_keys(key_file: KeyFile | None, keyring: Keyring, plan: Plan, clock: Clock) -> None:
    """Take in the file's keys if it changed; those of the plan stay."""
    now = clock.now()
    if key_file is not None:
        key_file.refresh(keyring, now)
    known = {key.key_id for key in keyring}
    for key in plan.keys:
        if key.key_id not in known:
            keyring.add(key, now)


async def _follow_keys(key_file: KeyFile, keyring: Keyring, plan: Plan, clock: Clock) -> None:
    """Keep the keys those of the file; a file that cannot be read leaves them as they were."""
    while True:
        await asyncio.sleep(KEYS_S)
        try:
            _load_keys(key_file, keyring, plan, clock)
        except (UserError, DamagedError, OSError) as error:
            logger.warning("%s", error)


async def _expire(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(EXPIRE_S)
        gateway.expire()
