"""What an evaluation came to: tries of held-out tasks, and the figures made of them.

    tries ──▶ one value per task ──▶ figures of one version          two of them ──▶ figures of the difference

Owns the nouns and which figures there are; the statistics are :mod:`etude.dashboard.estimates`'. A task that
infrastructure kept from being tried is missing: it is counted, and no figure takes it for a failure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, TypeAlias

from etude.config.recipe import is_pass
from etude.dashboard.estimates import (
    Estimate,
    difference_of,
    mean_amount,
    mean_of,
    pass_at_k,
    sign_test,
)
from etude.errors import ConfigError
from etude.types import Json

Way: TypeAlias = Literal["sampled", "greedy"]
"""At temperature 1, or 0."""
PER_MILLION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One attempt at a task."""

    task_id: str
    template: str
    """Name of the template that the task is an instance of; empty: of nothing that others are, too."""
    reward: float
    graded: float
    """The grader's word, whatever else its reward is made of; 0 for a cheat. It decides whether the try passes."""
    parts: Mapping[str, float]
    """What was recorded with its reward: each part's value before weight and range."""
    prompt_tokens: int
    """Of all its turns; what they share is counted each time."""
    new_tokens: int
    """Those of them that no turn before had."""
    sampled_tokens: int
    turns: int
    summaries: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a million tokens cost, in whatever currency."""

    new: float
    """Prompt tokens that are read for the first time."""
    cached: float
    """Prompt tokens that an earlier turn of the same conversation had read."""
    sampled: float

    def of(self, attempt: Try) -> float:
        """What an attempt costs."""
        cached = attempt.prompt_tokens - attempt.new_tokens
        spent = self.new * attempt.new_tokens + self.cached * cached + self.sampled * attempt.sampled_tokens
        return PER_MILLION * spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One weight version, tried."""

    run: str
    version: int
    digest: str
    tries: Mapping[Way, tuple[tuple[Try | None, ...], ...]]
    """Way → pass → task; ``None``: infrastructure kept it from being tried."""
    engine_s: float
    """How long its engine was busy for it."""
    parts: tuple[str, ...] = ()
    """Those of :attr:`Try.parts` that figures are made of."""

    @property
    def tasks(self) -> int:
        """How many were to be tried."""
        return max((len(tries) for passes in self.tries.values() for tries in passes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How figures are made of tries."""

    pass_at: float = 1.0
    """A try that was graded this or better passes."""
    ks: tuple[int, ...] = (1,)
    """Of which pass@k is told."""
    prices: Prices | None = None

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"k = {list(self.ks)}: expected some numbers from 1 on")

    def passed(self, attempt: Try) -> bool:
        """Whether an attempt counts as a pass."""
        return is_pass(attempt.graded, self.pass_at)


EFFORTS: Mapping[str, Callable[[Try], float]] = {
    "prompt_tokens": lambda attempt: attempt.prompt_tokens,
    "new_tokens": lambda attempt: attempt.new_tokens,
    "sampled_tokens": lambda attempt: attempt.sampled_tokens,
    "turns": lambda attempt: attempt.turns,
    "summaries": lambda attempt: attempt.summaries,
    "seconds": lambda attempt: attempt.seconds,
}
"""What a try takes; figures are per try."""


def figures(evaluation: Evaluation, measure: Measure) -> dict[str, Json]:
    """One version as JSON. Raises :class:`~etude.errors.ConfigError` for a k beyond the tries of every task."""
    return {
        "run": evaluation.run,
        "version": evaluation.version,
        "digest": evaluation.digest,
        "tasks": evaluation.tasks,
        "pass_at": measure.pass_at,
        "engine_seconds": round(evaluation.engine_s, 3),
        **{way: _way(way, evaluation, measure) for way in evaluation.tries},
    }


def differences(before: Evaluation, after: Evaluation, measure: Measure) -> dict[str, Json]:
    """``after`` − ``before`` as JSON, way by way, over the tasks that both have tried.

    Raises :class:`~etude.errors.ConfigError` where they were tried on other tasks.
    """
    ways: dict[str, Json] = {}
    for way in before.tries.keys() & after.tries.keys():
        pairs = _pairs(before.tries[way], after.tries[way])
        parts = [name for name in before.parts if name in after.parts]
        ways[way] = _difference(way, pairs, measure) | {"parts": _part_differences(pairs, parts)}
    if not ways:
        raise ConfigError("the two were not evaluated in the same way: there is nothing to compare")
    return {way: ways[way] for way in sorted(ways, reverse=True)}


def by_task(passes: Sequence[Sequence[Try | None]]) -> list[list[Try]]:
    """The tries of each task."""
    return [[attempt for attempt in tries if attempt is not None] for tries in zip(*passes, strict=True)]


def _way(way: Way, evaluation: Evaluation, measure: Measure) -> dict[str, Json]:
    passes, tasks = len(evaluation.tries[way]), by_task(evaluation.tries[way])
    tried = [tries for tries in tasks if tries]
    if not tried:
        raise ConfigError(f"every {way} try failed by infrastructure: see the logs, and evaluate again")
    ks = measure.ks if way == "sampled" else (1,)
    clusters = _clusters(tried)
    found: dict[str, Json] = {
        "passes": passes,
        "tries": sum(map(len, tasks)),
        "missing": passes * len(tasks) - sum(map(len, tasks)),
        "templates": len(set(clusters)),
        "reward": asdict(mean_of([_mean(tries, _reward) for tries in tried], clusters)),
        "parts": _part_means(tried, evaluation.parts),
        "pass": {str(k): asdict(_pass(tried, k, measure)) for k in ks},
        **{name: _amount(tried, effort) for name, effort in EFFORTS.items()},
    }
    if measure.prices is not None:
        found["cost"] = _amount(tried, measure.prices.of)
    return found


def _amount(tasks: Sequence[Sequence[Try]], value: Callable[[Try], float]) -> dict[str, Json]:
    return asdict(mean_amount([_mean(tries, value) for tries in tasks], _clusters(tasks)))


def _clusters(tasks: Sequence[Sequence[Try]]) -> list[str]:
    """The template of each task; of one that has none, itself."""
    return [tries[0].template or tries[0].task_id for tries in tasks]


def _part_means(tasks: Sequence[Sequence[Try]], names: Sequence[str]) -> dict[str, Json]:
    """Each part over the tries that have it; one that none has is absent."""
    means: dict[str, Json] = {}
    for name in names:
        known = [tries for tries in (_having(name, tries) for tries in tasks) if tries]
        if known:
            means[name] = asdict(mean_of([_mean(tries, _part(name)) for tries in known], _clusters(known)))
    return means


def _pass(tasks: Sequence[Sequence[Try]], k: int, measure: Measure) -> Estimate:
    """pass@k over the tasks that were tried so often."""
    enough = [tries for tries in tasks if len(tries) >= k]
    if not enough:
        raise ConfigError(f"pass@{k} takes {k} tries of a task: no task has so many, raise --passes")
    return mean_of([_rate(tries, k, measure) for tries in enough], _clusters(enough))


def _pairs(
    before: Sequence[Sequence[Try | None]], after: Sequence[Sequence[Try | None]]
) -> list[tuple[list[Try], list[Try]]]:
    """The tries of each task that both have tried."""
    pairs = list(zip(by_task(before), by_task(after), strict=False))
    for index, (first, second) in enumerate(pairs):
        if first and second and first[0].task_id != second[0].task_id:
            raise ConfigError(
                f"held-out task {index} is {first[0].task_id} for one and {second[0].task_id} for the other: only "
                f"runs of the same [tasks] can be compared"
            )
    return [(first, second) for first, second in pairs if first and second]


def _difference(way: Way, pairs: Sequence[tuple[list[Try], list[Try]]], measure: Measure) -> dict[str, Json]:
    """``pairs`` has the tries of each task, before and after."""

    def change(value: Callable[[Try], float]) -> dict[str, Json]:
        return asdict(_paired(pairs, lambda tries: _mean(tries, value)))

    found: dict[str, Json] = {
        "tasks": len(pairs),
        "templates": len(set(_clusters([after for _, after in pairs]))),
        "reward": change(_reward),
        "pass": _pass_differences(pairs, measure.ks if way == "sampled" else (1,), measure),
        "sign_test": asdict(sign_test(*_sides(pairs, lambda tries: _mean(tries, measure.passed)))),
        **{name: change(effort) for name, effort in EFFORTS.items()},
    }
    return found if measure.prices is None else found | {"cost": change(measure.prices.of)}


def _paired(pairs: Sequence[tuple[list[Try], list[Try]]], value: Callable[[Sequence[Try]], float]) -> Estimate:
    return difference_of(*_sides(pairs, value), _clusters([after for _, after in pairs]))


def _part_differences(pairs: Sequence[tuple[list[Try], list[Try]]], names: Sequence[str]) -> dict[str, Json]:
    """Each part over the tasks of which both have tries with it; one that no task has is absent."""
    changes: dict[str, Json] = {}
    for name in names:
        known = [(_having(name, before), _having(name, after)) for before, after in pairs]
        both = [pair for pair in known if all(pair)]
        if both:
            changes[name] = asdict(_paired(both, partial(_mean, value=_part(name))))
    return changes


def _pass_differences(
    pairs: Sequence[tuple[list[Try], list[Try]]], ks: Sequence[int], measure: Measure
) -> dict[str, Json]:
    """pass@k over the tasks that both have tried so often."""
    rates: dict[str, Json] = {}
    for k in ks:
        enough = [pair for pair in pairs if min(map(len, pair)) >= k]
        rate = partial(_rate, k=k, measure=measure)
        rates[str(k)] = asdict(_paired(enough, rate)) if enough else None
    return rates


def _sides(
    pairs: Sequence[tuple[list[Try], list[Try]]], value: Callable[[Sequence[Try]], float]
) -> tuple[list[float], list[float]]:
    """One value per task, before and after."""
    return [value(before) for before, _ in pairs], [value(after) for _, after in pairs]


def _rate(tries: Sequence[Try], k: int, measure: Measure) -> float:
    return pass_at_k(len(tries), sum(map(measure.passed, tries)), k)


def _mean(tries: Sequence[Try], value: Callable[[Try], float]) -> float:
    return sum(map(value, tries)) / len(tries)


def _having(name: str, tries: Sequence[Try]) -> list[Try]:
    return [attempt for attempt in tries if name in attempt.parts]


def _part(name: str) -> Callable[[Try], float]:
    return lambda attempt: attempt.parts[name]


def _reward(attempt: Try) -> float:
    return attempt.reward
