"""Results of a suite: every attempt of a model at its tasks, as JSON for other programs (docs/suites.md).

    tries ──▶ results.json ──▶ figures of one model          two of them ──▶ differences, over the tasks of both

Owns the file format. Figures are :mod:`etude.dashboard.evaluation`'s, over the compared tasks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from etude.config.recipe import is_pass
from etude.dashboard.evaluation import Evaluation, Measure, TokenPrices, Try, figures
from etude.errors import ConfigError
from etude.fsync import write_whole
from etude.types import Json

SCHEMA = "etude-suite-results/1"
RESULTS_FILE = "results.json"
"""Name of the file in a folder of results."""
AMOUNTS = ("call_s", "tool_errors", "refused_calls", "cost")
"""Other amounts of an attempt with figures, in addition to tokens, calls and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTry:
    """One attempt of a model at a task."""

    task_id: str
    template: str
    number: int
    """Number of the pass over the suite, from 0."""
    reward: float
    graded: float
    """The number that decides whether the attempt passes: the grade, 0 for a cheat; for a suite with a ``[reward]``,
    the sum of its parts.
    """
    passed: bool
    reason: str
    """Finish reason of the harness."""
    seconds: float
    measures: Mapping[str, float]
    """``calls``, ``prompt_tokens``, ``cached_tokens``, ``sampled_tokens``, ``model_s``, and other measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResults:
    """All attempts of one model at a suite, with one harness."""

    suite: str
    version: str
    digest: str
    """SHA-256 over the tasks (:func:`~etude.tasks.suites.digest_of_tasks`)."""
    model: str
    url: str
    """URL of the API, or the run that the weights are from."""
    api: str
    """``openai`` or ``anthropic``; ``etude`` for a run's weights."""
    harness: str
    date: str
    """Day of the first attempt, ISO 8601."""
    etude: str
    """Version of étude."""
    temperature: float
    passes: int
    pass_at: float
    tasks: Mapping[str, str]
    """Id of each task of the suite, in order → its template."""
    tries: tuple[SuiteTry, ...]
    parts: tuple[str, ...] = ()
    """Parts of the suite's own ``[reward]``; their values are in the measures of each attempt."""
    reward: str = ""
    """SHA-256 of that reward's specification, rubrics included; empty if the grade is the reward."""
    prices: TokenPrices | None = None

    @property
    def title(self) -> str:
        """Model and harness on one line."""
        return f"{self.model} · {self.harness}"

    def missing(self) -> list[dict[str, Json]]:
        """Attempts that infrastructure prevented."""
        made = {(each.task_id, each.number) for each in self.tries}
        return [
            {"task_id": task_id, "number": number}
            for number in range(self.passes)
            for task_id in self.tasks
            if (task_id, number) not in made
        ]

    def measure(self, ks: Sequence[int] = ()) -> Measure:
        """The rules of its figures; by default pass@1 and pass@passes."""
        return Measure(pass_at=self.pass_at, ks=tuple(ks) or tuple(sorted({1, self.passes})))

    def evaluation(self, task_ids: Sequence[str] | None = None) -> Evaluation:
        """The attempts at the given tasks, by default all, in the given order."""
        ids = list(self.tasks) if task_ids is None else list(task_ids)
        by_place = {(each.number, each.task_id): each for each in self.tries}
        passes = tuple(
            tuple(_evaluated(by_place.get((number, task_id)), self) for task_id in ids) for number in range(self.passes)
        )
        return Evaluation(
            run=self.suite,
            version=0,
            digest=self.digest,
            tries={"sampled": passes},
            engine_s=0.0,  # only known for étude's own engines
            parts=self.parts,
            amounts=AMOUNTS,
            label=self.title,
        )

    def to_json(self) -> dict[str, Any]:
        """The results as JSON, including figures and missing attempts."""
        tree = asdict(self)
        tree["tries"] = [asdict(each) for each in self.tries]
        shown = figures(self.evaluation(), self.measure()) if self.tries else None
        return {"schema": SCHEMA, **tree, "missing": self.missing(), "figures": shown}


