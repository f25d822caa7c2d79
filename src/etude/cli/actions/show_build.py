"""`etude tasks build`: builds tasks from a repository and prints what came of the candidates."""

import asyncio
import json
from dataclasses import asdict

from etude.cli.actions.build_tasks import BuildOptions, BuildReport, build
from etude.cli.console import OUT, log
from etude.config.tasks import SandboxConfig
from etude.run.task_sandboxes import opened_provider
from etude.taskgen.verdicts import Rejection


def show_build(options: BuildOptions, sandboxes: SandboxConfig, *, as_json: bool) -> None:
    """Build tasks and print the report. Raises as :func:`~etude.cli.actions.build_tasks.build`."""
    report = asyncio.run(_build(options, sandboxes))
    if as_json:
        OUT.out(json.dumps(asdict(report), indent=1))
        return
    OUT.out(f"{report.package} {report.version}: {report.kept} tasks of {report.tried} candidates")
    for outcome, count in report.outcomes.items():
        OUT.out(f"{count:>6} {outcome}{meaning_of(outcome)}")
    OUT.out(f'train on them with tasks.family = "repository" and tasks.folder = "{options.out}"')


def meaning_of(outcome: str) -> str:
    """The meaning of a rejection behind its name; empty for what explains itself."""
    return next((f" ({rejection.meaning})" for rejection in Rejection if rejection == outcome), "")


async def _build(options: BuildOptions, sandboxes: SandboxConfig) -> BuildReport:
    async with opened_provider(sandboxes) as provider:
        return await build(options, provider, say=log)
