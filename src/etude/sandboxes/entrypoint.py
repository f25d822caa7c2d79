"""Programs that an image starts in a fresh sandbox: its services, its entry point, and its health checks.

    services                       ──▶  each in its own root, as its own user, until it is healthy
    ENTRYPOINT ["/entry.sh"]     ──▶  /entry.sh sh -c '…sleeps for ever…'     as Harbor starts its containers
    HEALTHCHECK CMD redis-cli ping ─▶ until it succeeds, or has failed too often

Every provider calls :func:`started` for each sandbox that it creates, including forks without processes, so an image
behaves the same with all providers. An entry point that runs its arguments is ready when they run; one that does not is
itself the server, and must not exit.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from etude.errors import SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.sandbox_spec import Healthcheck, Image, ImageService
from etude.sandboxes.lifecycle import close_all

START_TIMEOUT_S = 300.0
"""Timeout for an entry point to run its arguments."""
SETTLED_S = 2
"""An entry point that lives this long without running its arguments is a server."""
POLL_S = 0.5
"""Maximum wait between two health checks, although the image may specify a longer one."""
START = """
set -u
log=$(mktemp -d /tmp/entrypoint.XXXXXX) || exit 1
{{ "$@" {arguments} >"$log/log" 2>&1 </dev/null; echo $? >"$log/code"; }} >/dev/null 2>&1 </dev/null &
polls={polls}
while [ ! -e "$log/up" ] && [ $polls -gt 0 ]; do
    [ ! -e "$log/code" ] || {{ tail -n 20 "$log/log"; exit 1; }}
    sleep 0.1
    polls=$((polls - 1))
done
"""
"""Runs its arguments in the background, followed by ``arguments``; fails with the log if they exit at once."""
START_ENTRYPOINT = START.format(
    arguments="""sh -c ': >"$0"; while :; do sleep 3600; done' "$log/up\"""", polls=SETTLED_S * 10
)
START_SERVICE = 'cd "$0" || exit 1' + START.format(arguments="", polls=2)
SERVICE_LOG = "tail -n 20 /tmp/entrypoint.*/log"

Run: TypeAlias = Callable[..., Awaitable[ExecResult]]
"""Runs ``argv`` within ``timeout_s``."""


class ServiceHost(Sandbox, Protocol):
    """A sandbox whose provider can run an image's services."""

    async def exec_in(self, service: ImageService, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run one of étude's commands in a service's root, as its user, with only its variables."""
        ...


async def services_started(sandbox: ServiceHost, image: Image) -> None:
    """Start an image's services, each once the earlier ones are healthy; close the sandbox on failure.

    Raises :class:`~etude.errors.SandboxError` with the end of the log of the service that does not start.
    """
    try:
        for service in image.services:
            run = partial(sandbox.exec_in, service)
            start = ["/bin/sh", "-c", START_SERVICE, service.workdir, *service.argv]
            done = await run(start, timeout_s=START_TIMEOUT_S)
            if done.exit_code != 0:
                raise SandboxError(f"service {service.name} ended: {(done.stdout + done.stderr)[-2000:]}")
            for check in service.healthchecks:
                try:
                    await _wait_until_healthy(run, check)
                except SandboxError as error:
                    log = await run(["/bin/sh", "-c", SERVICE_LOG], timeout_s=START_TIMEOUT_S)
                    raise SandboxError(f"service {service.name}: {error}\n{log.stdout[-2000:]}") from error
    except BaseException:
        await close_all([sandbox])
        raise


async def started(sandbox: Sandbox, image: Image) -> None:
    """Start the image's programs, and wait until they are ready; close the sandbox on failure.

    Raises :class:`~etude.errors.SandboxError` with the end of the log, or the last answer of the health check.
    """
    try:
        if image.entrypoint:
            argv = ["sh", "-c", START_ENTRYPOINT, "entrypoint", *image.entrypoint]
            done = await sandbox.exec(argv, timeout_s=START_TIMEOUT_S)
            if done.exit_code != 0:
                raise SandboxError(f"ENTRYPOINT {list(image.entrypoint)} ended: {(done.stdout + done.stderr)[-2000:]}")
        for check in image.healthchecks:
            await _wait_until_healthy(sandbox.exec, check)
    except BaseException:
        await close_all([sandbox])
        raise


async def _wait_until_healthy(run: Run, check: Healthcheck) -> None:
    """Retry the check until it succeeds, or fail ``retries`` × ``interval_s`` after the start period."""
    end_s = time.monotonic() + check.start_period_s + check.retries * check.interval_s
    while True:
        done = await run(check.argv, timeout_s=check.timeout_s)
        if done.exit_code == 0 and not done.timed_out:
            return
        if time.monotonic() >= end_s:
            text = (done.stdout + done.stderr).strip()[-1000:]
            raise SandboxError(f"HEALTHCHECK {list(check.argv)} still fails, {check.retries} times: {text}")
        await asyncio.sleep(min(check.interval_s, POLL_S))
