"""Databases inside sandboxes: started before the agent, with separate state for each rollout.

    bare image        one per image and kinds of service: an empty cluster, the server stopped        snapshot()
        └─ template   one per specification and setup: its rows are in; at most ``templates`` are kept
              └─ fork one per rollout: its own files, its own server, started (or alive already: LIVE_FORK)

Servers run as the agent's user, in ``/home/agent/.services``, and listen on the sandbox's loopback and on a socket.
State need not survive a power failure, so no write is flushed to disk. The setup fills a database; the agent has to
find out the permissions by itself: role ``app`` owns database ``app``, and there is no password.

Owns the templates and the servers' configuration. A task's :class:`~etude.sandbox_spec.EnvironmentSpec` names its
services; :mod:`etude.rewards.graders.queries` judges a database.

States of a template: preparing ──▶ ready ──fork──▶ ready ──evicted, failed or provider closed──▶ closed.
Waits for servers with a deadline.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import orjson

from etude.aio import gather_or_cancel
from etude.errors import ConfigError, SandboxError
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import Capability, EnvironmentSpec, Image, ImageUser, SandboxSpec, Service, ServiceKind
from etude.sandboxes.capabilities import check_capability
from etude.sandboxes.entrypoint import started
from etude.sandboxes.lifecycle import close_all

HOME = "/home/agent/.services"
"""Folder of servers' files inside the sandbox: owned by the agent, outside its working folder."""
SOCKETS = f"{HOME}/run"
"""Folder of PostgreSQL's socket."""
DATABASE, OWNER, SUPERUSER = "app", "app", "postgres"
"""The database of a task, the role that owns it and has no other rights, and the superuser."""
DEADLINE_S = 180.0
"""Deadline of one step: an installation, a start, a setup. It takes about a second, or ten on an emulated machine."""
POLLS_PER_S = 100
NOT_INSTALLED = 69
"""Exit code of a script that finds no server program (``EX_UNAVAILABLE``)."""
LOG_LINES = 12
"""Lines of a server's log in the error for a failed start."""

POSTGRES_PROGRAMS = f"""
set -eu; umask 077
for bin in /usr/lib/postgresql/*/bin; do [ -x "$bin/postgres" ] && export PATH="$bin:$PATH"; done
command -v initdb >/dev/null && command -v psql >/dev/null || exit {NOT_INSTALLED}
data={HOME}/postgres log={HOME}/postgres.log
"""
"""Folders of the server's programs; if there are several versions, the last is used."""
POSTGRES_INSTALL = f"""
mkdir -p {SOCKETS}
initdb -D "$data" -U {SUPERUSER} -A trust -E UTF8 --locale=C.UTF-8 --wal-segsize=1 --no-sync --no-instructions >&2
cat >>"$data/postgresql.conf" <<'END'
listen_addresses = '127.0.0.1'
unix_socket_directories = '{SOCKETS}'
unix_socket_permissions = 0700
fsync = off
synchronous_commit = off
full_page_writes = off
wal_level = minimal
max_wal_senders = 0
max_logical_replication_workers = 0
min_wal_size = 2MB
max_wal_size = 64MB
shared_buffers = 16MB
max_connections = 40
huge_pages = off
dynamic_shared_memory_type = mmap
max_parallel_workers_per_gather = 0
autovacuum = off
jit = off
timezone = 'UTC'
log_timezone = 'UTC'
END
"""
"""Segments of 1 MiB instead of 16: a start rewrites the last segment, so every fork has its own copy of it."""
POSTGRES_START = f"""
rm -f "$data/postmaster.pid"
setsid postgres -D "$data" >"$log" 2>&1 </dev/null &
server=$!
until grep -q '^ready' "$data/postmaster.pid" 2>/dev/null; do
    kill -0 $server 2>/dev/null || {{ tail -n {LOG_LINES} "$log" >&2; exit 1; }}
    sleep {1 / POLLS_PER_S}
done
"""
POSTGRES_CREATE = f"""
psql -X -q -h {SOCKETS} -U {SUPERUSER} -d postgres -v ON_ERROR_STOP=1 -c 'CREATE ROLE {OWNER} LOGIN' \\
    -c 'CREATE DATABASE {DATABASE} OWNER {OWNER}'
"""
POSTGRES_SETUP = f"""
psql -X -q -h {SOCKETS} -U {OWNER} -d {DATABASE} -v ON_ERROR_STOP=1 -f - >/dev/null
psql -X -q -h {SOCKETS} -U {SUPERUSER} -d {DATABASE} -c ANALYZE
"""
"""Statistics are part of the state: nothing collects them later."""
POSTGRES_STOP = 'pg_ctl -D "$data" -m fast -w -s stop'

