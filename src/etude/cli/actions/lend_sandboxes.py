"""The server of `etude sandboxes serve`, which lends sandboxes of this machine, and how such a server is drained."""

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.aio import background_task
from etude.cli.console import log
from etude.config.tasks import SandboxConfig
from etude.errors import SandboxError
from etude.run.harness_host import RunGateways, serve_run
from etude.run.process_name import ProcessName
from etude.run.sandbox_hosts import announced
from etude.run.serving import SHUTDOWN_S, STOP_S, listening, run_until_signal
from etude.run.task_sandboxes import opened_provider, pool_limits
from etude.run.working_folder import open_run_folder
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.providers import KEY_VARIABLE, sandboxes_key
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.principals import Quota, SandboxClient, parse_client, read_clients, usual_quota
from etude.sandboxes.remote.server import SandboxServer, ServerLimits
from etude.sandboxes.warm_pool import GAUGE

DRAIN_LOOK_S = 2.0
"""Seconds between two requests to a server that is being drained."""
DRAIN_TIMEOUT_S = 10.0
"""Deadline of such a request."""
LEAVE_S = STOP_S - 2 * SHUTDOWN_S
"""Longest time that open sandboxes have to end when the server is stopped: what a process of a run has, less the time
to close them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLending:
    """Options of `etude sandboxes serve`."""

    sandboxes: SandboxConfig
    host: str
    port: int
    clients: Path | None
    """File with many clients; ``None``: there is one, with these ``rights``."""
    rights: Mapping[str, object]
    run: str | None
    """Run whose gateways the only client's sandboxes may reach."""
    announced_in: str
    """Store in which a fleet finds the server under ``name``; empty: none."""
    name: ProcessName


def lend(lending: SandboxLending) -> None:
    """Serve sandboxes until stopped or drained. Raises :class:`~etude.errors.ConfigError`."""
    usual = usual_quota(GAUGE.read().available_bytes)
    if lending.clients is not None:
        clients = read_clients(lending.clients, ImageStore().open, usual)
    else:
        clients = {"client": _only_client(lending.rights, usual)}
    gateways = None
    if lending.run is not None:
        clients["client"], gateways = serve_run(open_run_folder(lending.run, writes=False), clients["client"])
    run_until_signal(_serve(lending, clients, gateways), cleanup_s=None)


def _only_client(rights: Mapping[str, object], usual: Quota) -> SandboxClient:
    """The client with the key of the environment, or with one that is made here; it may drain the server."""
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    tree = {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "operator": True, **rights}
    client = parse_client("etude sandboxes serve", tree, ImageStore().open, usual)
    if not os.environ.get(KEY_VARIABLE):
        log(f"{KEY_VARIABLE}={key}  (made for this server; set it to have your own)")
    return client


async def _serve(lending: SandboxLending, clients: Mapping[str, SandboxClient], gateways: RunGateways | None) -> None:
    """Serve until stopped or drained, and announce the port meanwhile."""
    entry: Callable[[int], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    if lending.announced_in:
        entry = partial(announced, lending.announced_in, lending.name)
    gateway_task = contextlib.nullcontext() if gateways is None else background_task(gateways.follow())
    async with gateway_task, opened_provider(lending.sandboxes) as provider:
        most = pool_limits(lending.sandboxes).ordinary if lending.sandboxes.pool_size else None
        server = SandboxServer(provider, clients, limits=ServerLimits(sandboxes=most))
        async with listening(server.app(), lending.port, host=lending.host) as bound, entry(bound):
            log(f"lending {lending.sandboxes.kind} sandboxes at http://{lending.host}:{bound}")
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


def drain_server(url: str) -> None:
    """Let a server make no new sandboxes, and wait until it has ended after its last one."""
    asyncio.run(_drain(RemoteSandboxes(url, sandboxes_key())))


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
