"""The product's backend: a coding assistant that asks its model by the OpenAI API and works in a sandbox.

    request ──▶ messages ──HTTP──▶ product gateway ──▶ reply: read, edit, test, submit ──▶ sandbox ──▶ messages ──▶ …

It knows the gateway by URL and key alone. Which user asks, and what kind of request it is, it says in headers of the
model call; a session's id is its own. The words of the tools and what they do are étude's harness's, since the product
*is* that harness.
"""

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import final

import aiohttp
from population import Outcome

from etude.config.tasks import BugfixOptions
from etude.errors import AgentFault, OutOfTime
from etude.harnesses import tools
from etude.harnesses.coding import observe
from etude.harnesses.completions import CompletionClient, Message
from etude.protocols import Sandbox, SandboxProvider, Session
from etude.sandboxes.function_calls import call_function, same_value
from etude.tasks.bugfix import BugfixFamily
from etude.types import FunctionChecks, Split, Task

MAX_TURNS, REPLY_TOKENS, REPLY_S = 8, 40, 60.0
"""Limits of a session: turns, sampled tokens of a turn, seconds for a reply with all its retries."""
TEMPERATURE = 1.0
NO_WORD = re.compile(r"[^A-Za-z0-9._:/-]+")
"""Letters that the name of a kind of request cannot have."""
VERSION = "X-Etude-Version"
"""Header of a reply with the weight versions that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as the product tells the gateway."""

    user: str
    region: str
    consent: str = "train"
    """``train`` or ``none``: whether this person lets their sessions be learnt from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the agent."""

    reply: str
    observation: str
    """What its tool answered; empty for the last one."""


@dataclass(slots=True, kw_only=True)
class Work:
    """A session: what the agent did so far."""

    session_id: str
    task: Task
    steps: list[Step] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    """Weight versions that answered."""
    text: str = ""
    """The file at the end."""
    solved: bool = False
    submitted: bool = False

    @property
    def outcome(self) -> Outcome:
        """What people see of it."""
        calls = [tools.parse_call(step.reply) for step in self.steps]
        edits = [at for at, call in enumerate(calls) if isinstance(call, tools.EditFile)]
        reads = [at for at, call in enumerate(calls) if isinstance(call, tools.ReadFile)]
        last_edit = edits[-1] if edits else len(calls)
        return Outcome(
            solved=self.solved,
            turns=len(calls),
            edits=len(edits),
            tested=any(
                isinstance(call, tools.RunTests) and step.observation == tools.PASS
                for call, step in zip(calls[last_edit:], self.steps[last_edit:], strict=True)
            ),
            read_first=bool(reads) and (not edits or reads[0] < edits[0]),
            submitted=self.submitted,
        )


@final
class Product:
    """The assistant, for any number of users at a time."""

    def __init__(self, url: str, key: str, sandboxes: SandboxProvider, connector: aiohttp.BaseConnector) -> None:
        """``url`` is the product gateway's, without ``/v1``; sandboxes and connector stay the caller's to close."""
        self._url = url.rstrip("/")
        self._key = key
        self._sandboxes = sandboxes
        self._connector = connector

    @asynccontextmanager
    async def open(self, task: Task, caller: Caller) -> AsyncIterator[tuple[Work, AsyncIterator[Step]]]:
        """A session, and the agent's turns as they are made; whoever stops to take them has given up on it."""
        work = Work(session_id=f"chat-{secrets.token_hex(10)}", task=task)
        sandbox = await self._sandboxes.create(task.files)
        try:
            async with self._client(work, caller) as http:
                yield work, self._steps(work, sandbox, http)
                await self._judge(work, sandbox)
                await self._end(work, http)
        finally:
            await sandbox.close()

    def _client(self, work: Work, caller: Caller) -> aiohttp.ClientSession:
        """An HTTP client that says in each call whose it is, and hears which weights answered."""
        headers = {
            "X-Etude-Session": work.session_id,
            "X-Etude-User": caller.user,
            "X-Etude-Template": NO_WORD.sub("-", work.task.template),
            "X-Etude-Consent": caller.consent,
            "X-Etude-Region": caller.region,
        }

        async def note(
            _http: aiohttp.ClientSession, _context: SimpleNamespace, seen: aiohttp.TraceRequestEndParams
        ) -> None:
            work.versions.update(filter(None, seen.response.headers.get(VERSION, "").split("-")))

        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(note)
        return aiohttp.ClientSession(
            headers=headers, connector=self._connector, connector_owner=False, trace_configs=[trace]
        )

    async def _steps(self, work: Work, sandbox: Sandbox, http: aiohttp.ClientSession) -> AsyncIterator[Step]:
        model = CompletionClient(http, max_tokens=REPLY_TOKENS, timeout_s=REPLY_S)
        session = Session(session_id=work.session_id, base_url=f"{self._url}/v1", api_key=self._key)
        messages: list[Message] = [{"role": "user", "content": work.task.prompt}]
        while len(work.steps) < MAX_TURNS and not work.submitted:
            reply = await model.complete(session, messages, temperature=TEMPERATURE)
            if reply.finish != "stop":
                return
            call, observation = tools.parse_call(reply.text), ""
            if isinstance(call, tools.Submit):
                work.submitted = True
            else:
                with suppress(OutOfTime, AgentFault):
                    observation = await observe(call, work.task.checks, sandbox)
            step = Step(reply=reply.text, observation=observation)
            work.steps.append(step)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": observation}]
            yield step

    async def _end(self, work: Work, http: aiohttp.ClientSession) -> None:
        """Tell the gateway that no call follows, and the time for signals begins; it would find out later."""
        url = f"{self._url}/sessions/{work.session_id}"
        with suppress(aiohttp.ClientError):
            async with http.delete(url, headers={"Authorization": f"Bearer {self._key}"}):
                return

    async def _judge(self, work: Work, sandbox: Sandbox) -> None:
        """Find out what the user will find out: whether the work is right."""
        checks = work.task.checks
        assert isinstance(checks, FunctionChecks)
        work.text = await sandbox.read_file(checks.path) or ""
        if work.submitted and work.outcome.edits:
            work.solved = await passes(checks, sandbox)


async def passes(checks: FunctionChecks, sandbox: Sandbox) -> bool:
    """True if all hidden cases pass."""
    calls = [case.arguments for case in checks.hidden]
    results = await call_function(sandbox, checks.path, checks.function, calls)
    return all(
        result.ok and same_value(result.value, case.expected)
        for result, case in zip(results, checks.hidden, strict=True)
    )


@final
class Requests:
    """Requests of users: of the recipe's family of tasks, and none that the trainer ever simulates."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        options = BugfixOptions.model_validate({"kinds": tuple(kinds)})
        self._family = BugfixFamily(options, seed=SEED_OF_USERS + seed)

    def draw(self, number: int) -> Task:
        """Request number ``number``; the same every time."""
        return self._family.task(Split.TRAIN, number)


SEED_OF_USERS = 1_000_000
"""Seed of the users' requests, beyond any that a recipe takes."""
