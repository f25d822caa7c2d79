"""`etude eval`: measure one published weight version of a run on the held-out tasks.

It is served from a scratch run folder with its own ledger; the run itself is only read.
"""

import asyncio
from dataclasses import asdict

from etude.run.folder import RunFolder
from etude.run.rollouts import open_parts
from etude.run.scratch import ServedRun, serving_version
from etude.telemetry.events import EvalDone
from etude.types import Json

POLL_S = 0.2
"""How often engine and gateway are looked after."""


def evaluate_version(folder: RunFolder, *, version: int | None, tasks: int | None) -> dict[str, Json]:
    """The held-out pass rates of a version (default: the newest) on ``tasks`` tasks (default: the recipe's number)."""
    with serving_version(folder, version) as served:
        done = asyncio.run(_evaluate(served, tasks or folder.config().eval.tasks))
    figures: dict[str, Json] = asdict(done)
    return figures | {"digest": served.digest}


async def _evaluate(served: ServedRun, tasks: int) -> EvalDone:
    """Measure while looking after engine and gateway; raises when one of them cannot be kept alive."""
    measuring = asyncio.create_task(_measure(served, tasks))
    try:
        while not measuring.done():
            for child in served.children:
                child.check()
            await asyncio.wait({measuring}, timeout=POLL_S)
        return measuring.result()
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def _measure(served: ServedRun, tasks: int) -> EvalDone:
    async with open_parts(served.folder) as parts:
        await parts.served.reach(served.version)
        return await parts.evaluate("eval", parts.heldout_tasks(tasks), version=served.version)
