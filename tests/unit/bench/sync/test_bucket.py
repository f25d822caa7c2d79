"""The bucket of the benches, read with étude's S3 client: moto's answers and the direct reads are consistent."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from bench.sync import bucket
from etude.aio import background_task


@asynccontextmanager
async def _store(name: str) -> AsyncIterator[S3Store]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ready = asyncio.Event()
    async with background_task(bucket.serve_bucket("127.0.0.1", port, name, ready.set)):
        await ready.wait()
        options = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b"}
        yield S3Store(name, region="us-east-1", client_options={"allow_http": True}, **options)  # type: ignore[arg-type]


def test_objects_are_read_as_they_were_put_and_put_once_where_asked() -> None:
    asyncio.run(_put_and_read())


async def _put_and_read() -> None:
    async with _store("runs-one") as store:
        await obstore.put_async(store, "run/a", b"first", mode="create")
        with pytest.raises(AlreadyExistsError):
            await obstore.put_async(store, "run/a", b"second", mode="create")
        assert bytes(await (await obstore.get_async(store, "run/a")).bytes_async()) == b"first"
        await obstore.put_async(store, "run/a", b"third")
        assert bytes(await (await obstore.get_async(store, "run/a")).bytes_async()) == b"third"
        assert bytes(await obstore.get_range_async(store, "run/a", start=1, length=3)) == b"hir"
        with pytest.raises(FileNotFoundError):
            await obstore.get_async(store, "run/none")


def test_lists_have_every_key_once_in_order() -> None:
    asyncio.run(_list())


async def _list() -> None:
    names = [f"run/logs/{number:04}" for number in range(999)] + ["run/x&y", "run/files/one", "other"]
    async with _store("runs-two") as store:
        for name in names:
            await obstore.put_async(store, name, b"seven b")
        listed = [meta["path"] async for page in obstore.list(store, "run") for meta in page]
        assert listed == sorted(names[:-1])
        behind = [
            meta["path"] async for page in obstore.list(store, "run/logs", offset="run/logs/0005") for meta in page
        ]
        assert behind == names[6:999]
        below = await obstore.list_with_delimiter_async(store, "run")
        assert sorted(below["common_prefixes"]) == ["run/files", "run/logs"]
        assert [(meta["path"], meta["size"]) for meta in below["objects"]] == [("run/x&y", 7)]
        await obstore.delete_async(store, names[:900])
        assert [meta["path"] async for page in obstore.list(store, "run/logs") for meta in page] == names[900:999]