def write_results(results: SuiteResults, folder: Path) -> Path:
    """Write ``results.json`` into a folder, atomically; returns its path."""
    file = folder / RESULTS_FILE
    write_whole(file, (json.dumps(results.to_json(), indent=1) + "\n").encode())
    return file


def read_results(place: Path) -> SuiteResults:
    """Read a results file, or the one in a folder. Raises :class:`~etude.errors.ConfigError`."""
    file = place / RESULTS_FILE if place.is_dir() else place
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree["schema"] != SCHEMA:
            raise ConfigError(f"{file} has the schema {tree['schema']!r}, expected {SCHEMA!r}: measure again")
        prices = tree["prices"]
        tree = {name: value for name, value in tree.items() if name not in ("schema", "missing", "figures")}
        tree["tries"] = tuple(SuiteTry(**each) for each in tree["tries"])
        tree["parts"] = tuple(tree.get("parts", ()))
        return SuiteResults(**(tree | {"prices": prices and TokenPrices(**prices)}))
    except FileNotFoundError:
        raise ConfigError(
            f"no results at {str(place)!r}: expected a folder that `etude suite run --out` made"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is no file of results: {type(error).__name__}: {error}") from error


def common_tasks(first: SuiteResults, second: SuiteResults) -> list[str]:
    """The tasks that two results share, in order. Raises :class:`~etude.errors.ConfigError` if there are none."""
    if first.suite != second.suite:
        raise ConfigError(f"one is of the suite {first.suite!r} and the other of {second.suite!r}: nothing is paired")
    if first.reward != second.reward:
        raise ConfigError(
            f"the tries of {first.suite!r} were scored by two rewards or rubrics: measure one of them again"
        )
    common = [task_id for task_id in first.tasks if task_id in second.tasks]
    if not common:
        raise ConfigError(f"the two results of {first.suite!r} have no task in common: measure one of them again")
    return common


def _evaluated(one: SuiteTry | None, results: SuiteResults) -> Try | None:
    """Convert an attempt to an evaluation's; each model's cost is by its own prices."""
    if one is None:
        return None
    measures = one.measures
    prompt, calls = int(measures.get("prompt_tokens", 0)), measures.get("calls", 0.0)
    amounts = {name: measures[name] for name in AMOUNTS if name in measures}
    if calls:
        amounts["call_s"] = measures.get("model_s", 0.0) / calls
    attempt = Try(
        task_id=one.task_id,
        template=one.template,
        reward=one.reward,
        graded=one.graded,
        parts={name: measures[name] for name in results.parts if name in measures},
        prompt_tokens=prompt,
        new_tokens=prompt - int(measures.get("cached_tokens", 0)),
        sampled_tokens=int(measures.get("sampled_tokens", 0)),
        turns=int(calls),
        summaries=int(measures.get("summaries", 0)),
        seconds=one.seconds,
        amounts=amounts,
    )
    prices = results.prices
    return attempt if prices is None else replace(attempt, amounts=amounts | {"cost": prices.of(attempt)})


def suite_try(attempt: Try, number: int, results: SuiteResults) -> SuiteTry:
    """Convert an evaluation's attempt to one of a suite's results, as pass ``number``, by their rules."""
    graded = attempt.reward if results.parts else attempt.graded
    return SuiteTry(
        task_id=attempt.task_id,
        template=attempt.template,
        number=number,
        reward=attempt.reward,
        graded=graded,
        passed=is_pass(graded, results.pass_at),
        reason="",
        seconds=attempt.seconds,
        measures={
            **{name: attempt.parts[name] for name in results.parts if name in attempt.parts},
            "calls": attempt.turns,
            "prompt_tokens": attempt.prompt_tokens,
            "cached_tokens": attempt.prompt_tokens - attempt.new_tokens,
            "sampled_tokens": attempt.sampled_tokens,
            "summaries": attempt.summaries,
        },
    )