REDIS_PROGRAMS = f"""
set -eu; umask 077
command -v redis-server >/dev/null && command -v redis-cli >/dev/null || exit {NOT_INSTALLED}
data={HOME}/redis log={HOME}/redis.log
"""
REDIS_INSTALL = 'mkdir -p "$data"'
REDIS_START = f"""
setsid redis-server --bind 127.0.0.1 --port 6379 --dir "$data" --save '' --appendonly no --daemonize no \\
    >"$log" 2>&1 </dev/null &
server=$!
until [ "$(redis-cli ping 2>/dev/null)" = PONG ]; do
    kill -0 $server 2>/dev/null || {{ tail -n {LOG_LINES} "$log" >&2; exit 1; }}
    sleep {1 / POLLS_PER_S}
done
"""
REDIS_SETUP = "if redis-cli --no-raw | grep -m 1 '^(error)' >&2; then exit 1; fi"
REDIS_STOP = 'redis-cli shutdown save; while [ -n "$(redis-cli ping 2>/dev/null)" ]; do sleep 0.01; done'


Step: TypeAlias = Literal["install", "start", "create", "setup", "stop"]
"""A step of a server's life: which script of :class:`ServerScripts` to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerScripts:
    """The shell scripts that run one kind of service; each begins with ``programs``."""

    package: str
    """The Debian package with the programs."""
    programs: str
    """Finds the programs, or exits with ``NOT_INSTALLED``."""
    install: str
    """Creates an empty state."""
    start: str
    """Returns when the server answers; otherwise prints the end of its log."""
    create: str
    """Run once, on the empty state."""
    setup: str
    """Reads a task's :attr:`~etude.sandbox_spec.Service.setup`; fails at the first error."""
    stop: str
    """Returns when all data is on disk and the server has ended."""
    variables: Mapping[str, str]
    """Environment variables by which programs find it."""


SERVERS = MappingProxyType(
    {
        ServiceKind.POSTGRES: ServerScripts(
            package="postgresql",
            programs=POSTGRES_PROGRAMS,
            install=POSTGRES_INSTALL,
            start=POSTGRES_START,
            create=POSTGRES_CREATE,
            setup=POSTGRES_SETUP,
            stop=POSTGRES_STOP,
            variables={
                "PGHOST": SOCKETS,
                "PGUSER": OWNER,
                "PGDATABASE": DATABASE,
                "DATABASE_URL": f"postgresql://{OWNER}@127.0.0.1:5432/{DATABASE}",
            },
        ),
        ServiceKind.REDIS: ServerScripts(
            package="redis-server",
            programs=REDIS_PROGRAMS,
            install=REDIS_INSTALL,
            start=REDIS_START,
            create="",
            setup=REDIS_SETUP,
            stop=REDIS_STOP,
            variables={"REDIS_URL": "redis://127.0.0.1:6379/0"},
        ),
    }
)


def variables(services: Sequence[Service]) -> dict[str, str]:
    """Variables by which a sandbox's commands find these services: ``PGHOST``, ``DATABASE_URL``, ``REDIS_URL`` …

    ``ValueError`` for two of a kind: they would use the same port.
    """
    kinds = [service.kind for service in services]
    twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    if twice:
        raise ValueError(f"an environment has {', '.join(twice)} more than once: give one service all of the setup")
    return {name: value for kind in kinds for name, value in SERVERS[kind].variables.items()}


def sandbox_spec(environment: EnvironmentSpec, image: Image | None = None) -> SandboxSpec:
    """The spec of an environment's sandbox, without its services. ``image`` is the image that ``environment.image``
    refers to.

    Raises :class:`~etude.errors.ConfigError` if the environment has an image and ``image`` is missing.
    """
    if environment.image and image is None:
        raise ConfigError(
            f"an environment is made from image {environment.image}, and no store of images was given: name one"
        )
    image = image or Image()
    return SandboxSpec(
        image=replace(
            image,
            workdir=environment.workdir,
            entrypoint=(*environment.entrypoint, *image.entrypoint),
            healthchecks=(*environment.healthchecks, *image.healthchecks),
        ),
        limits=environment.limits,
        allow=environment.allow,
        names=environment.names,
        environment=environment.variables,
    )


