"""The process of a ``verifiers`` environment: its command, its requests and answers, its end.

    list_tasks ──▶ a process for one request         EnvironmentProcess ──▶ a process for many concurrent rollouts

The package has its own Python because it has many dependencies; étude never imports it. The environment's code is
trusted like any installed program: it does not run in a sandbox.

States of a process: new ──open──▶ open ──close──▶ closed. Each answer has a deadline. On shutdown the process has
limited time to end; then it is killed together with the processes that it started.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from etude.config.tasks import VerifiersOptions
from etude.errors import ConfigError, SandboxError
from etude.tasks.outcomes import Card
from etude.tasks.verifiers import program
from etude.types import Json

PYTHON_VARIABLE = "ETUDE_VERIFIERS_PYTHON"
"""Environment variable with the path of the package's Python interpreter."""
OPEN_TIMEOUT_S = 600.0
"""Limit for importing the package and listing tasks: usually seconds, longer on a busy machine or for large data."""
CLOSE_TIMEOUT_S = 5.0
POLL_S = 0.05
"""Interval of checks whether the process has ended."""
LOG_S = 1.0
"""Limit for reading the rest of its output."""
LOG_LINES = 40
"""Last lines of the process's output, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCommand:
    """The command that runs an environment."""

    name: str
    """The environment's name."""
    argv: Sequence[str]
    variables: Mapping[str, str]
    max_tasks: int

    @classmethod
    def of(cls, options: VerifiersOptions, folder: str) -> "EnvironmentCommand":
        """The command of a recipe; ``folder`` contains modules that are not installed.

        Raises :class:`~etude.errors.ConfigError` if there is no interpreter.
        """
        python = Path(options.python or os.environ.get(PYTHON_VARIABLE) or ".venv-environments/bin/python").absolute()
        if not python.exists():
            raise ConfigError(
                f"no verifiers: {python} is missing; `make .venv-environments/stamp` installs the package, or name a "
                f"Python that has it in tasks.options.python or {PYTHON_VARIABLE}"
            )
        # By default the package runs an agent in a container or machine of its own; a subprocess is enough here.
        agent = {"runtime": {"type": "subprocess"}, **options.agent}
        settings = {"taskset": {**options.args, "id": options.env}, "agent": agent}
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        if folder:
            variables["PYTHONPATH"] = str(Path(folder).absolute())
        return cls(
            name=options.env,
            argv=(str(python), "-P", str(Path(program.__file__)), json.dumps(settings)),
            variables=variables,
            max_tasks=options.max_tasks,
        )

    @property
    def list_request(self) -> dict[str, Json]:
        """The request for the list of tasks."""
        return {"do": "list", "limit": self.max_tasks}


def list_tasks(command: EnvironmentCommand) -> list[Card]:
    """The tasks of an environment, in its order.

    Raises :class:`~etude.errors.ConfigError` with its output for an environment that cannot be opened.
    """
    request = json.dumps({"id": 0, **command.list_request}).encode() + b"\n"
    try:
        done = subprocess.run(
            command.argv, input=request, capture_output=True, env=command.variables, timeout=OPEN_TIMEOUT_S, check=False
        )
        lines = done.stderr.decode(errors="replace").splitlines()[-LOG_LINES:]
        printed = "\n".join([f"its process ended with exit code {done.returncode}; it said:", *lines])
    except subprocess.TimeoutExpired:
        done, printed = None, f"it did not list its tasks within {OPEN_TIMEOUT_S:g} s"
    if done is None or done.returncode or not done.stdout.strip():
        raise ConfigError(f"the environment tasks.options.env = {command.name!r} cannot be opened: {printed}")
    return [Card(environment=command.name, **entry) for entry in json.loads(done.stdout)["tasks"]]


class EnvironmentProcess:
    """One process of an environment, which runs its tasks."""

    def __init__(self, command: EnvironmentCommand) -> None:
        self._command = command
        self._process: Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Json]]] = {}
        self._numbers = itertools.count()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def is_running(self) -> bool:
        """True until the process ends or is closed."""
        return self._process is not None and not self._readers[0].done()

    async def open(self) -> None:
        """Start the process and load its tasks. Raises :class:`~etude.errors.SandboxError` with its log."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command.argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._command.variables,
            limit=program.LINE_LIMIT_BYTES,
            start_new_session=True,  # one process group with the processes of its agents
        )
        self._readers = [asyncio.create_task(self._read_answers()), asyncio.create_task(self._read_log())]
        try:
            await self.ask(self._command.list_request, OPEN_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the process; calling it twice is harmless."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await self._end(process)
        for reader in self._readers:
            reader.cancel()  # a process outside the group may keep a pipe open forever
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def ask(self, request: Mapping[str, Json], timeout_s: float) -> dict[str, Json]:
        """The answer to one request. Raises :class:`~etude.errors.SandboxError` if there is none."""
        process = self._process
        if process is None or process.stdin is None:
            raise SandboxError(f"the environment {self._command.name!r} is not open")
        if self._readers[0].done():
            raise self._ended(process)
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Json]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            with suppress(ConnectionError):  # the error of the answer then reports the end of the process
                await process.stdin.drain()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise SandboxError(
                f"{self._command.name!r} did not answer within {timeout_s:g} s; {self._log_text()}"
            ) from None
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
        """Wait for the process to end, kill the rest of its group, and read the rest of its log.

        ``Process.wait`` alone would wait until every process has closed the pipes.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CLOSE_TIMEOUT_S
        while process.returncode is None and loop.time() < deadline_s:
            await asyncio.sleep(POLL_S)
        with suppress(ProcessLookupError):  # the group may be empty
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait({self._readers[1]}, timeout=LOG_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOG_S):
                await process.wait()

    def _ended(self, process: Process) -> SandboxError:
        return SandboxError(f"its process ended with exit code {process.returncode}; {self._log_text()}")

    def _log_text(self) -> str:
        return "it said:\n" + "\n".join(self._log)
