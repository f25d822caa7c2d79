"""The server of `etude tinker`: serves a model over the Tinker API, and prints what its clients need."""

import asyncio
import os

from etude.cli.commands.tinker import KEY_VARIABLE
from etude.run.serving import listening
from etude.tinker.server import tinker_app
from etude.tinker.service import TinkerService


async def serve(service: TinkerService, key: str, host: str, port: int) -> None:
    """Serve until cancelled; prints the URL, and a key that was made here, as variables of the environment."""
    try:
        async with listening(tinker_app(service, key), port, host=host) as bound, asyncio.TaskGroup() as tasks:
            tasks.create_task(service.jobs.run())
            if KEY_VARIABLE not in os.environ:
                print(f"export {KEY_VARIABLE}={key}", flush=True)
            print(f"export TINKER_BASE_URL=http://{host}:{bound}", flush=True)
    finally:
        service.close()
