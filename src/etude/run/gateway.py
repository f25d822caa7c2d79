"""The gateway process: HTTP servers in front of a run's engines or, standalone, of any engines.

    engines ◀── pool ◀── admission queue ◀── service ◀── gateway ◀── HTTP servers ◀── callers
                  ▲ polls                    │ turns ──▶ recorder ──▶ payloads
                  └ announcements            keys ◀── file

    SIGTERM ─▶ /healthz says draining, new calls are refused ─▶ calls in flight end, at most DRAIN_S ─▶ exit
    a second signal cancels the rest

This module owns the parts of a gateway, their background tasks and the shutdown of the process.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import final

from etude.aio import Work, supervised
from etude.clock import SystemClock, date_utc, unix_s
from etude.config.inference import GatewayConfig
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.engines.http import http_engines
from etude.errors import ConfigError, DamagedError, InfrastructureError, UserError
from etude.gateway.capture.live import LiveRecorder
from etude.gateway.capture.sessions import DEFAULT_LIMITS, SessionLimits, SessionStore
from etude.gateway.http.admin_api import AdminApi
from etude.gateway.http.app import Gateway, GatewayState, RouteTable, http_server
from etude.gateway.http.auth import Authenticator, Key, Keyring, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.request_log import AccessLog, RequestRecord
from etude.gateway.routing.admission import AdmissionController, AdmissionLimits, AdmissionQueue, InflightCalls
from etude.gateway.routing.arms import ReleasedArms
from etude.gateway.routing.pool import EnginePool, PoolLimits
from etude.gateway.routing.router import DEFAULT_HEALTH, EngineEntry, HealthLimits, Router, is_engine_url
from etude.gateway.routing.shadow import Shadow, ShadowCall
from etude.gateway.service import CallService, Recorder, ReplySampler
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore
from etude.protocols import Clock, Engine
from etude.run.directory import Directory
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.keys import ENGINE_KEY_VARIABLE, KeyRole
from etude.run.listener import run_listener
from etude.run.live_sessions import open_live_sessions
from etude.run.parent import tell_person
from etude.run.placement import fleet_of
from etude.run.process_name import ENGINE, PRODUCT, PRODUCTION, ProcessName
from etude.run.region_stores import open_directory, open_region_log, weights_url
from etude.run.routing_tables import RoutingTables
from etude.run.serving import STOP_S, listening, run_until_signal, tls_context
from etude.run.store_outages import StoreOutages
from etude.run.stores import open_payloads
from etude.telemetry.events import GatewayStats, ModelCall
from etude.telemetry.log import EventLog
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatFormat
from etude.types import RouteSpace
from etude.weights.log import WeightLog

FRESH_S = 0.05
"""Pause between polls of a run's own engines for their weight version, which starts rollouts."""
DRAIN_SHARE = 0.5
"""Share of the shutdown time of a run's process that calls in flight may use."""
DRAINED_S = 0.5
"""Time for calls to end that are cancelled after the drain, like :data:`~etude.run.serving.SHUTDOWN_S`."""
ANNOUNCE_S = 0.5
"""Pause between two polls of the weight log for new versions."""
LAG_ROOM = 4
"""Number of versions that an engine may lag in addition to the staleness that the recipe allows rollouts."""
COLLECT_AFTER = (50_000, 50, 100)
"""Thresholds of Python's garbage collector (``gc.set_threshold``). A call creates hundreds of objects and no cycle;
with the default thresholds the collector would walk through all conversations every few hundred calls, and its pauses
would be the slowest calls.
"""

STATS_S = 2.0
"""Period over which calls are summed into one event."""
DIRECTORY_S = 0.5
"""Pause between two polls of the directory for engines that were started elsewhere."""
KEYS_S = 1.0
"""Pause between two polls of the key file: a revoked key stops working within this time."""
EXPIRE_S = 30.0
"""Pause between two checks for idle sessions."""
DRAIN_S = 30.0
"""Longest time for calls in flight after a stop signal: most completions end sooner."""
MAX_SESSION_TURNS = 4096
"""Model calls of one session; each needs some kilobytes in addition to its tokens."""
ENGINE_FORM = re.compile(r"(?P<url>https?://[^@]+?)/*(@(?P<region>[A-Za-z0-9._-]+))?")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """The options of `etude gateway`."""

    model: Path
    """A checkpoint folder: tokenizer, chat template, configuration; the weights are not read."""
    engines: tuple[str, ...]
    """``URL`` or ``URL@region``."""
    payloads: Path | None = None
    access_log: Path | None = None
    settings: tuple[str, ...] = ()
    """``gateway.key=value``."""


