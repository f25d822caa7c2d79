"""The entry point of an image: started in a fresh sandbox, as the user of its commands, and waited for.

    ENTRYPOINT ["/entry.sh"]     ──▶  /entry.sh sh -c '…sleeps for ever…'     as Harbor starts its containers
    HEALTHCHECK CMD redis-cli ping ─▶ until it succeeds, or has failed too often

Every provider calls :func:`started` for what it makes, so an image means the same in all of them. An entry point that
runs its arguments is done when they run; one that does not is itself the server, and has to live.
"""

import asyncio
import time

from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.sandbox_spec import Healthcheck, Image
from etude.sandboxes.lifecycle import close_all

START_TIMEOUT_S = 300.0
"""For an entry point to come to its arguments."""
SETTLED_S = 2
"""An entry point that lives so long, and has not run its arguments, is a server."""
POLL_S = 0.5
"""Longest wait between two tries of a health check: it may be asked for sooner than an image says, never later."""
START = f"""
set -u
log=$(mktemp -d /tmp/entrypoint.XXXXXX) || exit 1
{{ "$@" sh -c ': >"$0"; while :; do sleep 3600; done' "$log/up" >"$log/log" 2>&1 </dev/null; echo $? >"$log/code"; }} \\
    >/dev/null 2>&1 </dev/null &
polls={SETTLED_S * 10}
while [ ! -e "$log/up" ] && [ $polls -gt 0 ]; do
    [ ! -e "$log/code" ] || {{ tail -n 20 "$log/log"; exit 1; }}
    sleep 0.1
    polls=$((polls - 1))
done
"""
"""Runs its arguments as an entry point; fails with its log if it ends."""


async def started(sandbox: Sandbox, image: Image) -> None:
    """Start what an image has to be started, and wait until it is ready; closes the sandbox if that fails.

    Raises :class:`~etude.errors.SandboxError` with the end of the log, or the last answer of the health check.
    """
    try:
        if image.entrypoint:
            argv = ["sh", "-c", START, "entrypoint", *image.entrypoint]
            done = await sandbox.exec(argv, timeout_s=START_TIMEOUT_S)
            if done.exit_code != 0:
                raise SandboxError(f"ENTRYPOINT {list(image.entrypoint)} ended: {(done.stdout + done.stderr)[-2000:]}")
        for check in image.healthchecks:
            await _wait_until_healthy(sandbox, check)
    except BaseException:
        await close_all([sandbox])
        raise


async def _wait_until_healthy(sandbox: Sandbox, check: Healthcheck) -> None:
    """Try until it succeeds; ``retries`` times ``interval_s`` after the start period it has failed."""
    end_s = time.monotonic() + check.start_period_s + check.retries * check.interval_s
    while True:
        done = await sandbox.exec(check.argv, timeout_s=check.timeout_s)
        if done.exit_code == 0 and not done.timed_out:
            return
        if time.monotonic() >= end_s:
            text = (done.stdout + done.stderr).strip()[-1000:]
            raise SandboxError(f"HEALTHCHECK {list(check.argv)} still fails, {check.retries} times: {text}")
        await asyncio.sleep(min(check.interval_s, POLL_S))
