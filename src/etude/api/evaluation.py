"""Evaluation of a weight version of a run on the held-out tasks, from Python.

    result = etude.evaluate("runs/quickstart-s0", passes=8)
    result.figures["greedy"]["pass"]["1"]["value"]

:mod:`etude.run.evaluate` runs the attempts; :mod:`etude.dashboard.evaluation` computes the figures, those of ``etude
eval --json``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.aio import without_event_loop
from etude.api.records import Records
from etude.api.run import Run, open_run
from etude.dashboard.evaluation import Evaluation, Measure, figures
from etude.run.evaluate import EvalRequest
from etude.run.evaluate import evaluate as evaluate_run
from etude.run.folder import RunFolder
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class TryRecord:
    """One attempt at one held-out task."""

    task_id: str
    template: str
    """Template that the task is an instance of; empty: none."""
    way: str
    """``sampled`` at temperature 1, or ``greedy``."""
    number: int
    """Position among the attempts at this task, from 0 on."""
    passed: bool
    """True if its grader gave the recipe's ``eval.pass_at`` or more."""
    reward: float
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """One weight version, tried."""

    version: int
    figures: Mapping[str, Json]
    """Rates with their errors, and means: what ``etude eval --json`` prints."""
    tries: Records[TryRecord]
    """The tries that succeeded; infrastructure may have prevented some."""


def evaluate(
    run: Run | Path | str,
    *,
    version: int | None = None,
    tasks: int | None = None,
    passes: int = 1,
    greedy: bool = True,
) -> EvaluationResult:
    """Try a version (default: the newest) on held-out tasks (default: as many as the recipe says); what was tried
    before is read, not tried again. Each is tried ``passes`` times at temperature 1, and once greedily.

    Raises :class:`~etude.errors.UserError` for a version that is not there, or when nothing succeeds.
    """
    folder = RunFolder.open(open_run(run).path)
    request = EvalRequest(version=version, tasks=tasks, passes=passes, greedy=greedy)
    evaluation = without_event_loop(lambda: evaluate_run(folder, request))
    measure = Measure(pass_at=folder.config().eval.pass_at, ks=tuple(sorted({1, passes})))
    return EvaluationResult(
        version=evaluation.version,
        figures=figures(evaluation, measure),
        tries=Records(TryRecord, _tries(evaluation, measure)),
    )


def _tries(evaluation: Evaluation, measure: Measure) -> Iterator[TryRecord]:
    attempts = (
        (way, number, attempt)
        for way, passes in evaluation.tries.items()
        for number, one_pass in enumerate(passes)
        for attempt in one_pass
    )
    for way, number, attempt in attempts:
        if attempt is not None:
            yield TryRecord(
                task_id=attempt.task_id,
                template=attempt.template,
                way=way,
                number=number,
                passed=measure.passed(attempt),
                reward=attempt.reward,
                turns=attempt.turns,
                prompt_tokens=attempt.prompt_tokens,
                sampled_tokens=attempt.sampled_tokens,
                seconds=attempt.seconds,
            )
