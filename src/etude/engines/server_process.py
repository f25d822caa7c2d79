"""A third-party engine server as a child process: its interpreter, start, log and end.

    checkpoint ──▶ ServerProcess ──log──▶ folder of logs         ends with this process, even if that is killed
                        └─ health ◀── ready                      (engines/process_guard.py)

Such a server has its own Python environment, because its dependencies conflict with étude's; étude never imports it.
Owns the process; each engine kind owns the command line and the protocol.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import orjson

from etude.config.inference import Argument
from etude.engines import process_guard
from etude.engines.api_client import LOAD_S, ApiClient, RequestLimits
from etude.errors import ConfigError, EngineUnavailable, UserError
from etude.models.checkpoint import CONFIG_FILE
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.state import State

HOST = "127.0.0.1"
"""The server takes commands that load files and run code: it listens to this machine only."""
WATCH_S = 0.2
"""Seconds between two checks whether the server runs."""
START_S = 1800.0
"""Longest time for a server to import and compile, in addition to loading its checkpoint: half a minute on two cores
for a small model, many minutes for a large one on a GPU. A server that exits is noticed at once.
"""
SLOW_DISK_BYTES_PER_S = 100e6
"""Speed of a heavily shared disk: the slowest that deadlines allow for."""
TAIL_BYTES = 4000
"""Length of the end of the log in the error of a failed start."""
STOP_S = 7.0
"""Time in which all of its processes have to end: longer than the guard waits before it kills them, and less than this
process has itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The command line of a server, and what it needs to be run."""

    name: str
    """Name of the program in messages, e.g. ``vLLM``; in lower case, that of its log."""
    argv: Sequence[str]
    environment: Mapping[str, str]
    port: int


@final
class ServerProcess:
    """A running server and its log; the server ends with this process, even if that is killed."""

    def __init__(self, command: ServerCommand, folder: Path) -> None:
        """Start it. ``folder`` gets its log."""
        self.name = command.name
        self.base_url = f"http://{HOST}:{command.port}"
        self.log = folder / f"{command.name.lower()}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, process_guard.__file__, *command.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(command.environment),
                process_group=0,  # this process handles Ctrl-C; docs/engines.md says why it is no new session
            )

    @property
    def pid(self) -> int:
        """Process id of the guard that holds it."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the server ends."""
        return self._process.poll() is None

    async def ready(self, client: ApiClient, timeout_s: float) -> None:
        """Wait until it answers.

        Raises :class:`~etude.errors.EngineUnavailable` with the end of its log if it ends first or takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if not self.is_running:
                raise EngineUnavailable(
                    f"{self.name} ended with {self._process.returncode} as it started:\n{self._tail()}"
                )
            try:
                await client.text("/health")
                return
            except EngineUnavailable as error:
                if time.monotonic() > deadline_s:
                    raise EngineUnavailable(
                        f"{self.name} is not healthy after {timeout_s:g} s; its log ends\n{self._tail()}"
                    ) from error
            await sleep(WATCH_S)

    async def start_engine(self, client: ApiClient, load_s: float, start: Callable[[], Awaitable[None]]) -> None:
        """Wait until the server answers, then ``start`` the engine on it, which verifies version and weights.
        ``load_s`` is the time limit for loading its weights. Raises :class:`~etude.errors.ConfigError` if either fails:
        with the same settings it would fail again.
        """
        try:
            await self.ready(client, START_S + load_s)
            await start()
        except EngineUnavailable as error:
            raise ConfigError(f"{self.name} cannot serve this run: {error}; see {self.log}") from error

    async def watch(self) -> None:
        """Raise :class:`~etude.errors.EngineUnavailable` once the server ends."""
        while self.is_running:
            await sleep(WATCH_S)
        raise EngineUnavailable(f"{self.name} ended: see {self.log}")

    def stop(self) -> None:
        """End it and all its children; calling it twice is harmless."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")


@final
@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes weight states as Hugging Face checkpoints."""

    config: Path
    """The file that describes the model."""
    scratch: Path

    def write(self, state: State) -> Path:
        """Write a published state as a checkpoint and return its folder; the previous one is removed."""
        target = self.scratch / "model"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        shutil.copy(self.config, target / CONFIG_FILE)
        write_checkpoint(target, state)
        return target


def find_interpreter(configured: str, *, variable: str, default: str, missing: str) -> Path:
    """The interpreter of a server's environment: the configured one, that of an environment variable, or ``default`` in
    the current folder. Raises :class:`~etude.errors.UserError` if there is none, with the text ``missing``: the problem
    and its fix.
    """
    path = Path(configured or os.environ.get(variable) or default).absolute()
    if not path.exists():
        raise UserError(missing.format(path=path))
    return path


def without_our_python(inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for another environment's Python, without those of the current one."""
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}


def to_flags(arguments: Mapping[str, Argument]) -> tuple[str, ...]:
    """Arguments of a command line: ``--name value``, tables as JSON; true is a flag, false is omitted."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", orjson.dumps(value).decode() if isinstance(value, dict) else str(value)]
    return tuple(words)


def limits_of(model: Path, max_length: int) -> RequestLimits:
    """The request limits of a server of a checkpoint.

    Raises :class:`~etude.errors.UserError` if the checkpoint has no readable config.
    """
    file = model / CONFIG_FILE
    try:
        vocab_size = int(orjson.loads(file.read_bytes())["vocab_size"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not say vocab_size: {type(error).__name__}: {error}") from error
    size_bytes = sum(weights.stat().st_size for weights in model.glob("*.safetensors"))
    return RequestLimits(
        vocab_size=vocab_size, max_length=max_length, load_s=LOAD_S + size_bytes / SLOW_DISK_BYTES_PER_S
    )


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
