"""``etude gateway`` by itself: certificates, key files, engines by URL, settings that would do nothing."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from certificates import certificate
from etude.aio import background_task
from etude.cli.actions.manage_keys import add_key
from etude.cli.commands.keys import revoke
from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.config.recipe import RunConfig
from etude.engines.fake import FakeEngine
from etude.errors import ConfigError
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.run.folder import RunFolder
from etude.run.gateway import (
    GatewaySpec,
    StandaloneOptions,
    announce,
    engine_entry,
    longest_context,
    open_gateway,
    run_standalone,
)
from etude.run.serving import listening, tls_context
from etude.run.store_outages import StoreOutages
from etude.run.weight_log import open_log
from etude.tokens.chat import ChatTemplate
from etude.types import TensorSpec
from etude.weights.digest import state_digest
from etude.weights.publish import Publisher
from etude.weights.state import StoredTensor
from waiting import WAIT_S, until

SECRET = "a product's key"


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[str]:
    """A gateway with a fake engine; gives its host and port."""
    clock = SystemClock()
    engine = FakeEngine(clock, vocab_size=300, max_length=64)
    plan = GatewaySpec(
        chat=ChatTemplate.train(["return total\n"] * 4, vocab_size=300),
        max_length=64,
        recorder=Recorder(None),
        engines=(EngineEntry(name="one", url="http://fake"),),
        keys=(Key(key_id="product", digest=digest_of(SECRET), scope=Scope.PRODUCTION),),
    )
    async with open_gateway(plan, config, clock, lambda _url: engine) as parts:
        server = http_server(parts.gateway.handle)
        async with listening(server, 0, tls=tls_context("gateway", config.tls_cert, config.tls_key)) as port:
            yield f"127.0.0.1:{port}"


async def ask(url: str, key: str, verify: ssl.SSLContext | bool = True) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body, headers=headers, ssl=verify) as answer,
    ):
        await answer.read()
        return answer.status


def test_calls_travel_over_tls_and_nothing_else_is_answered(tmp_path: Path) -> None:
    cert_file, key_file = certificate(tmp_path)
    config = GatewayConfig(tls_cert=str(cert_file), tls_key=str(key_file))

    async def run() -> None:
        async with serving(config) as where:
            assert await ask(f"https://{where}", SECRET, ssl.create_default_context(cafile=cert_file)) == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await ask(f"https://{where}", SECRET)
            with pytest.raises(aiohttp.ClientError):
                await ask(f"http://{where}", SECRET)

    asyncio.run(run())


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    bad = str(tmp_path / "bad.pem")
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert"):
        tls_context("gateway", bad, bad)
    assert tls_context("gateway", "", "") is None


def test_a_key_file_is_followed_while_the_gateway_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    key_id, secret = add_key(file, "production", "bot", (None, None), None)
    config = GatewayConfig(keys=str(file))

    async def run() -> None:
        async with serving(config) as where:
            url = f"http://{where}"
            assert await ask(url, secret) == 200
            assert await ask(url, SECRET) == 200
            _, later = add_key(file, "production", "later", (None, None), None)
            revoke(file, key_id)
            async with asyncio.timeout(WAIT_S):
                while await ask(url, later) != 200:
                    await asyncio.sleep(0.05)
            assert await ask(url, secret) == 401
            assert await ask(url, SECRET) == 200  # not of the file: it stays
            file.write_text("damaged")
            await until(lambda: "keys.json is not a file of keys" in caplog.text)
            assert await ask(url, later) == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "url", "region"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", ""),
        ("https://engines.example/a/@eu-west", "https://engines.example/a", "eu-west"),
    ],
)
def test_engines_are_told_by_url_and_region(text: str, url: str, region: str) -> None:
    entry = engine_entry(text)
    assert (entry.url, entry.region) == (url, region)
    assert "/" not in entry.name


@pytest.mark.parametrize("text", ["", "localhost:80", "ftp://x", "http://x@", "http://x@a@b", "http://host:port"])
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        engine_entry(text)


def test_the_context_is_as_long_as_the_checkpoint_says(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"max_position_embeddings": 640}')
    assert longest_context(tmp_path) == 640
    file.write_text('{"text_config": {"max_position_embeddings": 32}}')
    assert longest_context(tmp_path) == 32
    file.write_text("{}")
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        longest_context(tmp_path)


@pytest.mark.parametrize(
    ("setting", "options"), [("trainer.steps=3", "no effect on a gateway"), ("gateway.access_log=true", "--access-log")]
)
def test_settings_without_an_effect_are_refused(tmp_path: Path, setting: str, options: str) -> None:
    with pytest.raises(ConfigError, match=options):
        run_standalone(StandaloneOptions(model=tmp_path, engines=("http://x",), settings=(setting,)))


def test_versions_are_announced_once_the_store_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, away, options = RunFolder.create(tmp_path / "run", RunConfig()), tmp_path / "away", list[tuple[int, str]]()
    place, outages = Path(folder.store), StoreOutages(folder.store, 0.0)
    log = open_log(folder, outages)
    state = {"w": StoredTensor(spec=TensorSpec(name="w", dtype="F32", shape=(1,)), data=np.zeros(4, np.uint8))}
    with Publisher(log) as publisher:
        publisher.publish(state, version=0, step=0).result()
    place.rename(away)
    place.write_text("no folder")

    async def run() -> None:
        async with background_task(announce(log, lambda version, digest: options.append((version, digest)))):
            await until(lambda: f"{place} is unavailable, waiting for it" in caplog.text)
            place.unlink()  # noqa: ASYNC240
            away.rename(place)
            await until(lambda: bool(options))

    asyncio.run(run())
    assert options == [(0, state_digest(state))]
