"""Environments with OpenEnv's protocol (reset, step, reward): the model acts, the environment grades.

    étude's task ──▶ OpenEnvHarness.run ──WebSocket /ws──▶ server of the environment
                            │ observation ──▶ model ──▶ action, as JSON ──▶ step … until done
                            └── sum of the rewards ──▶ outcome ──▶ OutcomeGrader.grade

A connection is an episode with an environment of its own; the protocol's plain HTTP paths ``/reset`` and ``/step`` keep
no state between calls, so they are not used. A task is a seed. Owns the conversation: one message with the rules and
the first observation, then alternating actions and observations. Does not start or stop the server.

The protocol: https://github.com/meta-pytorch/OpenEnv, as in ``openenv-core`` 0.3.
"""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
import orjson

from etude.backoff import Backoff
from etude.config.rollouts import OpenEnvHarnessOptions
from etude.config.tasks import OpenEnvOptions
from etude.errors import ConfigError, SandboxError
from etude.harnesses.completions import CompletionClient, HarnessContext, Message
from etude.protocols import FamilyContext, HarnessResult, Sandbox, Session
from etude.tasks.outcomes import Card, index_of, leave_outcome
from etude.types import Json, Split, Task

FAMILY = "openenv"
METADATA_TIMEOUT_S = 30.0
"""Limit for a request for the server's metadata or schema."""
MESSAGE_LIMIT_BYTES = 16 << 20
"""Limit of one observation."""
OBSERVATION_CHARACTERS = 20_000
"""Limit of one observation in the model's context."""
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
FULL = "CAPACITY_REACHED"
"""Error code of a server without a free session; not a failure: the rollout waits."""
PAUSES = Backoff(first_s=0.1, longest_s=2.0, jitter=0.5)
"""Pauses between attempts to get a session."""
REFUSED_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Error codes that an action can cause; the model receives the message."""
RULES = """{description}

Each of your answers is one action: a JSON object, and nothing else, that fits the schema
{schema}

