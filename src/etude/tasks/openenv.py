"""Environments with OpenEnv's protocol (reset, step, reward): étude's model acts, the environment grades.

    étude's task ──▶ OpenEnvEnvironment.run ──WebSocket /ws──▶ server of the environment
                            │ observation ──▶ model ──▶ action, as JSON ──▶ step … until done
                            └── sum of the rewards ──▶ outcome ──▶ OpenEnvEnvironment.grade

A connection is an episode with an environment of its own; the protocol's plain ``/reset`` and ``/step`` keep nothing
between calls, so they are not used. A task is a seed. Owns the conversation: one message with the rules and the first
observation, then an action and an observation in turn. The server is not ours: it is started and stopped elsewhere.

The protocol: https://github.com/meta-pytorch/OpenEnv, as in ``openenv-core`` 0.3.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import aiohttp
import orjson

from etude.errors import ConfigError, SandboxError
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.tasks.outcomes import Card, index_of, leave_outcome, take_outcome
from etude.types import Json, Split, Task

FAMILY = "openenv"
HELDOUT_SEEDS = 1000
"""Seeds below this are held out; training begins with this one."""
MESSAGE_LIMIT_BYTES = 16 << 20
"""Limit of one observation."""
OBSERVATION_CHARACTERS = 20_000
"""Limit of one observation, as the model sees it."""
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
REFUSED_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Errors that an action can cause; the model is told."""
RULES = """{description}

Each of your answers is one action: a JSON object, and nothing else, that fits the schema
{schema}

The first observation is
{observation}"""

Message: TypeAlias = Mapping[Literal["role", "content"], str]
"""One message of a conversation, as the API has it."""


class ModelReply(Protocol):
    """Protocol of a model's reply; :class:`~etude.harnesses.completions.CompletionReply` is one."""

    @property
    def text(self) -> str:
        """Its words."""
        ...

    @property
    def finish(self) -> Literal["stop", "length", "context"]:
        """Reason for which it stopped; after ``context`` it cannot be asked again."""
        ...


class Model(Protocol):
    """Protocol of a model client; :class:`~etude.harnesses.completions.CompletionClient` is one."""

    async def complete(self, session: Session, messages: Sequence[Message], *, temperature: float) -> ModelReply:
        """The next message of a conversation. Raises kinds of :class:`~etude.errors.InfrastructureError`."""
        ...


class OpenEnvEnvironment:
    """One environment server as family, harness and grader; implements :class:`~etude.protocols.TaskFamily`,
    :class:`~etude.protocols.Harness` and :class:`~etude.protocols.Grader`.
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, model: Model, *, max_steps: int = 50, timeout_s: float = 60.0
    ) -> None:
        """``url`` is the server's, such as ``http://127.0.0.1:8000``; ``http`` and ``model`` stay the caller's.

        An episode ends after ``max_steps`` actions; the server has ``timeout_s`` for each answer.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of an OpenEnv server: expected http://host:port")
        self._url = url.rstrip("/")
        self._http = http
        self._model = model
        self._max_steps = max_steps
        self._timeout_s = timeout_s
        self._name = self._description = ""
        self._schema: Json = None

    async def open(self) -> None:
        """Ask the server who it is. Raises :class:`~etude.errors.ConfigError` where none answers."""
        try:
            metadata = await self._get("/metadata")
            self._schema = (await self._get("/schema"))["action"]
            self._name = str(metadata["name"])
            self._description = str(metadata["description"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"no OpenEnv server answers at {self._url} ({type(error).__name__}: {error}): start it first"
            ) from error

    def size(self, split: Split) -> int | None:
        """``HELDOUT_SEEDS`` seeds are held out; the others have no end."""
        return HELDOUT_SEEDS if split is Split.HELDOUT else None

    def task(self, split: Split, index: int) -> Task:
        """Seed number ``index`` of a split."""
        seed = index if split is Split.HELDOUT else HELDOUT_SEEDS + index
        card = Card(environment=self._name, index=seed, name=f"seed {seed}", prompt=self._description)
        return card.task(FAMILY, split)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Play one episode and leave the sum of its rewards in ``sandbox``.

        ``submit`` when the environment says that it is done, ``turns`` after the last action, ``context`` when the
        conversation is too long. Counts ``steps``, and ``malformed`` answers that are no action. Raises
        :class:`~etude.errors.SandboxError` when the server fails, and what asking the model raises.
        """
        try:
            async with self._http.ws_connect(
                self._url.replace("http", "ws", 1) + "/ws", max_msg_size=MESSAGE_LIMIT_BYTES
            ) as socket:
                return await self._play(_Episode(socket, self._timeout_s), task, session, sandbox, temperature)
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxError(f"the environment at {self._url} is gone: {type(error).__name__}: {error}") from error

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """The environment's reward, which may be any finite number; ``steps`` is the one part."""
        return await take_outcome(sandbox)

    async def _play(
        self, episode: "_Episode", task: Task, session: Session, sandbox: Sandbox, temperature: float
    ) -> HarnessResult:
        seed = index_of(task, FAMILY)
        state = await episode.ask("reset", {"seed": seed, "episode_id": session.session_id})
        if isinstance(state, str):
            raise SandboxError(f"the environment at {self._url} cannot begin with seed {seed}: {state}")
        total = state.reward
        messages: list[Message] = [{"role": "user", "content": self._rules(state.observation)}]
        counts: Counter[str] = Counter()
        reason = "turns"
        while not state.done and counts.total() < self._max_steps:
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

    def _rules(self, observation: Json) -> str:
        return RULES.format(
            description=self._description,
            schema=json.dumps(self._schema),
            observation=json.dumps(observation)[:OBSERVATION_CHARACTERS],
        )

    async def _get(self, path: str) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout_s), self._http.get(self._url + path) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


class _State:
    """Answer of an environment to a reset or a step."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.observation: Json = data["observation"]
        self.reward = float(data.get("reward") or 0.0)
        self.done = bool(data.get("done"))


class _Episode:
    """One connection: a question, an answer."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: Literal["reset", "step"], data: Mapping[str, Json]) -> _State | str:
        """The state that follows, or in which words the environment turned an action down.

        Raises :class:`~etude.errors.SandboxError` for anything else.
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
            if answer["type"] == "observation":
                return _State(answer["data"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SandboxError(f"the environment's answer to a {kind} is unreadable: {error}") from error
        raise SandboxError(f"the environment answered a {kind} with {str(answer)[:300]}")


def read_action(text: str) -> dict[str, Json] | None:
    """The JSON object that an answer is, be it fenced; ``None`` if it is none, or one that cannot be sent: nested more
    than 254 levels deep, so that an environment's echo of it could not be read.
    """
    fenced = FENCE.findall(text)
    try:
        action = json.loads(fenced[-1] if fenced else text)
        orjson.dumps(action)
    except (ValueError, TypeError, RecursionError):
        return None
    return action if isinstance(action, dict) else None


def _show(state: _State) -> str:
    return json.dumps(state.observation)[:OBSERVATION_CHARACTERS]
