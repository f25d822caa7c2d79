"""Third-party environments for tests: the Python that has their packages, one of ``verifiers``, a server of OpenEnv."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-environments" / "bin" / "python"
"""The Python of the real packages."""
real = pytest.mark.heavy("verifiers and openenv-core: make .venv-environments/stamp", missing=not PYTHON.exists())

VERIFIERS = """
import httpx
import verifiers.v1 as vf

__all__ = ["Asking", "Sums"]


class SumsConfig(vf.TasksetConfig):
    step: int = 1


class Sum(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        print("what environments print is no answer")
        return float(trace.last_reply == str(eval(self.data.prompt)))

    @vf.reward
    async def variety(self, trace: vf.Trace) -> float:
        return len(set(trace.last_reply)) / max(1, len(trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            yield Sum(vf.TaskData(prompt=f"{number} + {self.config.step}", name=f"sum {number}"), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}], "max_tokens": 8}
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}, timeout=120
            )
        return vf.ProgramResult(exit_code=0 if answer.status_code == 200 else 1, stdout="", stderr=answer.text)
"""
"""A taskset without an end, made in memory, and the agent that comes with it: one call of the model."""

OPENENV = '''
import socket
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """Guess a number from 0 to 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._secret, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._secret, self._state = seed % 100, State(episode_id=episode_id)
        return Hint(hint="guess", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == self._secret:
            return Hint(hint="yes", done=True, reward=1.0)
        return Hint(hint="higher" if action.number < self._secret else "lower", done=False, reward=-0.01)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Guessing, Guess, Hint)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
'''
"""A server of OpenEnv's own classes."""


def write_verifiers(folder: Path) -> Path:
    """A folder with the environment ``etude_sums``."""
    folder.mkdir()
    (folder / "etude_sums.py").write_text(VERIFIERS, encoding="utf-8")
    return folder


@contextmanager
def openenv_server(folder: Path) -> Iterator[str]:
    """A server, and its URL."""
    (folder / "server.py").write_text(OPENENV, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with subprocess.Popen([PYTHON, "server.py"], cwd=folder, env=variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(60)
