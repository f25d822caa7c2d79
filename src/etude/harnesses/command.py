"""Harness for any agent that is a program: it runs unchanged in a sandbox and finds the model at the usual base URL.

    command {prompt} … ──OpenAI or Anthropic HTTP──▶ the gateway, the only address that its sandbox may reach

Owns the command line, the environment variables with which common clients find their model, and the meaning of the
program's exit. Does not see the conversation: the gateway records it. Does not grade.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence

import aiohttp
import orjson

from etude.config.rollouts import PLACEHOLDERS, CommandOptions
from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.harnesses.completions import MODEL, HarnessContext
from etude.protocols import ExecResult, HarnessResult, Sandbox, Session
from etude.sandbox_spec import WORKDIR
from etude.sandboxes.folder_sandbox import ARGUMENT_LIMIT_BYTES
from etude.types import Task

SUBMIT, TIMEOUT = "submit", "timeout"
"""Stop reasons: an exit with a success code, and the time limit. Any other exit is ``exit N``."""
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""Limit for the gateway's answer about the queue times of a session."""
WAITED_SHARE = 0.1
"""Share of the time limit. A program that timed out after its calls had waited longer than this for an engine might
have finished without the wait, so the rollout is retried; the milliseconds of a normal queue are no reason to retry.
"""
LAST_CALLS, LAST_CALL_S = 20, 0.1
"""Largest number of requests to the gateway until the last calls have ended, and the pause between them."""
PRINTED_CHARACTERS = 500
"""Recorded characters of the end of a program's output."""
FILLED_IN = re.compile("{(" + "|".join(PLACEHOLDERS) + ")}")


class CommandHarness:
    """Runs one program per rollout; implements :class:`~etude.protocols.Harness`.

    ``workdir`` is the working folder in a sandbox; a session's URL is the same inside and outside.
    """

    def __init__(self, config: CommandOptions, http: aiohttp.ClientSession, *, workdir: str) -> None:
        """``http`` is shared by all sessions; the caller closes it."""
        self._config = config
        self._http = http
        self._workdir = workdir

    @classmethod
    def open(cls, options: CommandOptions, context: HarnessContext) -> "CommandHarness":
        """The harness of a recipe."""
        return cls(options, context.http, workdir=WORKDIR)

    async def check(self, sandbox: Sandbox) -> None:
        """Raise :class:`~etude.errors.ConfigError` if the sandbox does not have the program."""
        program = self._config.command[0]
        variables = [f"{name}={text}" for name, text in self._config.environment.items()]
        result = await sandbox.exec(["env", *variables, "sh", "-c", 'command -v -- "$0" >/dev/null', program])
        if result.exit_code != 0:
            raise ConfigError(
                f"harness.options.command: there is no program {program!r} in a sandbox; install it, and name its "
                f"folder in harness.options.mounts = {list(self._config.mounts)!r}"
            )

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Run the program until it exits or reaches the time limit.

        The reason is ``submit`` for one of the recipe's success codes, ``timeout`` at the time limit, and ``exit N``
        for any other exit. All of these are graded, including 126 and 127: :meth:`check` has shown that the program can
        be started, so they may be the exit codes of its agent's last command. Does not count the agent's actions.
        Raises :class:`~etude.errors.ConfigError` for a prompt that is too long for a command line, and
        :class:`~etude.errors.EngineUnavailable` or :class:`~etude.errors.SessionLost` if the model may not be the cause
        of a failure: the gateway is unavailable or does not know the session, the last call found no engine, or the
        program timed out after its calls had waited longer than ``WAITED_SHARE`` of the limit.
        """
        values = {
            "prompt": task.prompt,
            "model": MODEL,
            "temperature": f"{temperature:g}",
            "base_url": session.base_url,
            "workdir": self._workdir,
        }
        variables = client_variables(session.base_url, session.api_key) | {
            name: fill_in(text, values) for name, text in self._config.environment.items()
        }
        argv = [
            "env",
            *(f"{name}={text}" for name, text in variables.items()),
            *(fill_in(text, values) for text in self._config.command),
        ]
        _check_length(argv, task)
        result = await sandbox.exec(argv, timeout_s=self._config.timeout_s)
        reason = judge_end(result, self._config.success_codes)
        await self._check_service(session, reason)
        return HarnessResult(reason=reason, counts={}, printed=last_words(result))

    async def _check_service(self, session: Session, reason: str) -> None:
        """Check that engines answered. The calls of a killed program end shortly after it."""
        times = await self._queue_time(session)
        for _ in range(LAST_CALLS):
            if not times["calls"]:
                break
            await asyncio.sleep(LAST_CALL_S)
            times = await self._queue_time(session)
        if times["unserved"]:
            raise EngineUnavailable(f"the harness ended ({reason}) after a call for which there was no engine")
        if reason == TIMEOUT and times["waited_s"] > WAITED_SHARE * self._config.timeout_s:
            raise EngineUnavailable(
                f"the harness ran out of its {self._config.timeout_s:g} s, of which its calls waited for an engine for "
                f"{times['waited_s']:.1f} s"
            )

    async def _queue_time(self, session: Session) -> dict[str, float]:
        url = f"{session.base_url}/queue_time"
        headers = {"Authorization": f"Bearer {session.api_key}"}
        try:
            async with self._http.get(url, headers=headers, timeout=PROBE_TIMEOUT) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"the harness ended, and {url} fails: {type(error).__name__}") from error
        if status in (401, 404):
            raise SessionLost(f"the harness ended, and {url} knows no such session (any more): HTTP {status}")
        if status != 200:
            raise EngineUnavailable(f"the harness ended, and {url} fails: HTTP {status}")
        times: dict[str, float] = orjson.loads(body)
        return times


def judge_end(result: ExecResult, success_codes: tuple[int, ...]) -> str:
    """The stop reason of a finished program."""
    if result.timed_out:
        return TIMEOUT
    return SUBMIT if result.exit_code in success_codes else f"exit {result.exit_code}"


def last_words(result: ExecResult) -> str:
    """The end of a program's output, errors last, as one line without terminal control codes."""
    printed = f"{result.stdout[-PRINTED_CHARACTERS:]}\n{result.stderr[-PRINTED_CHARACTERS:]}"
    plain = "".join(letter if letter.isprintable() else " " for letter in printed)
    return " ".join(plain.split())[-PRINTED_CHARACTERS:]


def client_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Environment variables with which the clients of OpenAI, Anthropic and LiteLLM find a model."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of ``text`` in one pass: braces in a prompt stay unchanged."""
    return FILLED_IN.sub(lambda match: values[match[1]], text)


def _check_length(argv: Sequence[str], task: Task) -> None:
    """Refuse a command line that is too long; unlike a sandbox's error, the message names the task."""
    size_bytes = sum(len(argument.encode("utf-8", "surrogatepass")) + 1 for argument in argv)
    if size_bytes > ARGUMENT_LIMIT_BYTES:
        raise ConfigError(
            f"harness.options.command has {size_bytes} bytes with the prompt of task {task.task_id} ({task.template}) "
            f"filled in, at most {ARGUMENT_LIMIT_BYTES}: leave the task out, or set harness.kind = 'coding'"
        )
