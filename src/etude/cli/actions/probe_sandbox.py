"""`etude sandboxes probe`: describes a sandbox, or compares it with the description of another one."""

import asyncio
import json
from pathlib import Path

from etude.cli.console import OUT
from etude.config.tasks import SandboxConfig
from etude.errors import ConfigError, ExitCode
from etude.run.task_sandboxes import opened_provider
from etude.taskgen.fidelity.probes import diff, probe, render_diff


def show_probe(sandboxes: SandboxConfig, against: Path | None) -> int:
    """Print a description of a sandbox, or its differences from that in a file; returns the exit status."""
    answers = asyncio.run(_probe(sandboxes))
    if against is None:
        OUT.out(json.dumps(answers, indent=1))
        return 0
    differences = diff(_read_answers(against), answers)
    OUT.out(render_diff(differences), highlight=False)
    return ExitCode.USER_ERROR if differences else 0


async def _probe(sandboxes: SandboxConfig) -> dict[str, str]:
    async with opened_provider(sandboxes) as provider:
        sandbox = await provider.create({})
        try:
            return await probe(sandbox)
        finally:
            await sandbox.close()


def _read_answers(file: Path) -> dict[str, str]:
    """The recorded answers of a sandbox. Raises :class:`~etude.errors.ConfigError` for a file of something else."""
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: {error}") from error
    if not isinstance(answers, dict) or not all(isinstance(answer, str) for answer in answers.values()):
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: expected an object of strings")
    return answers
