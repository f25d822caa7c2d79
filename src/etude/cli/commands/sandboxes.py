"""`etude sandboxes`: serves this machine's sandboxes over HTTP, drains such a server, or describes a sandbox."""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from etude.aio import background_task
from etude.cli.options import group, process_name
from etude.config.tasks import LentKind, MachineKind, SandboxConfig
from etude.dashboard.formatting import visible
from etude.errors import ConfigError, ExitCode, SandboxError
from etude.protocols import SandboxProvider
from etude.run.harness_host import RunGateways, serve_run
from etude.run.process_name import SANDBOXES
from etude.run.sandbox_hosts import announced
from etude.run.serving import SHUTDOWN_S, STOP_S, listening, run_until_signal
from etude.run.task_sandboxes import base_store, open_provider, pool_limits
from etude.run.working_folder import open_run_folder
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.providers import KEY_VARIABLE, sandboxes_key
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.principals import Quota, SandboxClient, parse_client, read_clients, usual_quota
from etude.sandboxes.remote.server import SandboxServer, ServerLimits
from etude.sandboxes.warm_pool import GAUGE
from etude.taskgen.fidelity.probes import diff, probe, render_diff

OUT, PROGRESS = Console(), Console(stderr=True)
"""Stdout for results, stderr for the log."""
DRAIN_LOOK_S = 2.0
"""Seconds between two requests to a server that is being drained."""
DRAIN_TIMEOUT_S = 10.0
"""Deadline of such a request."""
LEAVE_S = STOP_S - 2 * SHUTDOWN_S
"""Longest time that open sandboxes have to end when the server is stopped: what a process of a run has, less the time
to close them.
"""
SandboxUrl: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="A remote server of sandboxes.")]

app = group()


@app.command()
def serve(
    *,
    kind: Annotated[LentKind, typer.Option(help="Kind of sandbox.")] = "ns",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
    folder: Annotated[
        list[Path],
        typer.Option(
            default_factory=list, show_default=False, help="Folder whose files clients may mount; may be repeated."
        ),
    ],
    allow: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT", default_factory=list, show_default=False, help="Place that sandboxes may reach."
        ),
    ],
    clients: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with keys of many clients, their rights and limits.")
    ] = None,
    sandboxes: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most sandboxes for the only key; 0: one per 64 MiB of memory.")
    ] = 0,
    pool: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most sandboxes in a warm pool, those in use included; 0: no pool.")
    ] = 0,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run on a fleet whose external harness may reach its gateways from here."),
    ] = None,
    announce: Annotated[
        str,
        typer.Option(metavar="STORE", help="Store of a fleet's region, where a run finds the address of this host."),
    ] = "",
    replica: Annotated[
        int, typer.Option(metavar="N", min=0, max=999_999, help="With --announce: number of the host in its region.")
    ] = 0,
    region: Annotated[str, typer.Option(help="With --announce: region of the fleet (default: home).")] = "",
) -> None:
    """Serve sandboxes over HTTP until stopped or drained; clients set sandboxes.kind = 'remote'.

    Without a key in ETUDE_SANDBOXES_KEY, one is made and shown. When stopped, open sandboxes get a few seconds to end.
    """
    usual = usual_quota(GAUGE.read().available_bytes)
    if clients is not None and (folder or allow or sandboxes or run is not None):
        raise ConfigError(
            "--clients FILE sets the rights of each client: write folders, allow and sandboxes into it, or leave it "
            "out; --run is for a server with one key"
        )
    if clients is not None:
        sessions = read_clients(clients, ImageStore().open, usual)
    else:
        named = {"folders": folder, "allow": allow, **({"sandboxes": sandboxes} if sandboxes else {})}
        sessions = {"client": _only_client(named, usual)}
    gateways = None
    if run is not None:
        sessions["client"], gateways = serve_run(open_run_folder(run, writes=False), sessions["client"])
    if (replica or region) and not announce:
        raise ConfigError("--replica and --region would have no effect without --announce: they name a fleet's host")
    entry: Callable[[int], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    if announce:
        entry = partial(announced, announce, process_name(SANDBOXES.command, replica, region))
    serving = _serve(SandboxConfig(kind=kind, pool_size=pool), host, port, sessions, gateways, entry)
    run_until_signal(serving, cleanup_s=None)


@app.command()
def drain(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server of sandboxes, such as http://host:8700.")],
) -> None:
    """Let a server make no new sandboxes and end after its last one; wait for that.

    The key in ETUDE_SANDBOXES_KEY must be the server's only one, or an operator's (--clients FILE).
    """
    asyncio.run(_drain(RemoteSandboxes(url, sandboxes_key())))


@app.command("probe")
def probe_command(
    *,
    sandbox: Annotated[MachineKind, typer.Option(help="Kind of sandbox; remote is the product's machines.")] = "ns",
    sandbox_url: SandboxUrl = "",
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of this command on another machine.")
    ] = None,
) -> int:
    """Print a description of a sandbox (versions, limits, tools), or its differences from another one."""
    answers = asyncio.run(_probe(sandbox_config(sandbox, sandbox_url)))
    if against is None:
        OUT.out(json.dumps(answers, indent=1))
        return 0
    differences = diff(_read_answers(against), answers)
    OUT.out(render_diff(differences), highlight=False)
    return ExitCode.USER_ERROR if differences else 0


