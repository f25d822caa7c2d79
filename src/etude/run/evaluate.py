"""`etude eval`: measure one published weight version of a run on the held-out tasks.

Everything happens in a scratch run folder with its own engine, gateway and ledger, in which the version under test is
number 0. The run itself is only read.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from etude.run.folder import RunFolder
from etude.run.publishing import open_log
from etude.run.rollouts import open_parts
from etude.run.supervision import Child, stop_all
from etude.telemetry.events import EvalDone
from etude.telemetry.log import EventLog
from etude.types import Json
from etude.weights.publish import Publisher
from etude.weights.pull import pull

POLL_S = 0.2
"""How often engine and gateway are looked after."""


def evaluate_version(folder: RunFolder, *, version: int | None, tasks: int | None) -> dict[str, Json]:
    """The held-out pass rates of a version (default: the newest) on ``tasks`` tasks (default: the recipe's number)."""
    pulled = pull(open_log(folder), version)
    config = folder.config()
    with tempfile.TemporaryDirectory(prefix="etude-eval-") as scratch:
        bench = RunFolder.create(Path(scratch) / "run", config)
        shutil.copytree(folder.model, bench.model)
        with Publisher(open_log(bench)) as publisher:
            publisher.publish(pulled.state, version=0, step=0).result()
        bench.endpoints.reserve(config)
        with EventLog(bench.events, "supervisor") as events:
            children: list[Child] = []
            try:
                children.extend(Child(name, bench, events) for name in ("serve", "gateway"))
                done = asyncio.run(_evaluate(bench, tasks or config.eval.tasks, children))
            finally:
                stop_all(children)
    figures: dict[str, Json] = asdict(done)
    return figures | {"version": pulled.version, "digest": pulled.digest}


async def _evaluate(folder: RunFolder, tasks: int, children: Sequence[Child]) -> EvalDone:
    """Measure while looking after engine and gateway; raises when one of them cannot be kept alive."""
    measuring = asyncio.create_task(_measure(folder, tasks))
    try:
        while not measuring.done():
            for child in children:
                child.check()
            await asyncio.wait({measuring}, timeout=POLL_S)
        return measuring.result()
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def _measure(folder: RunFolder, tasks: int) -> EvalDone:
    async with open_parts(folder) as parts:
        await parts.served.reach(0)
        return await parts.evaluate("eval", parts.heldout_tasks(tasks), version=0)
