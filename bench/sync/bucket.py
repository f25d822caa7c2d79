"""A bucket that speaks S3 over connections that stay open, for measurements over long distances.

    GET of an object, LIST ──▶ moto's table of objects, read at once
    all else ────────────────▶ moto's S3

moto keeps the objects and answers whatever changes them; aiohttp serves it. The server that comes with moto closes
every connection after one request, which no cloud does and which costs each request one more round trip and a new slow
start. It also takes two milliseconds of a core for a read and eight for a list of forty keys, which the processes of a
run do all the time: a store must not take the cores of those that are measured.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

LARGEST_OBJECT_BYTES = 1 << 30
PAGE_KEYS = 1000
"""Most entries of one answer to a list, as S3's."""
NOT_PLAIN = ("Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since")
"""Headers that make a GET more than a read of the whole object."""


def nothing(request: web.Request, reply: web.Response) -> None:
    """Take no note of a request."""


async def serve_bucket(
    address: str,
    port: int,
    bucket: str,
    ready: Callable[[], None],
    seen: Callable[[web.Request, web.Response], None] = nothing,
) -> None:
    """Serve one empty bucket in memory until cancelled; ``ready`` is called when it can be used, ``seen`` with each
    request and its answer.
    """
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.test import Client

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = create_backend_app("s3")
    thread = ThreadPoolExecutor(1, "moto")  # one: moto's objects are not safe between several
    in_moto = Counter[str]()
    """Path → requests that moto is at."""

    def ask(method: str, path: str, query: str, headers: list[tuple[str, str]], body: bytes) -> web.Response:
        client = Client(moto, use_cookies=False)
        reply = client.open(path, f"http://{address}:{port}", query, method=method, headers=headers, data=body)
        return web.Response(status=reply.status_code, headers=list(reply.headers.items()), body=reply.data)

    ask("PUT", f"/{bucket}", "", [], b"")
    objects = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys

    async def answer(request: web.Request) -> web.Response:
        url = request.rel_url
        reply = None if in_moto[url.path] else read(request, bucket, objects)
        if reply is None:
            body = await request.read()
            headers = [(name, value) for name, value in request.headers.items() if name.lower() != "host"]
            in_moto[url.path] += 1
            try:
                reply = await asyncio.get_running_loop().run_in_executor(
                    thread, ask, request.method, url.path, url.raw_query_string, headers, body
                )
            finally:
                in_moto[url.path] -= 1
        seen(request, reply)
        return reply

    application = web.Application(client_max_size=LARGEST_OBJECT_BYTES)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        ready()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def read(request: web.Request, bucket: str, objects: dict[str, Any]) -> web.Response | None:
    """The answer to a plain GET of an existing object, or to a list; ``None`` for requests that moto answers.

    ``objects`` are moto's by key.
    """
    if request.method != "GET" or any(name in request.headers for name in NOT_PLAIN):
        return None
    _, _, key = request.rel_url.path.lstrip("/").partition("/")
    if not key and request.query.get("list-type") == "2":
        return web.Response(text=list_page(bucket, objects, request.query), content_type="application/xml")
    stored = None if request.query_string else objects.get(key)
    if stored is None:
        return None
    headers = {"ETag": stored.etag, "Last-Modified": stored.last_modified_RFC1123}
    return web.Response(body=stored.value, headers=headers)


def list_page(bucket: str, objects: dict[str, Any], query: Mapping[str, str]) -> str:
    """One page of ``ListObjectsV2``, as S3 writes it."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    most = min(int(query.get("max-keys", PAGE_KEYS)), PAGE_KEYS)
    entries = entries_after(sorted(key for key in objects.copy() if key.startswith(prefix)), prefix, delimiter, after)
    page = list(islice(entries, most))
    is_truncated = next(entries, None) is not None
    parts = ['<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">']
    parts.append(f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>")
    parts.append(f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(is_truncated).lower()}</IsTruncated>")
    if is_truncated and page:
        parts.append(f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>")
    for entry, is_folder in page:
        if is_folder:
            parts.append(f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>")
        elif (stored := objects.get(entry)) is not None:  # not removed meanwhile
            parts.append(
                f"<Contents><Key>{escape(entry)}</Key><LastModified>{stored.last_modified_ISO8601}</LastModified>"
                f"<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
    return "".join([*parts, "</ListBucketResult>"])


def entries_after(keys: list[str], prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, bool]]:
    """Keys and folders behind ``after``, in order: each with whether it is a folder, which stands for all below it."""
    last = ""
    for key in keys:
        head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        entry = prefix + head + cut if cut else key
        if entry > after and entry != last:
            yield entry, bool(cut)
            last = entry
