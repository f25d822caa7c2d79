"""The gateway process: a door in front of a run's engine, or, alone, in front of any engines.

    SIGTERM ─▶ /healthz says draining, new calls are turned away ─▶ calls in flight end, at most drain_s ─▶ exit
    a second signal cuts what is left

Owns what the parts are made of and how the process ends; what they are is :mod:`etude.run.gateway_parts`'.
"""

import asyncio
import gc
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.aio import supervised
from etude.clock import SystemClock, date_utc
from etude.config.inference import GatewayConfig
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.engines.http.client import http_engines
from etude.errors import ConfigError, DamagedError
from etude.gateway.capture.recorder import Recorder
from etude.gateway.capture.sessions import SessionLimits
from etude.gateway.http.keys import Key, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.server import door
from etude.gateway.routing.engine_health import EngineEntry, HealthLimits, is_engine_url
from etude.ledger.payloads import Payloads
from etude.run.connections import Connections
from etude.run.endpoints import PUBLIC
from etude.run.folder import RunFolder
from etude.run.gateway_parts import Plan, Running, running
from etude.run.serving import STOP_S, listening, run_until_signal, tell_person
from etude.run.store_outages import StoreOutages
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.tokens.jinja import load_format
from etude.types import RouteSpace
from etude.weights.log import WeightLog

FRESH_S = 0.05
"""How often a run's gateway asks the engine beside it which weights it serves: rollouts start by that."""
DRAIN_SHARE = 0.5
"""Of the time that a process of a run has to stop, for calls in flight."""
DRAINED_S = 0.5
"""As :data:`~etude.run.serving.SHUTDOWN_S`, for calls that had all of the drain already."""
ANNOUNCE_S = 0.5
"""How often the weight log is asked for new versions."""
LAG_ROOM = 4
"""Versions that an engine may be behind beyond what the recipe allows rollouts to be."""
COLLECT_AFTER = (50_000, 50, 100)
"""Objects, and collections of the next younger kind, before Python looks for cycles again. A call makes hundreds of
objects and none in a cycle; by default the collector would walk through all conversations every few hundred calls, in
pauses that are the slowest calls.
"""

