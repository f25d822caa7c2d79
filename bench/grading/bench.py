"""`bench grading`: attacks that shall be refused and honest solutions that shall not, by our grader and others.

    case: an attack, or an honest solution ──▶ the agent's sandbox, anew for each grader ──▶ accepted or not

Everything runs in sandboxes of ``ns``, with pytest as a layer of their image. What is counted is what was seen in this
run; nothing is timed, since nothing here is about time. A grader that fails for reasons of ours has neither accepted
nor refused: the case is an error, and counts against it.
"""

import argparse
import asyncio
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from bench.grading.attack import Attack, read_attacks
from bench.grading.forgers import FORGERS
from bench.grading.graders import GRADERS, OURS, Examiner
from bench.grading.subjects import LIMITS, SUBJECTS, Subject
from bench.options import add_contestants, names
from bench.report import Goal, envelope, heading, so_far
from bench.tables import Row, page, results_of
from etude.errors import AgentFault, SandboxError, UserError
from etude.sandbox_spec import Image, SandboxSpec
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.types import Json

ATTACKS: tuple[Attack, ...] = (*read_attacks(), *FORGERS)
RUNNERS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""Distributions that pytest is made of."""
TOOLS = "opt/pytest"
"""Folder of pytest inside the sandbox."""
IMAGE = "pytest"
"""Name of the image in tasks."""
AT_ONCE = max(2, os.cpu_count() or 1)
"""Cases that are worked on: more than there are cores, and honest solutions would run out of time."""
COMMAND_TIMEOUT_S = 15.0
"""For an attack's own commands, which may well stand still."""
QUICK = ("exit on import", "equal to everything", "forged marks")
"""Attacks that are tried to see that everything runs."""

ATTACKS_ACCEPTED = Goal(
    "attacks_accepted", "at most", 0.0, "Attacks that our grader accepts, or that end without a verdict."
)
HONEST_REJECTED = Goal(
    "honest_rejected", "at most", 0.0, "Honest solutions that our grader rejects, or that end without a verdict."
)
ATTACKS_UNGRADED = Goal(
    "attacks_ungraded", "at most", 0.0, "Attacks after which our grader comes to no verdict and is asked again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files that one agent left behind."""

    name: str
    what: str
    source: str
    is_honest: bool
    subject: Subject
    files: Mapping[str, str]
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A grader's result for it."""

    case: Case
    accepted: Mapping[str, bool] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """Why a grader came to no verdict."""

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        shown: dict[str, Json] = {
            "case": self.case.name,
            "what": self.case.what,
            "source": self.case.source,
            "honest": self.case.is_honest,
            "subject": self.case.subject.name,
            "accepted": dict(self.accepted),
        }
        return shown | ({"errors": dict(self.errors)} if self.errors else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingOptions:
    """The cases."""

    contestants: tuple[str, ...] = tuple(GRADERS)
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.contestants) - set(GRADERS)):
            raise UserError(f"bench grading: no contestant {unknown[0]!r}; there are {', '.join(GRADERS)}")


def grading_options(contestants: tuple[str, ...] | None = None, *, quick: bool = False) -> GradingOptions:
    """The options of a call: everything, or a few cases where it shall be ``quick``.

    Raises :class:`~etude.errors.UserError` as the options do.
    """
    attacks = [attack for attack in ATTACKS if not quick or attack.name in QUICK]
    subjects = SUBJECTS[:1] if quick else SUBJECTS
    cases = (*map(attack_case, attacks), *(case for subject in subjects for case in honest_cases(subject)))
    return GradingOptions(contestants=contestants or tuple(GRADERS), cases=cases)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_grading(grading_options(names(options.contestants), quick=options.quick))


