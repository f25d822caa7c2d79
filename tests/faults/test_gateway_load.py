"""A thousand streaming agents, some of which hang up, and one killed engine: nothing leaks and no turn is lost.

Each agent opens a session, makes a few calls, closes the session, and compares the replies that it read with its turns.
The gateway runs in this process, where tasks, sockets and objects can be counted; its engines are processes that die.
``ETUDE_LONG=1`` takes a minute.
"""

import asyncio
import gc
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest
import uvloop
from aiohttp import web

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.engines.http import http_engines
from etude.gateway.capture.conversations import Conversation
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of, new_secret
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.ledger.turns import decode_turns
from etude.run.gateway import GatewaySpec, RunningGateway, open_gateway
from etude.tokens.chat import ChatTemplate
from etude.types import Turn
from waiting import until

SECONDS = 60.0 if os.environ.get("ETUDE_LONG") else 10.0
AGENTS, TURNS = 1000, 3
HANG_UP_SHARE, HANG_UP_S = 0.2, 0.2
"""How many turns are abandoned, and after how long at most."""
MAX_TOKENS, MAX_LENGTH = 24, 2048
FILES = 8192
"""Descriptors: a connection of each agent, both ends, and those to engines."""
WEIGHED_EVERY = 50
"""Sessions after which memory is looked at: by what was done, for in a time a busy machine may do next to nothing."""
GROWTH_BYTES = 32 << 20
"""Resident memory that the last quarter of all sessions may have more than the third: what an allocator keeps, not a
leak that goes on.
"""

ENGINE = """
import asyncio, socket, sys
from aiohttp import web
from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.engines.http import engine_app

class Paced(FakeEngine):
    async def stream(self, prompt_ids, params, *, session):
        async for piece in super().stream(prompt_ids, params, session=session):
            await asyncio.sleep(0.01)
            yield piece

seed, vocab_size, max_length = map(int, sys.argv[1:])
engine = Paced(SystemClock(), vocab_size=vocab_size, max_length=max_length, seed=seed)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
web.run_app(engine_app(engine), sock=listener, print=None, handler_cancellation=True)
"""

pytestmark = pytest.mark.timeout(SECONDS * 3 + 120)


@dataclass(slots=True)
class Tally:
    """Counts of all agents together."""

    sessions: int = 0
    completed: int = 0
    hung_up: int = 0
    kept_after_hang_up: int = 0
    memory_bytes: list[int] = field(default_factory=list)
    """Resident memory, as sessions were done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The gateway under test, and the shared state of the agents."""

    url: str
    secret: str
    http: aiohttp.ClientSession
    template: ChatTemplate
    tally: Tally
    ends: float


async def live(site: Site, chance: random.Random) -> None:
    """One agent: session after session until time is up."""
    while time.monotonic() < site.ends:
        async with site.http.post(f"{site.url}/sessions", headers=bearer(site.secret), json={}) as answer:
            assert answer.status == 200, await answer.text()
            opened = await answer.json()
        reply, abandoned = await talk(site, opened["api_key"], chance)
        closing = site.http.delete(f"{site.url}/sessions/{opened['session_id']}", headers=bearer(site.secret))
        async with closing as answer:
            assert answer.status == 200, await answer.text()
            turns = decode_turns(await answer.read())
        check(site, turns, reply, abandoned)
        site.tally.sessions += 1
        if site.tally.sessions % WEIGHED_EVERY == 0:
            site.tally.memory_bytes.append(resident_bytes())


