"""`etude tasks export`: writes tasks in Harbor's format."""

from collections.abc import Mapping
from pathlib import Path

from etude.cli.actions.list_tasks import first_tasks
from etude.cli.console import log
from etude.config.loading import is_recipe, load_recipe
from etude.errors import ExitCode
from etude.run.task_families import open_family
from etude.run.task_sandboxes import image_store
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.harbor.export import export_task, folder_of
from etude.tasks.harbor.settings import TaskFolderError
from etude.tasks.repositories.folder import RepositoryTasks
from etude.types import Split as Side

SOLVE = """#!/bin/bash
cp -r "$(dirname "$0")/files/." .
"""
"""Script of a solution: runs in the working folder."""


def export_tasks(source: Path, out: Path, split: str, count: int) -> int:
    """Write the first ``count`` tasks of a side into folders below ``out``; returns the exit status."""
    if is_recipe(source):
        config = load_recipe(source)
        family, images = open_family(config), image_store(config.sandboxes, config.tasks)
        tasks = list(first_tasks(family, Side(split), count))
        answer = None
    else:
        repository = RepositoryTasks(source)
        tasks, images = list(repository.tasks(Side(split)))[:count], ImageStore(repository.images)
        answer = repository.answer
    refused = 0
    for task in {task.task_id: task for task in tasks}.values():
        try:
            export_task(task, folder_of(task, out), images=images, solution=_solution(answer(task)) if answer else None)
        except TaskFolderError as error:
            refused += 1
            log(f"{task.task_id}: set aside: {error}")
    log(f"{len(tasks) - refused} tasks in {out}")
    return ExitCode.USER_ERROR if refused else 0


def _solution(answer: Mapping[str, str]) -> dict[str, str]:
    """The files below ``solution/``: those of an answer, and the script that puts them in their places."""
    return {"solve.sh": SOLVE} | {f"files/{path}": text for path, text in answer.items()}