def run_gateway(folder: RunFolder, name: ProcessName) -> None:
    """Serve one of a run's gateways until a stop signal."""
    run_until_signal(_serve_run(folder, name))


def run_standalone(options: StandaloneOptions) -> None:
    """Serve a gateway of any engines until a stop signal. Raises :class:`~etude.errors.ConfigError`."""
    run_until_signal(_serve_standalone(options), cleanup_s=None)


async def _serve_run(folder: RunFolder, name: ProcessName) -> None:
    config, fleet, is_product = folder.config(), fleet_of(folder), name.command == PRODUCT.command
    command = PRODUCTION.command if is_product else ENGINE.command
    engines = {} if fleet is not None else folder.endpoints.urls(command)
    digest = digest_of(folder.key(KeyRole.ADMIN))
    admin = Key(key_id="run", digest=digest, scope=Scope.ADMIN, created=date_utc(), label="this run")
    spec = GatewaySpec(
        chat=load_format(folder.model, config.gateway.chat_template_kwargs),
        max_length=config.engine.max_length,
        recorder=Recorder(
            open_payloads(folder),
            _replayed_routes(folder, config),
            sampled_only=config.numerics.replay == "completion",
        ),
        engines=tuple(EngineEntry(name=str(one), url=url, region=one.region) for one, url in engines.items()),
        keys=(admin, *_product_keys(folder, is_product)),
        health=HealthLimits(
            healthy_poll_s=FRESH_S,
            suspect_poll_s=FRESH_S,
            stale_poll_s=FRESH_S if is_product else HealthLimits().stale_poll_s,
            max_lag=None if is_product else config.rollouts.max_staleness + LAG_ROOM,
        ),
        arms=ReleasedArms() if is_product else None,
        shadow_share=config.release.shadow_share if is_product and config.release.shadow_sessions else 0.0,
        sessions=_session_limits(config.gateway),
        access_log=folder.logs / f"{name}.access.jsonl" if config.gateway.access_log else None,
    )
    async with AsyncExitStack() as stack:
        tables = RoutingTables.open(folder)
        if spec.shadow_share:
            spec = replace(spec, receive_shadow=partial(_keep_shadow, tables))
        if config.feedback.window_s and (is_product or not config.release.enabled):
            live = await stack.enter_async_context(open_live_sessions(folder, config.feedback, name))
            spec = replace(spec, live=live.recorder, more_routes=live.routes)
        events = stack.enter_context(open_events(folder, name, lossy=True))
        if config.log.has_traces and not is_product:
            spec = replace(spec, on_request=partial(_note_call, events))
        parts = await stack.enter_async_context(_connected(spec, config.gateway, folder.key(KeyRole.ENGINE)))
        outages = stack.enter_context(
            StoreOutages(weights_url(folder, name.region), config.rollouts.max_outage_s, events)
        )
        listener = run_listener(
            folder, name, partial(http_server, parts.gateway.handle), config.gateway, outages, shutdown_s=DRAINED_S
        )
        url = await stack.enter_async_context(listener)
        tell_person(f"{name} at {url}, admin key by `etude keys derive {folder.path} admin`")
        log = open_region_log(folder, name.region, outages)
        work: dict[str, Work] = {
            "announcements": partial(announce, log, parts.pool.announce),
            "load": partial(report_calls, parts.gateway, events),
        }
        if fleet is not None:
            directory, region = open_directory(folder, name.region), fleet.regions_by_name[name.region or fleet.home]
            is_lent = _never if is_product else region.is_lent
            work["engines of the region"] = partial(follow_engines, directory, parts.pool, command, is_lent)
        if spec.arms is not None:
            work["routing tables"] = partial(tables.follow, spec.arms.follow)
        tasks = [asyncio.create_task(supervised(title, each)) for title, each in work.items()]
        for task in tasks:
            stack.callback(task.cancel)
        await _serve_until_signal(parts, min(DRAIN_S, DRAIN_SHARE * STOP_S), *tasks)