async def talk(site: Site, key: str, chance: random.Random) -> tuple[dict[int, str], set[int]]:
    """A conversation that stops at the deadline: the reply to each question, and the abandoned questions."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "answer at random"}]
    reply: dict[int, str] = {}
    abandoned: set[int] = set()
    for number in range(TURNS):
        if number and time.monotonic() >= site.ends:
            break
        request = [*messages, {"role": "user", "content": f"question {number}"}]
        timeout_s = chance.random() * HANG_UP_S if chance.random() < HANG_UP_SHARE else None
        try:
            async with asyncio.timeout(timeout_s):
                reply[number] = await ask(site, key, request)
        except TimeoutError:
            abandoned.add(number)
            site.tally.hung_up += 1
        else:
            messages = [*request, {"role": "assistant", "content": reply[number]}]
            site.tally.completed += 1
    return reply, abandoned


async def ask(site: Site, key: str, messages: Sequence[dict[str, str]]) -> str:
    """One streamed turn, whole; leaving it hangs up."""
    body = {"model": "policy", "messages": messages, "stream": True, "max_tokens": MAX_TOKENS}
    async with site.http.post(f"{site.url}/v1/chat/completions", headers=bearer(key), json=body) as answer:
        assert answer.status == 200, await answer.text()
        text, ended = "", False
        async for line in answer.content:
            data = line.strip().removeprefix(b"data: ")
            ended = ended or data == b"[DONE]"
            if data and not ended:
                event = orjson.loads(data)
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        assert ended, "a stream ended without its end"
    return text


def check(site: Site, turns: Sequence[Turn], reply: dict[int, str], abandoned: set[int]) -> None:
    """Every reply that was read is a turn, once; the others are of calls that were hung up on."""
    by_question: dict[int, Turn] = {}
    for turn in turns:
        *_, number = re.findall(r"question (\d)", site.template.decode(turn.prompt_ids.tolist()))
        assert int(number) not in by_question, "a turn is there twice"
        by_question[int(number)] = turn
    assert reply.keys() <= by_question.keys(), "a turn is lost"
    assert by_question.keys() - reply.keys() <= abandoned, "a turn is there that nobody asked for"
    site.tally.kept_after_hang_up += len(by_question.keys() - reply.keys())
    before = np.empty(0, np.int32)
    for number, text in reply.items():
        turn = by_question[number]
        assert site.template.decode(turn.completion_ids.tolist()) == text
        assert np.array_equal(turn.prompt_ids[: len(before)], before), "a turn does not continue the one before"
        before = np.concatenate([turn.prompt_ids, turn.completion_ids])


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# ── the gateway and what is around it ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def engine(seed: int, vocab_size: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that serves a fake engine, and its URL."""
    command = [sys.executable, "-c", ENGINE, str(seed), str(vocab_size), str(MAX_LENGTH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@asynccontextmanager
async def gateway(
    template: ChatTemplate, engines: Sequence[str], secret: str
) -> AsyncIterator[tuple[RunningGateway, str]]:
    """A gateway in this event loop, and its URL."""
    key = Key(key_id="test", digest=digest_of(secret), scope=Scope.PRODUCTION)
    plan = GatewaySpec(
        chat=template,
        max_length=MAX_LENGTH,
        recorder=Recorder(None),
        engines=tuple(EngineEntry(name=f"engine-{index}", url=url) for index, url in enumerate(engines)),
        keys=(key,),
    )
    config = GatewayConfig()
    async with AsyncExitStack() as stack:
        connect = await stack.enter_async_context(http_engines(0.0))
        parts = await stack.enter_async_context(open_gateway(plan, config, SystemClock(), connect))
        runner = web.ServerRunner(http_server(parts.gateway.handle))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=AGENTS)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield parts, f"http://{host}:{port}"


async def kill_in_the_middle(process: subprocess.Popen[bytes], is_busy: Callable[[], bool]) -> None:
    """Kill an engine while it is answering calls; on a slow machine, wait first until it has some."""
    await asyncio.sleep(SECONDS / 3)
    await until(is_busy)
    process.kill()


async def populate(url: str, secret: str, template: ChatTemplate, kill: Coroutine[None, None, None]) -> Tally:
    """Run all agents until the deadline, and kill an engine meanwhile."""
    tally = Tally()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        site = Site(url=url, secret=secret, http=http, template=template, tally=tally, ends=time.monotonic() + SECONDS)
        async with asyncio.TaskGroup() as agents:
            agents.create_task(kill)
            for index in range(AGENTS):
                agents.create_task(live(site, random.Random(index)))
    return tally


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_sockets() -> int:
    opened = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of the listing itself
            opened += str(link.readlink()).startswith("socket:")
    return opened


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files to what a thousand callers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"the system allows {hard} open files, and {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_agents_lose_nothing_and_leave_nothing(many_files: None) -> None:
    template = ChatTemplate.train(["answer at random: question 0 1 2 3 4 5 6 7 8 9"], 300)
    secret = new_secret(Scope.PRODUCTION)

    async def metrics() -> Tally:
        tasks, sockets = asyncio.all_tasks(), open_sockets()
        with engine(1, template.vocab_size) as (victim, first), engine(2, template.vocab_size) as (_, second):
            async with gateway(template, [first, second], secret) as (parts, url):
                await until(lambda: all(view.health is not None for view in parts.pool.list()))
                own_tasks = asyncio.all_tasks()
                kill = kill_in_the_middle(
                    victim, lambda: any(view.inflight for view in parts.pool.list() if view.entry.url == first)
                )
                tally = await populate(url, secret, template, kill)
                await until(lambda: not asyncio.all_tasks() - own_tasks)  # hang-ups are noticed a little later
                assert not len(parts.sessions), "sessions were left open"
                assert [key.key_id for key in parts.keyring] == ["test"], "keys outlived their sessions"
                assert parts.pool.counters.losses, "the engine was killed when nobody needed it"
        await until(lambda: not asyncio.all_tasks() - tasks and open_sockets() <= sockets)
        return tally

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally = runner.run(metrics())
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is Conversation], "a conversation is still there"
    assert tally.sessions >= AGENTS and tally.completed > tally.hung_up > 0, tally
    quarter = len(tally.memory_bytes) // 4
    third = statistics.mean(tally.memory_bytes[-2 * quarter : -quarter])
    last = statistics.mean(tally.memory_bytes[-quarter:])
    assert last - third < GROWTH_BYTES, f"memory grows: {third / 2**20:.0f} MiB, then {last / 2**20:.0f} MiB"
