"""`etude gateway` as a process: its greeting, its calls, its end."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from certificates import certificate
from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.engines.http import engine_app
from etude.protocols import Completion, SamplingParams
from etude.run.serving import listening, tls_context
from etude.tokens.chat import ChatTemplate
from etude.types import TokenIds

STARTS_S = 60.0
"""A busy machine may need this long to start a Python process."""


class GatedEngine(FakeEngine):
    """Answers when its gate is opened."""

    def __init__(self) -> None:
        super().__init__(SystemClock(), vocab_size=300, max_length=64)
        self.gate, self.requested = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        self.requested.set()
        await self.gate.wait()
        return await super().generate(prompt_ids, params, session=session)


@asynccontextmanager
async def process(
    model: Path, engine: str, *, files: int = 1024
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """A gateway process with a limit of open files; yields the process, its URL and its key."""
    command = f"ulimit -n {files} && exec {sys.executable} -m etude gateway --model {model} --engine {engine}"
    child = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        greeting = ""
        async with asyncio.timeout(STARTS_S):
            while "model" not in greeting:
                line = (await child.stdout.readline()).decode()
                assert line, "it ended before it said where it is"
                greeting += line
        url, key = re.search(r"http://\S+", greeting), re.search(r"etude-production-\S+", greeting)
        assert url is not None
        assert key is not None
        yield child, url[0], key[0]
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def ask(http: aiohttp.ClientSession, url: str, key: str) -> tuple[int, bytes]:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.read()


def test_an_engine_elsewhere_is_called_over_tls_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert_file, key_file = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert_file))
    monkeypatch.setenv("ETUDE_ENGINE_KEY", "right")
    make_model(tmp_path)

    async def run() -> None:
        engine = FakeEngine(SystemClock(), vocab_size=300, max_length=64)
        tls = tls_context("engine", str(cert_file), str(key_file))
        async with (
            listening(engine_app(engine, "right"), 0, tls=tls) as port,
            process(tmp_path, f"https://127.0.0.1:{port}") as (_, url, key),
            aiohttp.ClientSession() as http,
            asyncio.timeout(STARTS_S),
        ):
            status, body = await ask(http, url, key)
            assert status == 200, body

    asyncio.run(run())


def make_model(folder: Path) -> None:
    """Write the files of a model that a gateway reads."""
    ChatTemplate.train(["return total\n"] * 4, vocab_size=300).save(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')


@pytest.mark.parametrize("patient", [True, False])
def test_a_signal_lets_calls_end_and_a_second_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    monkeypatch.setenv("ETUDE_ENGINE_KEY", "right")
    make_model(tmp_path)

    async def run() -> None:
        engine = GatedEngine()
        async with (
            listening(engine_app(engine, "right"), 0) as port,
            process(tmp_path, f"http://127.0.0.1:{port}") as (child, url, key),
            aiohttp.ClientSession() as http,
            asyncio.timeout(STARTS_S),
        ):
            call = asyncio.create_task(ask(http, url, key))
            await engine.requested.wait()
            os.kill(child.pid, signal.SIGTERM)
            async with asyncio.timeout(25):  # it drains for 30 s
                while (await http.get(f"{url}/healthz")).status != 503:
                    await asyncio.sleep(0.02)
            assert (await ask(http, url, key))[0] == 503
            assert not call.done()
            if patient:
                engine.gate.set()
                assert (await call)[0] == 200
            else:
                os.kill(child.pid, signal.SIGTERM)
                with pytest.raises(aiohttp.ClientError):
                    await call
            assert await child.wait() == 128 + signal.SIGTERM
            engine.gate.set()

    asyncio.run(run())


def test_connections_without_a_key_do_not_take_the_files_that_the_gateway_needs(tmp_path: Path) -> None:
    ChatTemplate.train(["return total\n"] * 4, vocab_size=300).save(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    engine = GatedEngine()
    engine.gate.set()

    async def run() -> None:
        async with (
            listening(engine_app(engine), 0) as port,
            process(tmp_path, f"http://127.0.0.1:{port}", files=128) as (child, url, key),
            aiohttp.ClientSession() as http,
            asyncio.timeout(STARTS_S),
        ):
            lease = list[asyncio.StreamWriter]()
            for _ in range(300):
                _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bea")
                lease.append(writer)
            assert (await ask(http, url, key))[0] == 200
            for writer in lease:
                writer.close()
            assert child.returncode is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere", "--engine", "http://x"], "nowhere"),
        (["--model", "nowhere"], "--engine"),
        (["--run", "nowhere", "--port", "1"], "--port would have no effect"),
        (["--run", "nowhere"], "not a run folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude", "gateway", *options],
        capture_output=True,
        text=True,
        timeout=STARTS_S,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
