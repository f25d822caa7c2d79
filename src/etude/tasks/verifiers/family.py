"""Environments of the ``verifiers`` package, run as they are: their tasks, their agents, their rewards.

    étude's task ──▶ VerifiersEnvironment.run ──▶ process with verifiers ──▶ its harness ──OpenAI──▶ our gateway
                                                        └── reward ──▶ outcome ──▶ VerifiersEnvironment.grade

The package has a Python of its own (``python``), since it brings many others along; étude never imports it. Owns that
process. The environment's own code is trusted as any installed program is: it is not in a sandbox.

States of an environment: new ──open──▶ open ──close──▶ closed. Waits for each answer with a deadline; on shutdown the
process is given time to end, then killed, and with it whatever it left running.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etude.errors import ConfigError, EngineUnavailable, SandboxError
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.tasks.outcomes import Card, index_of, leave_outcome, take_outcome
from etude.tasks.verifiers import program
from etude.types import Json, Split, Task

FAMILY = "verifiers"
MODEL = "policy"
"""The name under which a gateway serves the model that is being trained."""
OPEN_TIMEOUT_S = 300.0
"""For the package to be imported and its tasks to be listed."""
CLOSE_TIMEOUT_S = 5.0
POLL_S = 0.05
"""Seconds between looks whether the process has ended."""
LOG_S = 1.0
"""Seconds that the rest of its output may take to come."""
LOG_LINES = 40
"""Kept of what the process prints, for errors."""


class VerifiersEnvironment:
    """One environment as family, harness and grader; implements :class:`~etude.protocols.TaskFamily`,
    :class:`~etude.protocols.Harness` and :class:`~etude.protocols.Grader`.
    """

    def __init__(
        self,
        settings: Mapping[str, Json],
        *,
        python: str = sys.executable,
        max_tasks: int = 1000,
        timeout_s: float = 1800.0,
    ) -> None:
        """``settings`` is the package's own ``[env]`` block, such as ``{"taskset": {"id": "gsm8k-v1"}}``.

        Its agent runs beside it (runtime ``subprocess``) unless the settings say otherwise. Of its tasks the first
        ``max_tasks`` are used; one rollout has ``timeout_s``.
        """
        taskset = settings.get("taskset")
        if not isinstance(taskset, Mapping) or not isinstance(taskset.get("id"), str):
            raise ConfigError(f"taskset = {taskset!r}: name the environment, as in {{'taskset': {{'id': 'gsm8k-v1'}}}}")
        agent = settings.get("agent")
        agent = dict(agent) if isinstance(agent, Mapping) else {}
        agent.setdefault("runtime", {"type": "subprocess"})
        self._name = str(taskset["id"])
        self._settings = {**settings, "agent": agent}
        self._python = python
        self._max_tasks = max_tasks
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Json]]] = {}
        self._numbers = itertools.count()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._readers: list[asyncio.Task[None]] = []
        self._cards: Mapping[Split, Sequence[Card]] = {}

    async def open(self) -> None:
        """Start the process and list the tasks. Raises :class:`~etude.errors.ConfigError` with its log."""
        self._process = await asyncio.create_subprocess_exec(
            *(self._python, "-P", str(Path(program.__file__)), json.dumps(self._settings)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=program.LINE_LIMIT_BYTES,
            start_new_session=True,  # with what its agents start it is one group
        )
        self._readers = [asyncio.create_task(self._read_answers()), asyncio.create_task(self._read_log())]
        try:
            answer = await self._ask({"do": "list", "limit": self._max_tasks}, OPEN_TIMEOUT_S)
        except SandboxError as error:
            await self.close()
            raise ConfigError(f"the environment {self._name!r} of verifiers cannot be opened: {error}") from error
        except BaseException:
            await self.close()
            raise
        listed = answer["tasks"]
        assert isinstance(listed, list), "the program lists its tasks"
        cards = [Card(environment=self._name, **entry) for entry in listed]  # type: ignore[arg-type]  # see _describe
        self._cards = {split: [card for card in cards if card.split is split] for split in Split}

    async def close(self) -> None:
        """End the process; calling it twice is harmless."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await self._end(process)
        for reader in self._readers:
            reader.cancel()  # a process that has left the group may hold a pipe for ever
        await asyncio.gather(*self._readers, return_exceptions=True)

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._cards.get(split, ()))

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split. ``ValueError`` where a split has none."""
        cards = self._cards.get(split, ())
        if not cards:
            raise ValueError(f"the environment {self._name!r} has no task on the side {split.value!r}: raise max_tasks")
        return cards[index].task(FAMILY, split)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Let the environment's own agent work with the session's model, and leave its reward in ``sandbox``.

        Raises :class:`~etude.errors.EngineUnavailable` when the model could not be reached, and
        :class:`~etude.errors.SandboxError` when the environment failed.
        """
        request: dict[str, Json] = {
            "do": "run",
            "index": index_of(task, FAMILY),
            "base_url": session.base_url,
            "api_key": session.api_key,
            "model": MODEL,
            "temperature": temperature,
        }
        answer = await self._ask(request, self._timeout_s)
        if "error" in answer:
            error = EngineUnavailable if answer["kind"] == "provider" else SandboxError
            raise error(f"the environment {self._name!r} failed in {task.template}: {answer['error']}")
        parts = answer["parts"]
        assert isinstance(parts, dict), "the program names parts"
        numbers = {name: float(str(value)) for name, value in parts.items()}
        await leave_outcome(sandbox, float(str(answer["reward"])), numbers)
        return HarnessResult(reason=str(answer["reason"]), counts={"turns": int(str(answer["turns"]))})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """The environment's reward, which may be any finite number, and its metrics as parts."""
        return await take_outcome(sandbox)

    async def _ask(self, request: dict[str, Json], timeout_s: float) -> dict[str, Json]:
        process = self._process
        if process is None or process.stdin is None:
            raise SandboxError(f"the environment {self._name!r} is not open")
        if self._readers[0].done():
            raise self._ended(process)
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Json]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            with suppress(ConnectionError):  # then the answer says how it ended
                await process.stdin.drain()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise SandboxError(f"{self._name!r} did not answer within {timeout_s:g} s; {self._utterance()}") from None
        finally:
            del self._waiting[number]

    async def _read_answers(self) -> None:
        assert self._process is not None
        process = self._process
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            await self._end(process)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._ended(process))

    async def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(line.decode(errors="replace").rstrip())

    async def _end(self, process: Process) -> None:
        """Wait for the process to end, kill what is left of it, and read the rest of its log.

        ``Process.wait`` alone waits for everybody who holds one of its pipes.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CLOSE_TIMEOUT_S
        while process.returncode is None and loop.time() < deadline_s:
            await asyncio.sleep(POLL_S)
        with suppress(ProcessLookupError):  # nothing may be left
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait({self._readers[1]}, timeout=LOG_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOG_S):
                await process.wait()

    def _ended(self, process: Process) -> SandboxError:
        return SandboxError(f"its process ended with exit code {process.returncode}; {self._utterance()}")

    def _utterance(self) -> str:
        return "it said:\n" + "\n".join(self._log)