def template_digest(spec: SandboxSpec, services: Sequence[Service]) -> str:
    """SHA-256 of everything that distinguishes one template from another."""
    plain = orjson.dumps([spec, list(services)], default=str, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(plain).hexdigest()


class ServicedSandboxes:
    """Makes sandboxes with running services; specs without services go to the wrapped provider.

    Implements :class:`~etude.protocols.SandboxProvider`.
    """

    def __init__(self, provider: SandboxProvider, *, templates: int = 16, deadline_s: float = DEADLINE_S) -> None:
        """At most ``templates`` prepared states are kept; the least recently used is removed first.

        ``deadline_s`` applies to each step of a service. ``provider`` is closed with this object.
        """
        if templates < 1:
            raise ValueError(f"templates={templates}: at least the state that is being forked has to be kept")
        self._provider = provider
        self._capacity = templates
        self._deadline_s = deadline_s
        self._bare: dict[str, asyncio.Task[Image]] = {}  # one per image with services
        self._templates: OrderedDict[str, _ServiceTemplate] = OrderedDict()
        self._evicting: set[asyncio.Task[list[BaseException]]] = set()
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """The provider's capabilities."""
        return await self._provider.capabilities()

    async def create(
        self, files: Mapping[str, str], spec: SandboxSpec | None = None, services: Sequence[Service] = ()
    ) -> Sandbox:
        """A fresh sandbox that holds ``files`` and whose ``services`` answer.

        Raises :class:`~etude.errors.ConfigError` if a server is not installed in it,
        :class:`~etude.errors.SandboxError` with the end of the log if a server does not start or its setup fails,
        :class:`~etude.errors.Unsupported` if the provider cannot run services; also raises the provider's errors.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if not services:
            return await self._provider.create(files, spec)
        live = await self._check_provider()
        complete = spec or SandboxSpec()
        image = complete.image
        if image.user != ImageUser():
            raise ConfigError(
                f"services run as user {ImageUser().uid}, and the image has user {image.user.uid}: drop USER"
            )
        complete = replace(
            complete,
            image=replace(image, entrypoint=(), healthchecks=()),  # these may need the services
            environment={**complete.environment, **variables(services)},
        )
        sandbox = await self._fork(complete, tuple(services), live)
        try:
            if not live:
                await gather_or_cancel(self._run(sandbox, service.kind, "start") for service in services)
            for path, text in files.items():
                await sandbox.write_file(path, text)
        except BaseException:
            await close_all([sandbox])
            raise
        await started(sandbox, image)
        return sandbox

    async def close(self) -> None:
        """Drop the templates and close the provider; calling it twice is harmless."""
        self._closed = True
        bare = list(self._bare.values())
        for preparing in bare:
            preparing.cancel()
        await asyncio.gather(*bare, *self._evicting, return_exceptions=True)
        failures: list[BaseException] = []
        while self._templates:
            failures += await close_all([self._templates.popitem()[1]])
        await self._provider.close()
        if failures:
            raise failures[0]

    async def _check_provider(self) -> bool:
        """True if forks include processes. Raises ``Unsupported`` if the provider lacks another required capability."""
        granted = await self._provider.capabilities()
        name = type(self._provider).__name__
        for capability in (Capability.SNAPSHOT, Capability.FORK, Capability.BACKGROUND, Capability.NETWORK_OFF):
            if capability is not Capability.FORK or Capability.LIVE_FORK not in granted:
                check_capability(capability, granted, name, f"services, which take {capability}")
        return Capability.LIVE_FORK in granted

    async def _fork(self, spec: SandboxSpec, services: tuple[Service, ...], live: bool) -> Sandbox:
        """A copy of the template, or of a new one if the old one has ended (for example, its time to live)."""
        digest = template_digest(spec, services)
        for is_last in (False, True):
            template = self._templates.get(digest)
            is_new = template is None
            if template is None:
                template = _ServiceTemplate(asyncio.ensure_future(self._prepare(spec, services, live)))
                self._templates[digest] = template
            self._templates.move_to_end(digest)
            try:
                sandbox = await template.fork()
            except (SandboxError, ConfigError, ValueError):
                await self._drop(digest, template)
                if is_new or is_last or self._closed:
                    raise
            else:
                self._evict()
                return sandbox
        raise AssertionError("the last attempt neither returned nor raised")

    async def _drop(self, digest: str, template: "_ServiceTemplate") -> None:
        if self._templates.get(digest) is template:
            del self._templates[digest]
        await template.close()

    def _evict(self) -> None:
        """Begin to close the least recently used template, but never one in use."""
        idle = [digest for digest, template in self._templates.items() if not template.users]
        surplus = max(0, len(self._templates) - self._capacity)
        evicting = asyncio.ensure_future(close_all([self._templates.pop(digest) for digest in idle[:surplus]]))
        self._evicting.add(evicting)
        evicting.add_done_callback(self._evicting.discard)

    async def _prepare(self, spec: SandboxSpec, services: tuple[Service, ...], live: bool) -> Sandbox:
        """A sandbox after the setup, with stopped servers unless forks include running ones."""
        kinds = tuple(sorted(service.kind for service in services))
        bare = await self._bare_image(spec.image, kinds)
        try:
            sandbox = await self._provider.create({}, replace(spec, image=bare))
        except (SandboxError, ConfigError):  # its host may be full or lost: the next attempt makes it again
            self._forget_bare(bare)
            raise
        try:
            for service in services:
                await self._run(sandbox, service.kind, "start")
                if service.setup:
                    await self._run(sandbox, service.kind, "setup", service.setup)
                if not live:
                    await self._run(sandbox, service.kind, "stop")
        except BaseException:
            await close_all([sandbox])
            raise
        return sandbox

    async def _bare_image(self, image: Image, kinds: tuple[ServiceKind, ...]) -> Image:
        """``image`` with an empty state for each kind; made once for all callers."""
        key = template_digest(SandboxSpec(image=image), [Service(kind=kind) for kind in kinds])
        making = self._bare.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._bare[key] = asyncio.ensure_future(self._install(image, kinds))
        await asyncio.wait({making})  # it continues for the others when this caller gives up
        if making.cancelled():
            raise SandboxError("the sandbox provider is closed")
        return making.result()

    def _forget_bare(self, bare: Image) -> None:
        for key, making in list(self._bare.items()):
            if making.done() and not making.cancelled() and not making.exception() and making.result() is bare:
                del self._bare[key]

    async def _install(self, image: Image, kinds: tuple[ServiceKind, ...]) -> Image:
        sandbox = await self._provider.create({}, SandboxSpec(image=image))
        try:
            for kind in kinds:
                await self._run(sandbox, kind, "install")
                await self._run(sandbox, kind, "start")
                await self._run(sandbox, kind, "create")
                await self._run(sandbox, kind, "stop")
            made = await sandbox.snapshot()
            return replace(made, environment=image.environment, workdir=image.workdir)
        finally:
            await sandbox.close()

    async def _run(self, sandbox: Sandbox, kind: ServiceKind, step: Step, stdin: str = "") -> None:
        """One step of one service. Raises :class:`~etude.errors.SandboxError` with the step's error."""
        server = SERVERS[kind]
        script = f"{server.programs}\n{getattr(server, step)}\n"
        result = await sandbox.exec(["sh", "-c", script], stdin=stdin, timeout_s=self._deadline_s)
        if result.exit_code == NOT_INSTALLED:
            raise ConfigError(
                f"an environment has a {kind} service, but its base system has no such server: apt-get install "
                f"{server.package}, or name an image that has it"
            )
        if result.timed_out:
            log = await sandbox.exec(["tail", "-n", str(LOG_LINES), f"{HOME}/{kind}.log"])
            raise SandboxError(f"{kind}: {step} took more than {self._deadline_s:g} s; its log ends: {log.stdout}")
        if result.exit_code != 0:
            reason = (result.stderr or result.stdout).strip()[-2000:]
            raise SandboxError(f"{kind}: {step} failed with exit code {result.exit_code}: {reason}")


class _ServiceTemplate:
    """One prepared sandbox and the copies in progress: one at a time, and none while it is being closed."""

    def __init__(self, preparing: "asyncio.Task[Sandbox]") -> None:
        self._preparing = preparing
        self._copying = asyncio.Lock()
        self.users = 0
        """Number of callers that wait for a copy."""

    async def fork(self) -> Sandbox:
        """A copy, once the template is ready; cancellation of one caller does not affect the others."""
        self.users += 1
        try:
            await asyncio.wait({self._preparing})
            if self._preparing.cancelled():
                raise SandboxError("the sandbox provider is closed")
            sandbox = self._preparing.result()
            async with self._copying:
                return (await sandbox.fork())[0]
        finally:
            self.users -= 1

    async def close(self) -> None:
        """Close the sandbox, after the copy in progress."""
        self._preparing.cancel()
        await asyncio.wait({self._preparing})
        if not self._preparing.cancelled() and self._preparing.exception() is None:
            async with self._copying:
                await self._preparing.result().close()