The first observation is
{observation}"""


class OpenEnvTasks:
    """The seeds of one environment, unlimited on both sides; implements :class:`~etude.protocols.TaskFamily`."""

    def __init__(self, options: OpenEnvOptions, context: FamilyContext) -> None:
        """Request the server's metadata. Raises :class:`~etude.errors.ConfigError` if no server answers."""
        url = _root(options)
        try:
            with urllib.request.urlopen(f"{url}/metadata", timeout=METADATA_TIMEOUT_S) as answer:
                metadata = json.load(answer)
            self._name, self._description = str(metadata["name"]), str(metadata["description"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"no OpenEnv server answers at tasks.options.url = {options.url!r} ({type(error).__name__}: {error}): "
                f"start it first, or correct the URL"
            ) from error
        self._heldout_every = context.heldout_every

    def size(self, split: Split) -> int | None:
        """None: the supply of seeds is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """One seed in ``tasks.heldout_every`` is held out, beginning with 0; training uses the others in order."""
        every = self._heldout_every
        seed = index * every if split is Split.HELDOUT else index + index // (every - 1) + 1
        card = Card(environment=self._name, index=seed, name=f"seed {seed}", prompt=self._description)
        return card.task(FAMILY, split)


class OpenEnvHarness:
    """Plays episodes of one environment; implements :class:`~etude.protocols.Harness`."""

    def __init__(self, options: OpenEnvHarnessOptions, context: HarnessContext) -> None:
        assert isinstance(context.tasks.options, OpenEnvOptions), "the recipe checks it"
        self._url = _root(context.tasks.options)
        self._options = options
        self._http = context.http
        self._model = CompletionClient(
            context.http, max_tokens=options.max_tokens_per_turn, timeout_s=options.turn_timeout_s
        )
        self._schema: Json = None

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Play one episode and write the sum of its rewards into ``sandbox``, with the part ``steps``.

        The reason is ``submit`` when the environment reports its end, ``turns`` after ``max_steps`` answers, and
        ``context`` when the conversation is too long. Counts ``steps``, and ``malformed`` for invalid actions. Raises
        :class:`~etude.errors.SandboxError` when the server fails, and the errors of the model client.
        """
        try:
            self._schema = self._schema or await self._action_schema()
            return await self._play_in_turn(task, session, sandbox, temperature)
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxError(f"the environment at {self._url} is gone: {type(error).__name__}: {error}") from error

    async def _play_in_turn(self, task: Task, session: Session, sandbox: Sandbox, temperature: float) -> HarnessResult:
        """Play as soon as the server has a free session: it reports a lack of sessions before the episode starts."""
        loop, url = asyncio.get_running_loop(), self._url.replace("http", "ws", 1) + "/ws"
        deadline_s = loop.time() + self._options.wait_timeout_s
        for pause_s in PAUSES.delays():
            try:
                async with self._http.ws_connect(url, max_msg_size=MESSAGE_LIMIT_BYTES) as socket:
                    episode = _Episode(socket, self._options.step_timeout_s)
                    return await self._play(episode, task, session, sandbox, temperature)
            except _ServerFullError as error:
                if loop.time() + pause_s > deadline_s:
                    raise SandboxError(
                        f"the environment at {self._url} had no session within harness.options.wait_timeout_s = "
                        f"{self._options.wait_timeout_s:g} ({error}): let it have more (max_concurrent_envs), or lower "
                        f"rollouts.concurrency"
                    ) from error
            await asyncio.sleep(pause_s)
        raise AssertionError("delays have no end")

    async def _play(
        self, episode: "_Episode", task: Task, session: Session, sandbox: Sandbox, temperature: float
    ) -> HarnessResult:
        seed = index_of(task, FAMILY)
        state = await episode.ask("reset", {"seed": seed, "episode_id": session.session_id})
        if isinstance(state, str):
            raise SandboxError(f"the environment at {self._url} cannot begin with seed {seed}: {state}")
        total = state.reward
        messages: list[Message] = [{"role": "user", "content": self._rules(task, state.observation)}]
        counts: Counter[str] = Counter()
        reason = "turns"
        while not state.done and counts.total() < self._options.max_steps:
            output = await self._model.complete(session, messages, temperature=temperature)
            if output.finish == "context":
                reason = "context"
                break
            messages.append({"role": "assistant", "content": output.text})
            action = read_action(output.text)
            answer = await episode.ask("step", action) if action is not None else "expected one JSON object"
            counts["malformed" if isinstance(answer, str) else "steps"] += 1
            if not isinstance(answer, str):
                state = answer
                total += state.reward
            messages.append({"role": "user", "content": answer if isinstance(answer, str) else _show(answer)})
        await leave_outcome(sandbox, total, {"steps": float(counts["steps"])})
        return HarnessResult(reason="submit" if state.done else reason, counts=counts)

    def _rules(self, task: Task, observation: Json) -> str:
        return RULES.format(
            description=task.prompt,
            schema=json.dumps(self._schema),
            observation=json.dumps(observation)[:OBSERVATION_CHARACTERS],
        )

    async def _action_schema(self) -> Json:
        """The JSON schema of actions. Raises :class:`~etude.errors.SandboxError` if the answer has none."""
        async with asyncio.timeout(METADATA_TIMEOUT_S), self._http.get(self._url + "/schema") as response:
            response.raise_for_status()
            answer = await response.json()
        try:
            schema: Json = answer["action"]
        except (LookupError, TypeError) as error:
            raise SandboxError(f"the environment at {self._url} gives no schema of its actions: {error!r}") from error
        return schema


class _ServerFullError(Exception):
    """The server has no free session."""


class _State:
    """Answer of an environment to a reset or a step."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.observation: Json = data["observation"]
        self.reward = float(data.get("reward") or 0.0)
        self.done = bool(data.get("done"))


class _Episode:
    """One connection: each request has one answer."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: Literal["reset", "step"], data: Mapping[str, Json]) -> _State | str:
        """The next state, or the environment's error message for an invalid action.

        Raises :class:`_ServerFullError`, and :class:`~etude.errors.SandboxError` for any other failure.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._socket.receive()
        except TimeoutError:
            raise SandboxError(f"the environment did not answer a {kind} within {self._timeout_s:g} s") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise SandboxError(f"the environment hung up on a {kind}: {message.type.name}")
        try:
            answer = json.loads(message.data)
            if answer["type"] == "error" and answer["data"].get("code") in REFUSED_ACTION:
                return f"{answer['data']['code']}: {answer['data'].get('errors') or answer['data'].get('message')}"
            if answer["type"] == "error" and answer["data"].get("code") == FULL:
                raise _ServerFullError(answer["data"].get("message"))
            if answer["type"] == "observation":
                return _State(answer["data"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SandboxError(f"the environment's answer to a {kind} is unreadable: {error}") from error
        raise SandboxError(f"the environment answered a {kind} with {str(answer)[:300]}")


def read_action(text: str) -> dict[str, Json] | None:
    """Parse the JSON object of an answer, fenced or not.

    Returns ``None`` if it is no object, or one that cannot be sent: nested more than 254 levels deep, so that an
    environment's echo of it could not be parsed.
    """
    fenced = FENCE.findall(text)
    try:
        action = json.loads(fenced[-1] if fenced else text)
        orjson.dumps(action)
    except (ValueError, TypeError, RecursionError):
        return None
    return action if isinstance(action, dict) else None


def _root(options: OpenEnvOptions) -> str:
    """The base URL of the protocol's paths."""
    return options.url.rstrip("/")


def _show(state: _State) -> str:
    return json.dumps(state.observation)[:OBSERVATION_CHARACTERS]
