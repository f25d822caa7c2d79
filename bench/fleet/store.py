"""The S3 store of one region, and what was fetched from it, by whom.

    python -m bench.fleet.store ADDRESS BUCKET COUNTS

``COUNTS`` is a file that is written anew every second: bytes sent, by address of the client and folders of the key
below the run. The server is :mod:`bench.sync.bucket`'s, which keeps objects in memory; rclone's ``serve s3`` keeps them
on a disk, but ignores ``If-None-Match`` and so cannot hold a log.
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
"""Folders of a key that are told apart."""
RUN_FOLDERS = 3
"""Parts of a request's path before the folder of the run: the empty one, the bucket and the name of the run."""


class Sent:
    """Bytes that a store has sent and taken."""

    def __init__(self) -> None:
        self.sent = Counter[str]()
        self.taken = Counter[str]()

    def seen(self, request: web.Request, reply: web.Response) -> None:
        """Count one request."""
        parts = request.rel_url.path.split("/")
        folder = "/".join(parts[RUN_FOLDERS:-1][:FOLDERS])
        body = reply.body
        if request.method == "GET":
            self.sent[f"{request.remote} {folder}"] += len(body) if isinstance(body, bytes) else 0
        elif request.method == "PUT":
            self.taken[folder] += request.content_length or 0

    async def keep(self, file: Path) -> None:
        """Write what was counted, for ever."""
        while True:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps({"sent": self.sent, "taken": self.taken}), encoding="utf-8")
            partial.replace(file)
            await asyncio.sleep(WRITE_S)


def _tell_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def serve(address: str, bucket: str, file: Path) -> None:
    """Serve until killed; prints a line when it can be used."""
    sent = Sent()
    async with background_task(sent.keep(file)):
        await serve_bucket(address, PORT, bucket, _tell_ready, sent.seen)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