async def _serve_standalone(options: StandaloneOptions) -> None:
    config, made = _settings(options), None
    if not config.keys:
        made = new_secret(Scope.PRODUCTION)
    keys = () if made is None else (_first_key(made),)
    spec = GatewaySpec(
        chat=load_format(options.model, config.chat_template_kwargs),
        max_length=longest_context(options.model),
        recorder=Recorder(None if options.payloads is None else Payloads(ObjectStore(str(options.payloads)))),
        engines=tuple(engine_entry(engine) for engine in options.engines),
        keys=keys,
        sessions=_session_limits(config),
        access_log=options.access_log,
    )
    async with _connected(spec, config, os.environ.get(ENGINE_KEY_VARIABLE, "").strip()) as parts:
        server = http_server(parts.gateway.handle)
        tls = tls_context("gateway", config.tls_cert, config.tls_key)
        async with listening(server, config.port, host=config.host, tls=tls, shutdown_s=DRAINED_S) as port:
            sys.stdout.write(_greeting(config, port, made))
            sys.stdout.flush()
            await _serve_until_signal(parts, DRAIN_S)


def _note_call(events: EventLog, record: RequestRecord) -> None:
    """Write an event of a rollout's model call."""
    if record.api and record.session_id:
        events.write(
            ModelCall(
                session=record.session_id,
                seconds=record.seconds,
                waited_s=record.waited_s,
                first_token_s=record.first_token_s,
                api=record.api,
                engine=record.engine,
                status=record.status,
                prompt_tokens=record.prompt_tokens,
                completion_tokens=record.completion_tokens,
                reused_tokens=record.reused_tokens,
                versions=list(record.versions),
            )
        )


def _product_keys(folder: RunFolder, is_product: bool) -> tuple[Key, ...]:
    """The key of the run's own product, which a gateway for users accepts from the start."""
    if not is_product:
        return ()
    digest = digest_of(folder.key(KeyRole.PRODUCT))
    return (Key(key_id="product", digest=digest, scope=Scope.PRODUCTION, created=date_utc(), label="the product"),)


def _session_limits(config: GatewayConfig) -> SessionLimits:
    return SessionLimits(max_turns=MAX_SESSION_TURNS, max_tokens=config.max_session_tokens)


@asynccontextmanager
async def _connected(spec: "GatewaySpec", config: GatewayConfig, engine_key: str) -> "AsyncIterator[RunningGateway]":
    """Open the parts of a gateway with connections to engines, which all share one key or have none."""
    async with (
        # No retries on an engine: after the first failure the pool chooses another one.
        http_engines(0.0, key=engine_key) as connect,
        open_gateway(spec, config, SystemClock(), connect) as parts,
    ):
        yield parts


