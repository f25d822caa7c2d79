"""Measured times of this machine that the model of hosts is made of: starts, and what a request costs a client.

Owns the measuring. Starts are those of ``ns`` where this machine has it; a request is a sandbox made over HTTP on the
loopback by a server whose sandboxes take no time. Client and server are one process there, so the time of a request is
an upper bound of what it costs a client.
"""

import asyncio
import hashlib
import os
import time
from pathlib import Path

from bench.sandbox.contestants import ProviderContestant, ns_provider
from bench.sandbox.measures import TRUE
from etude.rollouts.fake import FakeSandboxes
from etude.run.serving import listening
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.principals import Quota, SandboxClient, limits_of_many
from etude.sandboxes.remote.server import SandboxServer

KEY = "the key of a bench"
WARM_UP = 2
"""Starts that are not counted."""


async def measure_starts(folder: Path, seconds: float) -> tuple[float, ...]:
    """Durations of starts with their first command, as many at a time as this machine has cores, for so long.

    Raises :class:`~etude.errors.EtudeError` where ``ns`` cannot run here.
    """
    provider = ns_provider(folder)
    contestant = ProviderContestant("ns", provider)
    try:
        for _ in range(WARM_UP):
            await contestant.launch(TRUE)
        launches = await contestant.launch(TRUE, seconds=seconds, at_once=os.cpu_count() or 1)
    finally:
        await provider.close()
    return tuple(launch.ran_s for launch in launches)


async def measure_request(count: int) -> float:
    """Seconds per sandbox if many are requested at once over HTTP."""
    most = limits_of_many(count)
    client = SandboxClient(
        digest=hashlib.sha256(KEY.encode()).hexdigest(), quota=Quota(sandboxes=count, each=most, total=most)
    )
    server = SandboxServer(FakeSandboxes(), {"bench": client})
    async with listening(server.app(), 0, shutdown_s=0.1) as port:
        provider = RemoteSandboxes(f"http://127.0.0.1:{port}", KEY, connections=64)
        try:
            await provider.create({})
            began_s = time.perf_counter()
            await asyncio.gather(*(provider.create({}) for _ in range(count - 1)))
            return (time.perf_counter() - began_s) / (count - 1)
        finally:
            await provider.close()