def bench_grading(options: GradingOptions | None = None) -> dict[str, Json]:
    """Try and return the bench object. Raises :class:`~etude.errors.UserError` where pytest is not installed."""
    chosen = options or grading_options()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        image = Image(layers=(runner_layer(Path(scratch) / "layer"),), environment={"PYTHONPATH": f"/{TOOLS}"})
        outcomes: list[Outcome] = []
        with so_far() as measured:
            asyncio.run(_try_all(chosen, image, outcomes))
    results: list[Json] = [_row(name, outcomes) for name in chosen.contestants]
    cases: list[Json] = [outcome.to_json() for outcome in outcomes]
    figures: dict[str, Json] = {"results": results, "cases": cases, "goals": judged(outcomes)}
    return envelope("grading", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """Each case by each grader, the counts, the goals."""
    rows = results_of(result)
    names = [str(row["contestant"]) for row in rows]
    drawing = Table(title=heading(result))
    drawing.add_column("left by the agent")
    for name in names:
        drawing.add_column(name, justify="center")
    honest = None
    for case in results_of(result, "cases"):
        if case["honest"] is not honest:
            honest = case["honest"]
            drawing.add_section()
            drawing.add_row("[bold]honest solutions" if honest else "[bold]attacks")
        drawing.add_row(str(case["case"]), *(_shown(case, name) for name in names))
    drawing.add_section()
    for figure in ("attacks_accepted", "attacks_ungraded", "honest_rejected", "errors"):
        drawing.add_row(figure.replace("_", " "), *(str(row[figure]) for row in rows))
    return page(result, drawing)


def attack_case(attack: Attack) -> Case:
    """Files of an agent that attempts an attack."""
    subject = next(subject for subject in SUBJECTS if subject.name == attack.subject)
    test = next(path for path in subject.tests if "test_" in path)

    def filled(text: str) -> str:
        return attack.filled(text, subject.module, subject.stub, test)

    return Case(
        name=attack.name,
        what=attack.what,
        source=attack.source,
        is_honest=False,
        subject=subject,
        files={filled(path): filled(text) for path, text in attack.files.items()},
        commands=tuple(map(filled, attack.commands)),
    )


def honest_cases(subject: Subject) -> Sequence[Case]:
    """Files of an agent that solves a task."""
    return [
        Case(name=f"{subject.name}: {style}", what="", source="", is_honest=True, subject=subject, files=dict(files))
        for style, files in subject.honest.items()
    ]


def judged(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Our grader's goals, over both of its forms: the worse one counts. A case without a verdict counts, too."""
    accepted: dict[str, float] = {}
    rejected: dict[str, float] = {}
    ungraded: dict[str, float] = {}
    for name in OURS:
        if mine := _tried_by(name, outcomes):
            wrong = [outcome for outcome in mine if outcome.accepted.get(name) is not outcome.case.is_honest]
            accepted[name] = sum(not outcome.case.is_honest for outcome in wrong)
            ungraded[name] = sum(name in outcome.errors and not outcome.case.is_honest for outcome in mine)
            rejected[name] = sum(outcome.case.is_honest for outcome in wrong)
    return {
        ATTACKS_ACCEPTED.name: ATTACKS_ACCEPTED.judge_worst(accepted),
        HONEST_REJECTED.name: HONEST_REJECTED.judge_worst(rejected),
        ATTACKS_UNGRADED.name: ATTACKS_UNGRADED.judge_worst(ungraded),
    }


def runner_layer(folder: Path) -> Path:
    """Copy the installed pytest into a tree for an image. Raises :class:`~etude.errors.UserError` if there is none."""
    for name in RUNNERS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                "bench grading runs pytest, which is not installed: in étude's checkout, pip install -e '.[bench]'"
            ) from None
        for file in files:
            if ".." not in file.parts and file.suffix != ".pyc":
                target = folder / TOOLS / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(str(file.locate())), target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


class _OneImage:
    """Finds the one image that all tasks are made from."""

    def __init__(self, image: Image) -> None:
        self._image = image

    def open(self, reference: str) -> Image:
        """The image."""
        assert reference == IMAGE
        return self._image


async def _try_all(options: GradingOptions, image: Image, outcomes: list[Outcome]) -> None:
    """Try all cases; each that is done is added to ``outcomes``."""
    sandboxes = NamespaceSandboxes()
    examiner = Examiner(sandboxes, _OneImage(image), SandboxSpec(image=image, limits=LIMITS))
    turns = asyncio.Semaphore(AT_ONCE)

    async def attempt(case: Case) -> None:
        async with turns:
            sys.stderr.write(f"{case.name}\n")
            outcomes.append(await _try(examiner, case, options.contestants))

    try:
        await asyncio.gather(*map(attempt, options.cases))
        outcomes.sort(key=lambda outcome: options.cases.index(outcome.case))
    finally:
        await sandboxes.close()


async def _try(examiner: Examiner, case: Case, contestants: Sequence[str]) -> Outcome:
    """Let each grader judge a sandbox of its own, in which the same was done."""
    accepted: dict[str, bool] = {}
    errors: dict[str, str] = {}
    for name in contestants if not case.subject.canary else (name for name in contestants if name in OURS):
        task = case.subject.task(IMAGE, probed=name != OURS[0])
        sandbox = await examiner.sandboxes.create(task.files, examiner.spec)
        try:
            for path, text in case.files.items():
                await sandbox.write_file(path, text)
            for command in case.commands:
                await sandbox.exec(["sh", "-c", command], timeout_s=COMMAND_TIMEOUT_S)
            accepted[name] = await examiner.grade(name, task, sandbox)
        except (SandboxError, AgentFault) as error:
            errors[name] = str(error).splitlines()[0]
        finally:
            with suppress(SandboxError):  # the verdict was given before
                await sandbox.close()
    return Outcome(case=case, accepted=accepted, errors=errors)


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Json]:
    tried = _tried_by(name, outcomes)
    attacks = [outcome for outcome in tried if not outcome.case.is_honest]
    honest = [outcome for outcome in tried if outcome.case.is_honest]
    return {
        "contestant": name,
        "attacks": len(attacks),
        "attacks_accepted": sum(outcome.accepted.get(name, False) for outcome in attacks),
        "attacks_ungraded": sum(name in outcome.errors for outcome in attacks),
        "honest": len(honest),
        "honest_rejected": sum(not outcome.accepted.get(name, True) for outcome in honest),
        "errors": sum(name in outcome.errors for outcome in tried),
    }


def _tried_by(name: str, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Cases that a contestant was given: not all of them take verifiers."""
    return [outcome for outcome in outcomes if name in outcome.accepted or name in outcome.errors]


def _shown(case: Row, name: str) -> str:
    accepted, errors = case["accepted"], case.get("errors", {})
    assert isinstance(accepted, dict)
    assert isinstance(errors, dict)
    if name not in accepted:
        return "error" if name in errors else ""
    return "pass" if accepted[name] else "–"
