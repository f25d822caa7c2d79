"""A model that installs a package's requirements where its files do not list them all: propose, verify, discard.

    state of the tests ──▶ model ──▶ shell commands ──▶ run in a fork ──▶ tests better? ──yes──▶ keep the fork
                              ▲                                             └──no──▶ discard it, inform the model

Any chat model behind an OpenAI-compatible URL works. Its commands run as root in a sandbox that reaches only the
allowed addresses; only the contents of ``/opt/site`` leave the sandbox. Consumes a package, produces a folder. Waits
for the model and for commands, each with a deadline, for a bounded number of rounds. :func:`score` compares the
rounds; the survey that follows decides whether the result is enough.
"""

import asyncio
import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from etude.errors import AgentFault, SandboxError
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import Image, SandboxLimits, SandboxSpec
from etude.taskgen.failures import InstallError
from etude.taskgen.installs import SITE, environment
from etude.taskgen.projects import Project
from etude.taskgen.testruns import RunObservation, TestRun, observe
from etude.types import Json

COMMANDS = re.compile(r"```(?:sh|bash|shell|console)?\s*\n(.*?)```", re.DOTALL)
MODEL_TIMEOUT_S = 300.0
ANSWER_BYTES = 1 << 20
OK = 200
MAX_TOKENS = 2000
COMMAND_TIMEOUT_S = 600.0
ENOUGH = 0.95
"""Share of tests that must pass to stop early; some packages have tests that never pass."""
TEST_TIMEOUT_S = 300.0
SHOWN = 3000
"""Maximum characters of an output, and of each file, in the prompt."""
SITE_BYTES = 512 << 20
SHOWN_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini", "README.md", "README.rst", "CONTRIBUTING.md")
LIMITS = SandboxLimits(memory_bytes=2 << 30, disk_bytes=2 << 30, processes=256)
BRIEF = f"""You prepare a Python package so that its tests pass. Commands run as root in its repository, with /bin/sh.
Install everything below {SITE}, which is on PYTHONPATH: python3 -m pip install --target {SITE} NAME ...
Nothing else that you change is kept, and the repository must not be changed. pytest itself must be installed, too.
Answer with one block of commands between ```sh and ```. You are told how the tests end after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallerOptions:
    """The installer's model and its limits."""

    url: str
    """Base of an OpenAI-compatible API, including ``/v1``."""
    model: str
    api_key: str = ""
    rounds: int = 8
    """Maximum answers of the model."""
    allow: tuple[str, ...] = ("pypi.org:443", "files.pythonhosted.org:443")
    """Addresses that its commands may reach."""
    mounts: Mapping[str, Path] | None = None
    """Path in the sandbox → folder of this machine that the commands may read, for example wheels."""


