"""Any agent harness that is a program: run as it is, in a sandbox, with a model behind the usual base URL.

    command {prompt} … ──OpenAI or Anthropic HTTP──▶ the one place that its sandbox may reach: the gateway

Owns the command line, the variables by which the common clients find their model, and what the end of the program
means. Knows nothing of the conversation: the gateway records it, whoever leads it. Does not grade.
"""

import re
from collections.abc import Mapping

import aiohttp

from etude.config.rollouts import PLACEHOLDERS, HarnessConfig
from etude.errors import ConfigError, EngineUnavailable, SandboxError, SessionLost
from etude.harnesses.completions import MODEL
from etude.protocols import ExecResult, HarnessResult, Sandbox, Session
from etude.types import Task

SUBMIT, TIMEOUT = "submit", "timeout"
"""Why a program stopped: it said so with its exit code, or it had to be stopped. Else the reason is ``exit N``."""
NOT_STARTED = (126, 127)
"""Exit codes of a program that could not be started."""
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""For the gateway to say that it still knows a session."""
FILLED_IN = re.compile("{(" + "|".join(PLACEHOLDERS) + ")}")


class CommandHarness:
    """Runs one program per rollout; implements :class:`~etude.protocols.Harness`.

    ``workdir`` is where a sandbox's files are; a session's URL is the same inside as outside.
    """

    def __init__(self, config: HarnessConfig, http: aiohttp.ClientSession, *, workdir: str) -> None:
        """``http`` is shared by all sessions and stays the caller's to close."""
        self._config = config
        self._http = http
        self._workdir = workdir

    async def check(self, sandbox: Sandbox) -> None:
        """Raise :class:`~etude.errors.ConfigError` unless the program is there to be run."""
        program = self._config.command[0]
        variables = [f"{name}={text}" for name, text in self._config.environment.items()]
        found = await sandbox.exec(["env", *variables, "sh", "-c", 'command -v -- "$0" >/dev/null', program])
        if found.exit_code != 0:
            raise ConfigError(
                f"harness.command: there is no program {program!r} in a sandbox; install it, and name its folder in "
                f"harness.mounts = {list(self._config.mounts)!r}"
            )

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Run the program to its end or deadline.

        ``submit`` for one of the recipe's success codes, ``timeout`` when time ran out, ``exit N`` for any other end;
        all of these are graded. Counts nothing: what the agent did is the program's own affair.
        Raises :class:`~etude.errors.SandboxError` for a program that did not start, and
        :class:`~etude.errors.EngineUnavailable` or :class:`~etude.errors.SessionLost` for one that failed without a
        gateway that knows its session: then it may not have been the model.
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
        result = await sandbox.exec(
            [
                "env",
                *(f"{name}={text}" for name, text in variables.items()),
                *(fill_in(text, values) for text in self._config.command),
            ],
            timeout_s=self._config.timeout_s,
        )
        reason = judge_end(result, self._config.success_codes)
        if reason != SUBMIT:
            await self._check_session(session)
        return HarnessResult(reason=reason, counts={})

    async def _check_session(self, session: Session) -> None:
        url = f"{session.base_url}/models"
        headers = {"Authorization": f"Bearer {session.api_key}"}
        try:
            async with self._http.get(url, headers=headers, timeout=PROBE_TIMEOUT) as response:
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"the harness failed, and so does {url}: {type(error).__name__}") from error
        if status in (401, 404):
            raise SessionLost(f"the harness failed, and {url} knows no such session (any more): HTTP {status}")
        if status != 200:
            raise EngineUnavailable(f"the harness failed, and so does {url}: HTTP {status}")


def judge_end(result: ExecResult, success_codes: tuple[int, ...]) -> str:
    """Why a program stopped. Raises :class:`~etude.errors.SandboxError` when it never started."""
    if result.timed_out:
        return TIMEOUT
    if result.exit_code in success_codes:
        return SUBMIT
    if result.exit_code in NOT_STARTED:
        raise SandboxError(f"the harness did not start: exit code {result.exit_code}")
    return f"exit {result.exit_code}"


def client_variables(base_url: str, api_key: str) -> dict[str, str]:
    """The variables by which OpenAI's, Anthropic's and LiteLLM's clients find a model."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """``text`` with its placeholders filled in, once: braces in a prompt stay what they are."""
    return FILLED_IN.sub(lambda match: values[match[1]], text)