def sandbox_config(kind: str, url: str) -> SandboxConfig:
    """The sandboxes that a command was told to use. Raises :class:`~etude.errors.ConfigError`."""
    if (kind == "remote") != bool(url):
        raise ConfigError("--sandbox remote and --sandbox-url go together")
    try:
        return SandboxConfig.model_validate({"kind": kind, **({"options": {"url": url}} if url else {})})
    except ValueError as error:
        raise ConfigError(f"--sandbox-url {url}: expected http://… or https://…") from error


@contextlib.asynccontextmanager
async def opened_provider(sandboxes: SandboxConfig) -> AsyncIterator[SandboxProvider]:
    """The provider of sandboxes, closed afterwards."""
    provider = open_provider(sandboxes, base_store(sandboxes))
    try:
        yield provider
    finally:
        await provider.close()


def log(line: str) -> None:
    """Print a line of the log to stderr."""
    PROGRESS.out(visible(line), highlight=False)


async def _probe(sandboxes: SandboxConfig) -> dict[str, str]:
    async with opened_provider(sandboxes) as provider:
        sandbox = await provider.create({})
        try:
            return await probe(sandbox)
        finally:
            await sandbox.close()


def _read_answers(file: Path) -> dict[str, str]:
    """The recorded answers of a sandbox. Raises :class:`~etude.errors.ConfigError` for a file of something else."""
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: {error}") from error
    if not isinstance(answers, dict) or not all(isinstance(answer, str) for answer in answers.values()):
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: expected an object of strings")
    return answers


async def _serve(
    sandboxes: SandboxConfig,
    host: str,
    port: int,
    clients: dict[str, SandboxClient],
    gateways: RunGateways | None,
    entry: Callable[[int], AbstractAsyncContextManager[object]],
) -> None:
    """Serve until stopped or drained; ``entry`` announces the port meanwhile."""
    following = contextlib.nullcontext() if gateways is None else background_task(gateways.follow())
    async with following, opened_provider(sandboxes) as provider:
        most = pool_limits(sandboxes).ordinary if sandboxes.pool_size else None
        server = SandboxServer(provider, clients, limits=ServerLimits(sandboxes=most))
        async with listening(server.app(), port, host=host) as bound, entry(bound):
            log(f"lending {sandboxes.kind} sandboxes at http://{host}:{bound}")
            await _until_drained(server)


async def _until_drained(server: SandboxServer) -> None:
    """Wait until a server is drained; if cancelled, drain it, for a few seconds at most, so that last calls succeed."""
    try:
        await server.drained()
    except asyncio.CancelledError:
        server.draining.set()
        log(f"stopping: {len(server)} sandboxes are open, for {LEAVE_S:g} s at most")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await server.drained()
        raise
    log("drained: the last sandbox is gone")


async def _drain(server: RemoteSandboxes) -> None:
    try:
        open_now = (await server.drain()).sandboxes
        while True:
            log(f"{open_now} sandboxes are open")
            await asyncio.sleep(DRAIN_LOOK_S)
            try:
                open_now = (await server.report(DRAIN_TIMEOUT_S)).sandboxes
            except SandboxError:
                log("drained: the server has ended")
                return
    finally:
        await server.close()


def _only_client(named: dict[str, object], usual: Quota) -> SandboxClient:
    """The client with the key of the environment, or with one that is made here; it may drain the server."""
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    tree = {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "operator": True, **named}
    client = parse_client("etude sandboxes serve", tree, ImageStore().open, usual)
    if not os.environ.get(KEY_VARIABLE):
        log(f"{KEY_VARIABLE}={key}  (made for this server; set it to have your own)")
    return client