ENGINE_FORM = re.compile(r"(?P<url>https?://[^@]+?)/*(@(?P<region>[A-Za-z0-9._-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What `etude gateway` was told."""

    model: Path
    """A checkpoint folder: tokenizer, chat template, configuration; the weights are not read."""
    engines: tuple[str, ...]
    """``URL`` or ``URL@region``."""
    payloads: Path | None = None
    access_log: Path | None = None
    settings: tuple[str, ...] = ()
    """``gateway.key=value``."""


def run_gateway(folder: RunFolder) -> None:
    """Serve a run until told to stop."""
    run_until_signal(_serve_run(folder))


def run_alone(told: Alone) -> None:
    """Serve any engines until told to stop. Raises :class:`~etude.errors.ConfigError`."""
    run_until_signal(_serve_alone(told), cleanup_s=None)


async def _serve_run(folder: RunFolder) -> None:
    config = folder.config()
    secret = folder.admin_key()
    admin = Key(key_id="run", digest=digest_of(secret), scope=Scope.ADMIN, created=date_utc(), label="this run")
    plan = Plan(
        chat=load_format(folder.model, config.gateway.chat_template_kwargs),
        max_length=config.engine.max_length,
        recorder=Recorder(Payloads(folder.payloads), _replayed_routes(folder, config)),
        engines=(EngineEntry(name="engine", url=folder.endpoints.url("engine")),),
        keys=(admin,),
        health=HealthLimits(
            healthy_poll_s=FRESH_S, suspect_poll_s=FRESH_S, max_lag=config.rollouts.max_staleness + LAG_ROOM
        ),
        sessions=_session_limits(config.gateway),
        access_log=folder.logs / "access.jsonl" if config.gateway.access_log else None,
    )
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(_connected(plan, config.gateway))
        server = door(parts.gateway.handle, max_body_bytes=config.gateway.max_body_bytes)
        port, connections = folder.endpoints.port("gateway"), Connections()
        inside = listening(server, port, shutdown_s=DRAINED_S, connections=connections)
        await stack.enter_async_context(inside)
        if config.gateway.public:
            outside = listening(
                door(parts.gateway.handle, max_body_bytes=config.gateway.max_body_bytes),
                folder.endpoints.port(PUBLIC),
                host=config.gateway.host,
                tls=tls_context(config.gateway),
                shutdown_s=DRAINED_S,
                connections=connections,
            )
            await stack.enter_async_context(outside)
        tell_person(f"gateway at {folder.endpoints.url('gateway')}, admin key in {folder.path / 'admin.key'}")
        events = stack.enter_context(EventLog(folder.events, "gateway", lossy=True))
        outages = stack.enter_context(StoreOutages(folder.store, config.rollouts.max_outage_s, events))
        announcing = asyncio.create_task(
            supervised("announcements", partial(announce, open_log(folder, outages), parts.pool.announce))
        )
        stack.callback(announcing.cancel)
        await _until_told(parts, min(config.gateway.drain_s, DRAIN_SHARE * STOP_S), announcing)


async def _serve_alone(told: Alone) -> None:
    config, made = _settings(told), None
    if not config.keys:
        made = new_secret(Scope.PRODUCTION)
    keys = () if made is None else (_first_key(made),)
    plan = Plan(
        chat=load_format(told.model, config.chat_template_kwargs),
        max_length=longest_context(told.model),
        recorder=Recorder(None if told.payloads is None else Payloads(told.payloads)),
        engines=tuple(entry_of(engine) for engine in told.engines),
        keys=keys,
        sessions=_session_limits(config),
        access_log=told.access_log,
    )
    async with _connected(plan, config) as parts:
        server = door(parts.gateway.handle, max_body_bytes=config.max_body_bytes)
        async with listening(
            server, config.port, host=config.host, tls=tls_context(config), shutdown_s=DRAINED_S
        ) as port:
            sys.stdout.write(_greeting(config, port, made))
            sys.stdout.flush()
            await _until_told(parts, config.drain_s)


def _session_limits(config: GatewayConfig) -> SessionLimits:
    return SessionLimits(max_turns=config.max_session_turns, max_tokens=config.max_session_tokens)


@asynccontextmanager
async def _connected(plan: Plan, config: GatewayConfig) -> AsyncIterator[Running]:
    """The parts, with connections to engines."""
    async with (
        # Engines are given up at the first trouble: the pool knows better than to wait for one of them.
        http_engines(0.0) as connect,
        running(plan, config, SystemClock(), connect) as parts,
    ):
        yield parts


async def _until_told(parts: Running, drain_s: float, *beside: asyncio.Task[None]) -> None:
    """Serve until a signal comes, or one of the tasks ``beside`` dies; then let the calls in flight end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        await parts.hold(*beside)
    except asyncio.CancelledError:
        await parts.gateway.drain(drain_s)
        raise


async def announce(log: WeightLog, notify: Callable[[int, str], None]) -> None:
    """Tell which digest each version has, for ever; while the store is away, as long as it takes, nothing.

    consumes: commit records; produces: announcements; waits for: the next version; woken by: its own polling; on
    shutdown: cancelled between two polls.
    """
    known = -1
    while True:
        try:
            newest = await asyncio.to_thread(log.latest, None if known < 0 else known)
            if newest is not None and newest != known:
                record = await asyncio.to_thread(log.read, newest)
                if record is not None:
                    notify(newest, record.digest)
                    known = newest
        except DamagedError:
            pass  # a record that cannot be read announces nothing; `etude weights` tells of it
        await asyncio.sleep(ANNOUNCE_S)


def _replayed_routes(folder: RunFolder, config: RunConfig) -> RouteSpace | None:
    """What routes the trainer will want; ``None`` for none."""
    if config.numerics.replay == "off":
        return None
    from etude.models.checkpoint import load_spec  # torch is most of this process's memory: only where it is needed
    from etude.run.numerics import route_space

    return route_space(load_spec(folder.model), config.numerics)


def _settings(told: Alone) -> GatewayConfig:
    elsewhere = [setting for setting in told.settings if not setting.startswith("gateway.")]
    if elsewhere:
        raise ConfigError(f"--set {elsewhere[0]!r} would have no effect on a gateway: only gateway.* has")
    config = default_recipe(told.settings).gateway
    if config.access_log and told.access_log is None:
        raise ConfigError("gateway.access_log = true has no file to write: give --access-log FILE")
    return config


def entry_of(text: str) -> EngineEntry:
    """An engine as the command line names it: ``URL`` or ``URL@region``. Raises ``ConfigError`` for anything else."""
    form = ENGINE_FORM.fullmatch(text)
    if form is None or not is_engine_url(form["url"]):
        raise ConfigError(f"--engine {text!r}: expected http://HOST:PORT or http://HOST:PORT@REGION")
    url = form["url"]
    return EngineEntry(name=url.partition("://")[2].replace("/", "-"), url=url, region=form["region"] or "")


def longest_context(model: Path) -> int:
    """Tokens of the longest context that a checkpoint is made for. Raises ``ConfigError`` if it does not say."""
    file = model / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return int(found.get("max_position_embeddings") or found["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} does not say how long a context may be (max_position_embeddings): {error}"
        ) from error


def _first_key(secret: str) -> Key:
    return Key(key_id=new_key_id(), digest=digest_of(secret), scope=Scope.PRODUCTION, created=date_utc())


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """How to speak TLS; ``None`` for plain HTTP. Raises ``ConfigError`` for a certificate that cannot be used."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_cert, gateway.tls_key: {error}") from error
    return context


def _greeting(config: GatewayConfig, port: int, secret: str | None) -> str:
    base = f"{'https' if config.tls_cert else 'http'}://{config.host}:{port}"
    key = secret or "one of `etude keys add " + config.keys + "`"
    return (
        f"étude gateway at {base}\n"
        f"  OpenAI's SDK      OPENAI_BASE_URL={base}/v1\n"
        f"  Anthropic's SDK   ANTHROPIC_BASE_URL={base}\n"
        f"  key               {key}\n"
        f"  model             policy (any name will do)\n"
    )
