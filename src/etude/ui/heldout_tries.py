"""Held-out attempts of a run, by evaluation, with their rollouts: the input for comparing two versions.

    EvalDone ──▶ passes      ledger ──▶ tasks, ids of rollouts      evaluations/*.db ──▶ attempts of `etude eval`

Owns reading them; the comparison is :mod:`etude.ui.compare_view`'s. If a run's ledger is unavailable, tasks are named
by their position among the held-out ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from etude.config.recipe import is_pass
from etude.dashboard.evaluation import Try
from etude.errors import EtudeError
from etude.ledger.archive import Archive, RolloutMatch, RolloutOutcome, Search
from etude.run.evaluate import EVALUATIONS, tries
from etude.run.stores import open_archive
from etude.types import Json, Task
from etude.ui.curves import Curves
from etude.ui.event_lines import Fields
from etude.ui.runs import RunReader

Way: TypeAlias = Literal["sampled", "greedy"]
MOST_TRIES = 100_000
"""Limit of attempts of one evaluation, more than any has."""
LEDGER_OF_TRIES = re.compile(r"v(\d{6})-[0-9a-f]+(-.+)?")
"""File name of a result of `etude eval`: the version, its digest, a suite of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutTry:
    """One attempt at a held-out task."""

    reward: float
    passed: bool
    rollout: RolloutMatch | None = None
    """The rollout to show; ``None`` if the run's ledger does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTask:
    """A held-out task with its attempts by one version."""

    task_id: str
    template: str
    prompt: str
    tries: tuple[HeldoutTry, ...]

    @property
    def cluster(self) -> str:
        """Name of the cluster of similar tasks."""
        return self.template or self.task_id


def evaluations(run: RunReader) -> list[Json]:
    """All evaluations of a run: those during the run, then those of `etude eval`."""
    with run.folded(Curves) as folded:
        done = sorted(folded.evals.values(), key=lambda each: int(each["version"]))
        own: list[Json] = [
            {"label": each["label"], "version": each["version"], "tasks": each["tasks"]} for each in done
        ]
    files = sorted((run.folder.path / EVALUATIONS).glob("v*.db"))
    matches = [(file, LEDGER_OF_TRIES.fullmatch(file.stem)) for file in files]
    return own + [{"label": file.stem, "version": int(match[1]), "tasks": None} for file, match in matches if match]


def heldout_tries(run: RunReader, label: str, way: Way) -> list[TriedTask]:
    """The tasks of an evaluation with their attempts, in order; empty if there is no such evaluation."""
    file = run.folder.path / EVALUATIONS / f"{label}.db"
    if LEDGER_OF_TRIES.fullmatch(label) and file.is_file():
        return _of_evaluation(file, way, run.config.eval.pass_at)
    with run.folded(Curves) as folded:
        done = folded.evals.get(label)
    return [] if done is None else _of_run(run, done, way)


def _of_run(run: RunReader, done: Fields, way: Way) -> list[TriedTask]:
    tasks, rollouts = _recorded(run, done, way)
    rewards, passed = done.get(f"{way}_rewards") or [], done.get(f"{way}_passed") or []
    clusters = done["clusters"]
    if len(tasks) != len(clusters):
        tasks, rollouts = [None] * len(clusters), {}
    tried = zip(tasks, clusters, rewards, passed, strict=False)
    return [
        TriedTask(
            task_id=f"{cluster} {index}" if task is None else task.task_id,
            template=cluster,
            prompt="" if task is None else task.prompt,
            tries=() if reward is None else (HeldoutTry(reward=reward, passed=ok, rollout=rollouts.get(index)),),
        )
        for index, (task, cluster, reward, ok) in enumerate(tried)
    ]


def _recorded(run: RunReader, done: Fields, way: Way) -> tuple[Sequence[Task | None], Mapping[int, RolloutMatch]]:
    """The tasks of an evaluation, and its graded rollouts by task; empty without a ledger."""
    try:
        with open_archive(run.folder) as archive:
            purposes = (f"{done['label']}-{done['version']}-{way}", f"{done['label']}-{way}")
            purpose = next((each for each in purposes if archive.admitted(each)), purposes[1])
            search = Search(purpose=purpose, outcome=RolloutOutcome.GRADED, limit=MOST_TRIES)
            return archive.tasks(purpose), {match.group: match for match in archive.find(search)}
    except EtudeError:
        return [], {}


def _of_evaluation(file: Path, way: Way, pass_at: float) -> list[TriedTask]:
    with Archive.open(file) as archive:
        purposes = {census.purpose.partition(".")[0] for census in archive.census()}
        labels = sorted(purpose for purpose in purposes if purpose.startswith(way))
        passes = [tries(archive, label, archive.admitted(label)) for label in labels]
        tasks = archive.tasks(labels[0]) if labels else []
    return [
        TriedTask(
            task_id=task.task_id,
            template=task.template,
            prompt=task.prompt,
            tries=tuple(_try(each[index], pass_at) for each in passes if index < len(each) and each[index]),
        )
        for index, task in enumerate(tasks)
    ]


def _try(attempt: Try | None, pass_at: float) -> HeldoutTry:
    assert attempt is not None
    return HeldoutTry(reward=attempt.reward, passed=is_pass(attempt.graded, pass_at))
