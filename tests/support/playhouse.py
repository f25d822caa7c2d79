"""A model server that plays answers in order, and the coding agent before it, with real tools in a real sandbox."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from etude.config.rollouts import CodingOptions
from etude.harnesses.coding import CodingHarness
from etude.protocols import HarnessResult, Sandbox, Session
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import Case, FunctionChecks, Split, Task

FILES = {"util.py": "def add(a, b):\n    return a - b"}
TASK = Task(
    task_id="t",
    family="bugfix",
    template="add",
    split=Split.TRAIN,
    prompt="fix add in util.py",
    files=FILES,
    checks=FunctionChecks(
        path="util.py",
        function="add",
        visible=(Case(arguments=(1, 0), expected=1), Case(arguments=(1, 2), expected=3)),
        hidden=(Case(arguments=(5, 5), expected=10),),
    ),
)
IMPATIENT = aiohttp.ClientTimeout(total=0.5)
"""Timeout of the callers' own connections, which must not limit the time of a turn."""
HANG_UP = 0
"""A status that stands for closing the connection."""


@dataclass(frozen=True)
class Answer:
    """One HTTP answer of the scripted model."""

    body: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0


def says(text: str, finish: str = "stop", tokens: int = 10) -> Answer:
    """``tokens``: of the whole context, this reply included."""
    message = {"role": "assistant", "content": text}
    return Answer({"choices": [{"message": message, "finish_reason": finish}], "usage": {"total_tokens": tokens}})


def refuses(status: int, code: str = "busy", **headers: str) -> Answer:
    return Answer({"error": {"code": code, "message": f"scripted {code}"}}, status, headers)


NO_ROOM = refuses(400, "context_length_exceeded")


class Playhouse:
    """A model server that plays answers in order, and everything around it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self._runner = asyncio.Runner()
        self._sandboxes = LocalSandboxes(1)

    def play(
        self,
        answers: Sequence[Answer],
        files: Mapping[str, str] = FILES,
        *,
        task: Task = TASK,
        sandbox: Sandbox | None = None,
        close_sandbox: bool = False,
        **limits: Any,
    ) -> HarnessResult:
        """Run one session in a fresh sandbox, or in the given one; every reply must be requested."""

        async def act() -> HarnessResult:
            environment = sandbox or await self._sandboxes.create(files)
            if close_sandbox:
                await environment.close()
            try:
                return await self._serve(list(answers), task, environment, CodingOptions(**limits))
            finally:
                await environment.close()

        return self._runner.run(act())

    @property
    def questions(self) -> list[str]:
        """The last message of every request."""
        return [request["messages"][-1]["content"] for request in self.requests]

    @property
    def observations(self) -> list[str]:
        """The agent's messages in the last session, as of its last request."""
        return [message["content"] for message in self.requests[-1]["messages"][2::2]]

    def close(self) -> None:
        self._runner.run(self._sandboxes.close())
        self._runner.close()

    async def _serve(self, answers: list[Answer], task: Task, sandbox: Sandbox, config: CodingOptions) -> HarnessResult:
        async def complete(request: web.Request) -> web.Response:
            self.requests.append(orjson.loads(await request.read()))
            self.headers.append(request.headers)
            answer = answers.pop(0)
            await asyncio.sleep(answer.after_s)
            if answer.status == HANG_UP:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(answer.body, status=answer.status or 200, headers=answer.headers)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        session = Session(session_id="s", base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-s")
        try:
            async with aiohttp.ClientSession(timeout=IMPATIENT) as http:
                result = await CodingHarness(config, http).run(task, session, sandbox, temperature=0.5)
        finally:
            await runner.cleanup()
        assert answers == []
        return result