async def _serve_until_signal(parts: "RunningGateway", drain_s: float, *others: asyncio.Task[None]) -> None:
    """Serve until a signal arrives or one of the tasks fails; then let the calls in flight end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        await parts.wait(*others)
    except asyncio.CancelledError:
        await parts.gateway.drain(drain_s)
        raise


async def announce(log: WeightLog, receive: Callable[[int, str], None]) -> None:
    """Announce the digest of each version to ``receive``, forever; announce nothing while the store is unavailable.

    consumes: commit records; produces: announcements; waits for: the next version; woken by: its own polling; on
    shutdown: cancelled between two polls.
    """
    announced = -1
    while True:
        try:
            newest = await asyncio.to_thread(log.latest, None if announced < 0 else announced)
            if newest is not None and newest != announced:
                record = await asyncio.to_thread(log.read, newest)
                if record is not None:
                    receive(newest, record.digest)
                    announced = newest
        except DamagedError:
            pass  # an unreadable record is not announced; `etude weights` reports it
        await asyncio.sleep(ANNOUNCE_S)


async def report_calls(gateway: Gateway, events: EventLog) -> None:
    """Log the calls of each period of ``STATS_S`` that had any, forever."""
    since_s, before_cpu_s = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(STATS_S)
        load, now_s, cpu_s = gateway.take_load(), time.perf_counter(), time.process_time()
        if load.calls:
            events.write(GatewayStats(window_s=now_s - since_s, cpu_s=cpu_s - before_cpu_s, **asdict(load)))
        since_s, before_cpu_s = now_s, cpu_s


def _keep_shadow(tables: RoutingTables, call: ShadowCall) -> None:
    """Store a shadow's call in the background; if the store is unavailable the call is lost, as if it had not been
    sampled.
    """

    def keep() -> None:
        with contextlib.suppress(InfrastructureError):
            tables.add_shadow(call)

    asyncio.get_running_loop().run_in_executor(None, keep)


def _never(replica: int) -> bool:
    """Return false: no engine is lent, so none can be taken back."""
    return False


async def follow_engines(directory: Directory, pool: EnginePool, command: str, is_lent: Callable[[int], bool]) -> None:
    """Update the engines of ``pool`` to those of ``command`` in a region's directory, forever; while the directory is
    unavailable, the pool stays as it is. ``is_lent`` is true for a replica that production may take back.

    consumes: the directory; produces: engines, which the pool polls; waits for: nothing; woken by: its own polling; on
    shutdown: cancelled between two polls.
    """
    engines: dict[ProcessName, str] = {}
    while True:
        with contextlib.suppress(InfrastructureError):
            urls = await asyncio.to_thread(directory.urls, command)
            for name in [name for name, url in engines.items() if urls.get(name) != url]:
                pool.remove(str(name))
                del engines[name]
            for name, url in urls.items():
                if name not in engines:
                    entry = EngineEntry(name=str(name), url=url, region=name.region, is_lent=is_lent(name.replica))
                    pool.add(entry)
            engines = urls
        await asyncio.sleep(DIRECTORY_S)


def _replayed_routes(folder: RunFolder, config: RunConfig) -> RouteSpace | None:
    """The space of the routes that the trainer replays; ``None`` for none."""
    if config.numerics.replay == "off":
        return None
    from etude.models.checkpoint import load_spec  # imports torch, which is most of this process's memory
    from etude.run.numerics import route_space

    return route_space(load_spec(folder.model, config.model.impl), config.numerics)


def _settings(options: StandaloneOptions) -> GatewayConfig:
    elsewhere = [setting for setting in options.settings if not setting.startswith("gateway.")]
    if elsewhere:
        raise ConfigError(f"--set {elsewhere[0]!r} would have no effect on a gateway: only gateway.* has")
    config = default_recipe(options.settings).gateway
    if config.access_log and options.access_log is None:
        raise ConfigError("gateway.access_log = true has no file to write: give --access-log FILE")
    return config


def engine_entry(text: str) -> EngineEntry:
    """Parse an engine on the command line: ``URL`` or ``URL@region``. Raises ``ConfigError`` for anything else."""
    form = ENGINE_FORM.fullmatch(text)
    if form is None or not is_engine_url(form["url"]):
        raise ConfigError(f"--engine {text!r}: expected http://HOST:PORT or http://HOST:PORT@REGION")
    url = form["url"]
    return EngineEntry(name=url.partition("://")[2].replace("/", "-"), url=url, region=form["region"] or "")


def longest_context(model: Path) -> int:
    """Context length of a checkpoint, in tokens. Raises ``ConfigError`` if it does not say."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} does not say how long a context may be (max_position_embeddings): {error}"
        ) from error


