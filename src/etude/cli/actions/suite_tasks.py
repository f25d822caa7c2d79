"""The tasks of `etude suite build|fetch|refresh`: made in sandboxes of this machine, then counted and printed.

Tasks are made, added and retired by :mod:`etude.cli.actions.build_suite`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.cli.actions.build_suite import SuiteBuild, build, counted, fetch, in_use, refresh, take_in, today, traces_in
from etude.cli.console import OUT, log
from etude.config.tasks import SandboxConfig
from etude.dashboard.formatting import visible
from etude.dashboard.suite_results import read_results
from etude.run.task_sandboxes import opened_provider
from etude.taskgen.history.records import read_records
from etude.taskgen.preparation import Settings
from etude.tasks.suites import suite_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRefresh:
    """Options of `etude suite refresh`."""

    suite: Path
    results: Sequence[Path]
    """Results of models."""
    texts: Path | None
    """Folder of training texts."""
    max_share: float
    """Largest share of a task's words, in runs, that training texts may contain."""
    changes: int | None
    """Newest changes that are tried; ``None``: those since the last build; 0: none."""
    settings: Settings | None
    """``None``: those of the last time."""


def build_suite(options: SuiteBuild, sandboxes: SandboxConfig) -> None:
    """Build a suite from histories and print how many tasks it has."""

    async def work() -> None:
        async with opened_provider(sandboxes) as provider:
            OUT.out(counted(await build(options, provider, say=log)))

    asyncio.run(work())


def fetch_suite(suite: Path, sandboxes: SandboxConfig) -> None:
    """Make the tasks of a suite that has only records of them, and print their number."""

    async def work() -> None:
        async with opened_provider(sandboxes) as provider:
            OUT.out(f"{await fetch(suite, provider, say=log)} tasks made in {suite}")

    asyncio.run(work())


def refresh_suite(options: SuiteRefresh, sandboxes: SandboxConfig) -> None:
    """Add new changes, retire tasks, and print both with the reasons."""
    suite = options.suite
    version, earlier = suite_of(suite).version, {record.task_id for record in read_records(suite)}

    async def work() -> None:
        async with opened_provider(sandboxes) as provider:
            await take_in(suite, provider, changes=options.changes, settings=options.settings, say=log)

    if options.changes != 0:
        asyncio.run(work())
    traces = None if options.texts is None else traces_in(suite, options.texts)
    read = [read_results(place) for place in options.results]
    done = refresh(suite, read, traces, max_share=options.max_share, day=today())
    for record in read_records(suite):
        if record.task_id not in earlier:
            OUT.out(visible(f"{record.task_id} added: {record.prompt}"))
    for line in done.lines():
        OUT.out(line)
    now = suite_of(suite).version
    OUT.out(f"{suite_of(suite).name} {now}{'' if now == version else f', was {version}'}: {counted(in_use(suite))}")
