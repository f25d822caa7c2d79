"""The S3 store of one region, which counts the bytes that each client fetches.

    python -m bench.fleet.store ADDRESS BUCKET COUNTS

``COUNTS`` is a file that is rewritten every second: bytes sent, by address of the client and folders of the key below
the run. The server is :mod:`bench.sync.bucket`'s, which keeps objects in memory; rclone's ``serve s3`` keeps them on a
disk, but ignores ``If-None-Match`` and so cannot hold a log.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from aiohttp import web

from bench.sync.bucket import serve_bucket
from etude.aio import background_task

PORT = 9000
WRITE_S = 1.0
FOLDERS = 2
"""Leading folders of a key by which bytes are counted."""
RUN_FOLDERS = 3
"""Parts of a request's path before the folder of the run: the empty one, the bucket and the name of the run."""


class TrafficCounter:
    """Counts the bytes that a store has sent and received."""

    def __init__(self) -> None:
        self.sent = Counter[str]()
        self.taken = Counter[str]()

    def count(self, request: web.Request, reply: web.Response) -> None:
        """Count one request."""
        parts = request.rel_url.path.split("/")
        folder = "/".join(parts[RUN_FOLDERS:-1][:FOLDERS])
        body = reply.body
        if request.method == "GET":
            self.sent[f"{request.remote} {folder}"] += len(body) if isinstance(body, bytes) else 0
        elif request.method == "PUT":
            self.taken[folder] += request.content_length or 0

    async def write(self, file: Path) -> None:
        """Write the counts to a file every ``WRITE_S``, until cancelled."""
        while True:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps({"sent": self.sent, "taken": self.taken}), encoding="utf-8")
            partial.replace(file)
            await asyncio.sleep(WRITE_S)


def _print_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def serve(address: str, bucket: str, file: Path) -> None:
    """Serve until killed; prints a line once it is ready."""
    traffic = TrafficCounter()
    async with background_task(traffic.write(file)):
        await serve_bucket(address, PORT, bucket, _print_ready, traffic.count)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