def _first_key(secret: str) -> Key:
    return Key(key_id=new_key_id(), digest=digest_of(secret), scope=Scope.PRODUCTION, created=date_utc())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """The settings of a gateway that depend on its process."""

    chat: ChatFormat
    """The format of the model's conversations."""
    max_length: int
    """The engines' bound on prompt and completion together, in tokens."""
    recorder: Recorder
    engines: tuple[EngineEntry, ...]
    """The initial engines."""
    keys: tuple[Key, ...] = ()
    """Keys in addition to those of the key file."""
    health: HealthLimits = DEFAULT_HEALTH
    sessions: SessionLimits = DEFAULT_LIMITS
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    access_log: Path | None = None
    arms: ReleasedArms | None = None
    """The weights that may serve users; ``None``: any."""
    shadow_share: float = 0.0
    """Share of users' calls that are also sent to a shadow."""
    receive_shadow: Callable[[ShadowCall], None] = lambda call: None
    """Receives the result of each shadow call."""
    live: LiveRecorder | None = None
    """Recorder of the sessions of users who consent; ``None``: no recording."""
    more_routes: Callable[[GatewayState], RouteTable] = lambda state: {}
    """Routes served in addition to the gateway's own."""
    on_request: Callable[[RequestRecord], None] | None = None
    """Called for every finished request except probes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
    """A running gateway and its parts."""

    gateway: Gateway
    pool: EnginePool
    keyring: Keyring
    sessions: SessionStore
    tasks: tuple[asyncio.Task[None], ...] = field(default=())

    async def wait(self, *others: asyncio.Task[None]) -> None:
        """Wait until one of the tasks or of ``others`` fails, and raise its error."""
        done, _ = await asyncio.wait([*self.tasks, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


@contextlib.asynccontextmanager
async def open_gateway(
    spec: GatewaySpec, config: GatewayConfig, clock: Clock, connect: Callable[[str], Engine]
) -> AsyncIterator[RunningGateway]:
    """Run a gateway while the context is open; ``connect`` creates the client for an engine's URL.

    Raises :class:`~etude.errors.ConfigError` when the key file is missing, ``DamagedError`` when it is not a key file.
    """
    controller = AdmissionController(spec.admission)
    pool = EnginePool(
        connect, Router(spec.health), clock, PoolLimits(outage_s=config.engine_timeout_s), admission=controller
    )
    keyring, sessions, admission = Keyring(), SessionStore(spec.chat, spec.sessions), AdmissionQueue(controller, clock)
    key_file = KeyFile(Path(config.keys), clock.now()) if config.keys else None
    _load_keys(key_file, keyring, spec, clock)
    for entry in spec.engines:
        pool.add(entry)
    shadow = None
    if spec.arms is not None and spec.shadow_share:
        shadow = Shadow(pool, spec.arms, clock, spec.receive_shadow, share=spec.shadow_share)
    sampler = ReplySampler(spec.chat, pool, admission, spec.recorder, clock, shadow)
    state = GatewayState(
        auth=Authenticator(keyring, sessions),
        pool=pool,
        admission=admission,
        inflight=InflightCalls(),
        clock=clock,
        arms=spec.arms,
        live=spec.live,
    )
    with contextlib.ExitStack() as stack:
        log = None if spec.access_log is None else AccessLog(spec.access_log, unix_s)
        if log is not None:
            stack.callback(log.close)
        admin = AdminApi(state, key_file)
        service = CallService(sampler, max_length=spec.max_length, live=spec.live)
        others = {**admin.routes(), **spec.more_routes(state)}
        listeners = [*([] if log is None else [log.add]), *([] if spec.on_request is None else [spec.on_request])]
        gateway = Gateway(service, state, config, others=others, metrics=admin.metrics, listeners=listeners)
        background: dict[str, Work] = {
            "engine polls": pool.watch,
            "session expiry": partial(_expire, state.auth, clock),
        }
        if key_file is not None:
            background["key file"] = partial(_follow_keys, key_file, keyring, spec, clock)
        if log is not None:
            background["access log"] = log.run
        tasks = [asyncio.create_task(supervised(name, work), name=name) for name, work in background.items()]
        try:
            yield RunningGateway(gateway=gateway, pool=pool, keyring=keyring, sessions=sessions, tasks=tuple(tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if shadow is not None:
                await shadow.close()


def _load_keys(key_file: KeyFile | None, keyring: Keyring, spec: GatewaySpec, clock: Clock) -> None:
    """Load the keys of the file if it changed; the keys of the spec stay."""
    now = clock.now()
    if key_file is not None:
        key_file.refresh(keyring, now)
    key_ids = {key.key_id for key in keyring}
    for key in spec.keys:
        if key.key_id not in key_ids:
            keyring.add(key, now)


async def _follow_keys(key_file: KeyFile, keyring: Keyring, spec: GatewaySpec, clock: Clock) -> None:
    """Reload the keys whenever the file changes; an unreadable file leaves them unchanged."""
    while True:
        await asyncio.sleep(KEYS_S)
        try:
            _load_keys(key_file, keyring, spec, clock)
        except (UserError, DamagedError, OSError) as error:
            logger.warning("%s", error)


async def _expire(auth: Authenticator, clock: Clock) -> None:
    while True:
        await asyncio.sleep(EXPIRE_S)
        auth.expire(clock.now())
