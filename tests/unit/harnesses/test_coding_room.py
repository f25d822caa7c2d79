"""The coding agent shows every result, and truncates nothing while there is room, for any work.

The model replies anything, and pages have any size; the gateway counts letters as tokens and refuses what does not fit.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.rollouts import CodingOptions
from etude.harnesses.coding import CodingHarness
from etude.harnesses.tools import CUT, NO_FILE, number_lines
from etude.protocols import HarnessResult, Session
from etude.rollouts.fake import FakeSandbox
from playhouse import TASK

TRIGGER, TURN, SUMMARY, PAGE = 120, 12, 40, 60
"""Letters: of a full context, and of the longest reply, summary and page, its number included."""
REQUEST = "sum up"
MARKS = 2
"""Tokens around a message."""
ROOM = TRIGGER + PAGE + TURN + PAGE + len(REQUEST) + SUMMARY + 8 * MARKS
"""A window in which all fits that can come behind a reply that ends below the trigger."""


@dataclass(frozen=True)
class Exchange:
    """A call: its last message, and the model's reply, or ``None`` if there was no room for the call."""

    requests: str
    reply: str | None


@dataclass
class FileSandbox:
    """A gateway with a context window, and a model with given replies."""

    window: int = 0
    replies: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        texts: list[str] = [message["content"] for message in body["messages"]]
        read = sum(len(text) + MARKS for text in texts)
        if read + body["max_tokens"] > self.window:
            self.exchanges.append(Exchange(texts[-1], None))
            return web.json_response({"error": {"code": "context_length_exceeded", "message": "full"}}, status=400)
        reply = self.replies.pop(0)[: body["max_tokens"] - MARKS]
        self.exchanges.append(Exchange(texts[-1], reply))
        choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"total_tokens": read + len(reply) + MARKS}})


@dataclass
class Stage:
    """The world behind HTTP, and who works in it."""

    runner: asyncio.Runner
    sandbox: FileSandbox
    session: Session
    http: aiohttp.ClientSession

    def play(self, window: int, replies: Sequence[str], pages: dict[str, str], config: CodingOptions) -> HarnessResult:
        self.sandbox.window, self.sandbox.replies, self.sandbox.exchanges = window, [*replies], []
        sandbox = FakeSandbox(pages, lambda _: None)
        harness = CodingHarness(config, self.http)
        return self.runner.run(harness.run(TASK, self.session, sandbox, temperature=1.0))


@contextmanager
def stage_of(sandbox: FileSandbox) -> Iterator[Stage]:
    async def start() -> tuple[web.AppRunner, int, aiohttp.ClientSession]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", sandbox.complete)
        server = web.AppRunner(app, shutdown_timeout=0.1)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        return server, server.addresses[0][1], aiohttp.ClientSession()

    with asyncio.Runner() as runner:
        server, port, http = runner.run(start())
        session = Session(session_id="s", base_url=f"http://127.0.0.1:{port}/v1", api_key="k")
        yield Stage(runner, sandbox, session, http)
        runner.run(http.close())
        runner.run(server.cleanup())


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with stage_of(FileSandbox()) as stage:
        yield stage


PAGES = st.dictionaries(st.sampled_from(["p1", "p2", "p3"]), st.text("ab\n", max_size=PAGE // 2), max_size=3)
REPLIES = st.lists(
    st.sampled_from(["read p1", "read p2", "read p3", "todo x", "summary\nkeep it", "", "no call", "y" * 99]),
    min_size=24,
    max_size=24,
)


def config_of(mode: str) -> CodingOptions:
    limits: dict[str, Any] = {"context": mode, "summary_at_tokens": TRIGGER}
    if mode == "summary":
        limits |= {"summary_request": REQUEST, "max_tokens_per_summary": SUMMARY}
    return CodingOptions(max_turns=24, max_tokens_per_turn=TURN, **limits)


def results_shown(exchanges: Sequence[Exchange], pages: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """For every page that was read: its text, and the messages that should show it, up to the answered one."""
    for place, exchange in enumerate(exchanges):
        reply = exchange.reply or ""
        if not reply.startswith("read ") or exchange.requests.endswith(REQUEST):
            continue
        later = exchanges[place + 1 :]
        tries = next((count for count, other in enumerate(later, 1) if other.reply is not None), len(later))
        page = pages.get(reply.removeprefix("read "))
        yield NO_FILE if page is None else number_lines(page), [other.requests for other in later[:tries]]


@given(pages=PAGES, replies=REPLIES, mode=st.sampled_from(["summary", "truncate"]))
@settings(max_examples=40, deadline=None)
def test_with_room_every_result_is_seen_whole(
    stage: Stage, pages: dict[str, str], replies: list[str], mode: str
) -> None:
    result = stage.play(ROOM, replies, pages, config_of(mode))
    exchanges = stage.sandbox.exchanges
    assert (result.reason, len(exchanges)) == ("turns", 24), "nothing was refused"
    for text, messages in results_shown(exchanges, pages):
        assert all(text in message and CUT not in message for message in messages)


@given(pages=PAGES, replies=REPLIES, mode=st.sampled_from(["summary", "truncate"]), window=st.integers(40, ROOM))
@settings(max_examples=40, deadline=None)
def test_without_room_a_result_is_seen_or_said_to_be_cut(
    stage: Stage, pages: dict[str, str], replies: list[str], mode: str, window: int
) -> None:
    result = stage.play(window, replies, pages, config_of(mode))
    assert result.reason in ("turns", "context")
    for text, messages in results_shown(stage.sandbox.exchanges, pages):
        assert all(text in message or CUT in message for message in messages)
