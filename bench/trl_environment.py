"""The programs of other libraries that `bench loop` and `bench trainer` measure beside ours.

    bench ──setup, answers──▶ program ──a line of JSON each──▶ bench

TRL and transformers' ``Trainer`` live in an environment of their own (``constraints-trl.txt``): nothing that étude is
needs them. Such a program is a module of this package that imports the standard library and what it measures, so that
étude itself need not be installed there. What libraries print goes to a log, whose tail is in the error when a program
fails; a program ends when its input does, so none outlives its caller.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, final

from bench.programs import environment
from etude.errors import InfrastructureError
from etude.types import Json

VARIABLE = "ETUDE_TRL_PYTHON"
"""Environment variable with the path of its interpreter."""
PYTHON = Path(".venv-trl/bin/python")
"""Default interpreter, relative to the current folder."""
LINE_BYTES = 1 << 24
"""Longest message."""
END_DEADLINE_S = 10.0
LOG_TAIL_BYTES = 1500
QUIET: Final[Mapping[str, str]] = {
    "GOMP_SPINCOUNT": "1000",  # idle threads that spin would slow down the program that they belong to
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Variables that every program gets."""


def trl_python() -> Path:
    """The interpreter of TRL's environment. Raises :class:`~etude.errors.InfrastructureError` if there is none."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else PYTHON
    if not python.is_file():
        raise InfrastructureError(
            f"not measured: there is no {python}. `make bench-setup` installs constraints-trl.txt into "
            f"{PYTHON.parents[1]}; or name an interpreter that has TRL in {VARIABLE}"
        )
    return python.absolute()


@final
class Rival:
    """A running program."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._name = name
        self._process = process
        self._requests, self._answers = process.stdout, process.stdin
        self._log = log

    async def receive(self, deadline_s: float) -> dict[str, Json] | None:
        """The next message; ``None`` once the program has ended successfully.

        Raises :class:`~etude.errors.InfrastructureError` if it failed or sends nothing for ``deadline_s``.
        """
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._requests.readline()
        except TimeoutError as error:
            raise self._failure(f"no message for {deadline_s:g} s") from error
        if line:
            message = json.loads(line)
            assert isinstance(message, dict)
            return message
        status = await self._ended()
        if status != 0:
            raise self._failure(f"ended with status {status}")
        return None

    async def answer(self, message: Mapping[str, Json]) -> None:
        """Send a message to it. Raises :class:`~etude.errors.InfrastructureError` if it no longer reads."""
        self._answers.write(json.dumps(message).encode() + b"\n")
        try:
            await self._answers.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            await self._ended()
            raise self._failure("ended") from error

    async def _ended(self) -> int:
        self._answers.close()
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    def _failure(self, what: str) -> InfrastructureError:
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        sys.stderr.write(f"{tail}\n")
        return InfrastructureError(f"{self._name} {what}: {tail.splitlines()[-1] if tail else 'it printed nothing'}")


@contextlib.asynccontextmanager
async def open_rival(
    module: str, setup: Mapping[str, Json], *, python: Path, threads: int, log: Path
) -> AsyncIterator[Rival]:
    """Run ``python -m bench.MODULE SETUP`` for as long as the context is open."""
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-m", f"bench.{module}", json.dumps(dict(setup))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env={**environment(), **QUIET, **counts},
            limit=LINE_BYTES,
        )
    try:
        yield Rival(module, process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