class Installer:
    """Loop that requests commands from a model until the tests pass."""

    def __init__(self, options: InstallerOptions, provider: SandboxProvider) -> None:
        """Store the options; the caller still closes ``provider``."""
        self._options = options
        self._provider = provider

    async def install(self, project: Project, texts: Mapping[str, str], image: Image, target: Path) -> None:
        """Fill ``target``, a new folder, with the layer of requirements that the package needs on top of ``image``.

        Raises :class:`~etude.taskgen.failures.InstallError` if no round makes a test pass or the model does not
        answer.
        """
        spec = SandboxSpec(
            image=image,
            limits=LIMITS,
            allow=self._options.allow,
            mounts=self._options.mounts or {},
            environment=environment(project),
            user="root",
        )
        best = await self._provider.create({}, spec)
        try:
            best = await self._rounds(project, texts, best)
            await asyncio.to_thread(_unpack, await best.export([SITE], limit_bytes=SITE_BYTES), target)
        finally:
            await best.close()

    async def _rounds(self, project: Project, texts: Mapping[str, str], best: Sandbox) -> Sandbox:
        """Try commands, each time from the best state so far, and return the last best; the others are closed."""
        reached, words = -1, "No command has been run yet."
        messages: list[Json] = [
            {"role": "system", "content": BRIEF},
            {"role": "user", "content": describe(project, texts)},
        ]
        output = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MODEL_TIMEOUT_S)) as http:
            for _ in range(self._options.rounds):
                answer = await self._complete(http, [*messages, {"role": "user", "content": words}])
                messages += [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]
                commands = commands_in(answer)
                if commands is None:
                    words = "Your answer has no block of commands between ```sh and ```."
                    continue
                (trial,) = await best.fork(1)
                try:
                    passed, is_enough, words = await _attempt(trial, project, commands)
                except BaseException:
                    await trial.close()
                    raise
                output = words
                loser, best = (best, trial) if passed > reached else (trial, best)
                await loser.close()
                reached = max(reached, passed)
                if is_enough and passed == reached and passed > 0:
                    return best
        if reached <= 0:
            raise InstallError(
                f"{self._options.model!r} got no test of {project.name} to pass in {self._options.rounds} rounds",
                log=output,
            )
        return best

    async def _complete(self, http: aiohttp.ClientSession, messages: list[Json]) -> str:
        url = f"{self._options.url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {self._options.api_key}"} if self._options.api_key else {}
        body = {"model": self._options.model, "messages": messages, "temperature": 0.2, "max_tokens": MAX_TOKENS}
        data = b""
        try:
            async with http.post(url, json=body, headers=headers) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > ANSWER_BYTES:
                        raise InstallError(
                            f"the installer's model at {url} answers with more than {ANSWER_BYTES} bytes"
                        )
                if response.status != OK:
                    raise InstallError(f"the installer's model at {url} answered {response.status}: {data[:200]!r}")
            content = json.loads(data)["choices"][0]["message"]["content"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstallError(
                f"the installer's model at {url} cannot be reached: {error!r}; see --installer"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InstallError(f"the installer's model at {url} answered {data[:200]!r}, no chat completion") from error
        return str(content or "")


def describe(project: Project, texts: Mapping[str, str]) -> str:
    """The installer's prompt about a package."""
    shown = [path for path in texts if path in SHOWN_FILES or (path.endswith(".txt") and "require" in path)][:8]
    files = "\n\n".join(f"--- {path}\n{texts[path][:SHOWN]}" for path in shown)
    paths = "\n".join(sorted(texts)[:200])
    return (
        f"Package {project.name} {project.version}, tests in {', '.join(project.tests)}.\n\nFiles:\n{paths}\n\n{files}"
    )


def commands_in(answer: str) -> str | None:
    """The last block of commands in an answer, or ``None``."""
    blocks = COMMANDS.findall(answer)
    return blocks[-1].strip() or None if blocks else None


def score(seen: RunObservation) -> tuple[int, bool]:
    """The number of passed tests, and true if that is enough: nearly all, with every file collected."""
    ran = [test for test in seen.tests.values() if test.status != "skipped"]
    passed = sum(test.status == "passed" for test in ran)
    return passed, passed > 0 and passed >= ENOUGH * len(ran) and not seen.errors and not seen.ended


async def _attempt(sandbox: Sandbox, project: Project, commands: str) -> tuple[int, bool, str]:
    """Run the commands, then the tests; return how many passed (−1: none could run), if it is enough, and a message."""
    done = await sandbox.exec(["sh", "-e", "-c", commands], timeout_s=COMMAND_TIMEOUT_S)
    if done.exit_code != 0 or done.timed_out:
        how = "ran out of time" if done.timed_out else f"ended with {done.exit_code}"
        return -1, False, f"The commands {how} and were undone:\n{(done.stdout + done.stderr)[-SHOWN:]}"
    try:
        run = TestRun(targets=project.tests, timeout_s=TEST_TIMEOUT_S)
        (seen,) = await observe(sandbox, [run], options=project.options)
    except (SandboxError, AgentFault) as error:
        return -1, False, f"The tests cannot be run: {str(error)[-SHOWN:]}"
    passed, is_enough = score(seen)
    errors = "\n".join(why for _, why in seen.errors[:3])
    return passed, is_enough, f"{passed} of {len(seen.tests)} tests pass.\n{errors}\n{seen.output}"[-SHOWN:]


def _unpack(tar: bytes, target: Path) -> None:
    """Unpack the site folder of a tar as a layer: only plain files and folders, no compiled Python."""
    parts = Path(SITE).parts[1:]
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        selected: Sequence[tarfile.TarInfo] = [
            member
            for member in archive
            if (member.isfile() or member.isdir()) and not member.name.endswith((".pyc", ".pyo"))
        ]
        archive.extractall(target, members=selected, filter="data")
    if not target.joinpath(*parts).is_dir():
        raise InstallError(f"the installer's commands left nothing in {SITE}")
