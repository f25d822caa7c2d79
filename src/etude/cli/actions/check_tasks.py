"""`etude tasks check`: verifies tasks again, or compares simulated sessions with recorded ones."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from etude.cli.actions.build_tasks import SOUND, check
from etude.cli.actions.list_tasks import UNLESS_SAID, is_harbor, sides_text
from etude.cli.actions.show_build import meaning_of
from etude.cli.console import OUT, log
from etude.config.tasks import SandboxConfig, TaskConfig
from etude.rewards.graders.script import ScriptGrader
from etude.run.task_sandboxes import image_store, opened_provider
from etude.taskgen.fidelity.audit import audit, render, to_json
from etude.taskgen.fidelity.sessions import read_sessions
from etude.taskgen.harbor.soundness import SoundnessCheck
from etude.tasks.harbor.family import read_tasks, side_of
from etude.tasks.harbor.images import build_images


def check_tasks(folder: Path, sandboxes: SandboxConfig, *, every: bool, as_json: bool) -> bool:
    """Verify the tasks of a folder and print those that are not sound, or ``every`` task; ``True`` if all are sound."""
    checking = _check_harbor if is_harbor(folder) else _check_repository
    return asyncio.run(checking(folder, sandboxes, every, as_json))


def compare_sessions(production: Path, simulated: Path, *, as_json: bool) -> None:
    """Print how well recorded sessions and simulated ones can be told apart."""
    report = audit(read_sessions(production), read_sessions(simulated))
    OUT.out(json.dumps(to_json(report), indent=1) if as_json else render(report), highlight=False)


async def _check_repository(folder: Path, sandboxes: SandboxConfig, every: bool, as_json: bool) -> bool:
    async with opened_provider(sandboxes) as provider:
        results = await check(folder, provider, say=log if every else lambda _: None)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    sound = sum(result.outcome == SOUND for result in results)
    for result in [] if every else results:
        if result.outcome != SOUND:
            log(
                f"{result.split} {result.task_id} {result.template}: {result.outcome} {result.detail}"
                f"{meaning_of(result.outcome)}"
            )
    log(f"{sound} of {len(results)} tasks are sound; {sides_text(Counter(result.split for result in results))}")
    return sound == len(results)


async def _check_harbor(folder: Path, sandboxes: SandboxConfig, every: bool, as_json: bool) -> bool:
    store = image_store(sandboxes, TaskConfig(family="harbor", folder=str(folder)))
    reading = read_tasks(folder)
    async with opened_provider(sandboxes) as provider:
        builds = await build_images(reading.tasks, store)
        results = await SoundnessCheck(provider, ScriptGrader(provider, store)).check_all(reading.tasks, builds)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    for name, reason in reading.refused.items():
        log(f"{name}: set aside: {reason}")
    sides = {task.name: side_of(task) for task in reading.tasks}
    for result in results:
        if every or not result.is_sound:
            log(f"{sides[result.name]} {result.name}: {'sound' if result.is_sound else '; '.join(result.faults)}")
    sound = Counter(sides[result.name] for result in results if result.is_sound)
    total = len(results) + len(reading.refused)
    log(f"{sound.total()} of {total} tasks are sound; {sides_text(sound)}{UNLESS_SAID}")
    return not reading.refused and all(result.is_sound for result in results)
