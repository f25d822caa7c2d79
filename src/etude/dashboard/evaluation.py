"""Results of an evaluation: attempts at held-out tasks, and the figures computed from them.

    tries ──▶ one value per task ──▶ figures of one version          two of them ──▶ figures of the difference

Owns the types and the set of figures; the statistics are in :mod:`etude.dashboard.statistics`, the tables of these
figures in :mod:`etude.dashboard.evaluation_text`. A task that
infrastructure prevented is missing: it is counted, and no figure treats it as a failure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Literal, TypeAlias

from etude.config.recipe import is_pass
from etude.dashboard.statistics import Estimate, difference_of, mean_amount, mean_of, pass_at_k, sign_test
from etude.errors import ConfigError
from etude.types import Json

SamplingMode: TypeAlias = Literal["sampled", "greedy"]
"""Temperature 1 or 0."""
PER_MILLION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One attempt at a task."""

    task_id: str
    template: str
    """Name of the task's template; empty if it has none."""
    reward: float
    graded: float
    """The grade, without other parts of the reward; 0 for a cheat. It decides whether the attempt passes."""
    parts: Mapping[str, float]
    """Values recorded with its reward: each part's value before weight and range."""
    prompt_tokens: int
    """Prompt tokens of all turns; common prefixes are counted each time."""
    new_tokens: int
    """Prompt tokens that were in no earlier turn."""
    sampled_tokens: int
    turns: int
    summaries: int
    seconds: float
    amounts: Mapping[str, float] = field(default_factory=dict)
    """Other measurements by its harness or its model's API; unknown ones are absent."""
    is_cheat: bool = False
    """True if it is suspected of cheating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices of a million tokens, in one currency."""

    new: float
    """Prompt tokens that are read for the first time."""
    cached: float
    """Prompt tokens that an earlier turn of the same conversation has read."""
    sampled: float

    def of(self, attempt: Try) -> float:
        """Cost of an attempt."""
        cached = attempt.prompt_tokens - attempt.new_tokens
        spent = self.new * attempt.new_tokens + self.cached * cached + self.sampled * attempt.sampled_tokens
        return PER_MILLION * spent


def read_prices(prices: tuple[float, float, float] | None) -> TokenPrices | None:
    """The prices of ``--prices``: of new, cached and sampled tokens."""
    return prices and TokenPrices(new=prices[0], cached=prices[1], sampled=prices[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All evaluation attempts of one weight version."""

    run: str
    version: int
    digest: str
    tries: Mapping[SamplingMode, tuple[tuple[Try | None, ...], ...]]
    """Sampling mode → pass → task; ``None`` for an attempt that infrastructure prevented."""
    engine_s: float
    """Busy time of its engine during the evaluation."""
    parts: tuple[str, ...] = ()
    """Names in :attr:`Try.parts` for which there are figures."""
    amounts: tuple[str, ...] = ()
    """Names in :attr:`Try.amounts` for which there are figures."""
    label: str = ""
    """Name shown after that of the run; empty: the weight version."""

    @property
    def tasks(self) -> int:
        """Number of tasks in the evaluation."""
        return max((len(tries) for passes in self.tries.values() for tries in passes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Rules by which figures are computed from attempts."""

    pass_at: float = 1.0
    """Minimum grade of an attempt that passes."""
    ks: tuple[int, ...] = (1,)
    """The values of k for pass@k."""
    prices: TokenPrices | None = None

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"k = {list(self.ks)}: expected some numbers from 1 on")

    def passed(self, attempt: Try) -> bool:
        """True if an attempt counts as a pass."""
        return is_pass(attempt.graded, self.pass_at)


NamedValues: TypeAlias = Callable[[Try], Mapping[str, float]]
"""The named values of an attempt."""
PARTS: NamedValues = attrgetter("parts")
AMOUNTS: NamedValues = attrgetter("amounts")
EFFORTS: Mapping[str, Callable[[Try], float]] = {
    name: attrgetter(name)
    for name in ("prompt_tokens", "new_tokens", "sampled_tokens", "turns", "summaries", "seconds")
}
"""Effort of an attempt; figures are per attempt."""


def figures(evaluation: Evaluation, measure: Measure) -> dict[str, Json]:
    """The figures of one version as JSON. Raises :class:`~etude.errors.ConfigError` for a k above the attempts."""
    return {
        "run": evaluation.run,
        "version": evaluation.version,
        "label": evaluation.label or f"v{evaluation.version}",
        "digest": evaluation.digest,
        "tasks": evaluation.tasks,
        "pass_at": measure.pass_at,
        "engine_seconds": round(evaluation.engine_s, 3),
        **{mode: _mode_figures(mode, evaluation, measure) for mode in evaluation.tries},
    }


def differences(before: Evaluation, after: Evaluation, measure: Measure) -> dict[str, Json]:
    """Differences ``after`` − ``before`` as JSON, per sampling mode, over the tasks that both versions attempted, with
    the mean of each version over these.

    Raises :class:`~etude.errors.ConfigError` if their tasks differ.
    """
    modes: dict[str, Json] = {}
    for mode in before.tries.keys() & after.tries.keys():
        pairs = _pairs(before.tries[mode], after.tries[mode])
        parts = [name for name in before.parts if name in after.parts]
        amounts = [name for name in before.amounts if name in after.amounts]
        modes[mode] = {
            **_difference(mode, pairs, measure),
            **_named_differences(pairs, AMOUNTS, amounts),
            "parts": _named_differences(pairs, PARTS, parts),
        }
    if not modes:
        raise ConfigError("the two were not evaluated in the same way: there is nothing to compare")
    return {mode: modes[mode] for mode in sorted(modes, reverse=True)}


def by_task(passes: Sequence[Sequence[Try | None]]) -> list[list[Try]]:
    """Group attempts by task."""
    return [[attempt for attempt in tries if attempt is not None] for tries in zip(*passes, strict=True)]


def _mode_figures(mode: SamplingMode, evaluation: Evaluation, measure: Measure) -> dict[str, Json]:
    passes, tasks = len(evaluation.tries[mode]), by_task(evaluation.tries[mode])
    tried = [tries for tries in tasks if tries]
    if not tried:
        raise ConfigError(f"every {mode} try failed by infrastructure: see the logs, and evaluate again")
    ks = measure.ks if mode == "sampled" else (1,)
    clusters = _clusters(tried)
    mode_figures: dict[str, Json] = {
        "passes": passes,
        "tries": sum(map(len, tasks)),
        "missing": passes * len(tasks) - sum(map(len, tasks)),
        "templates": len(set(clusters)),
        "reward": asdict(mean_of([_mean(tries, _reward) for tries in tried], clusters)),
        "parts": _named_means(tried, PARTS, evaluation.parts, mean_of),
        "pass": {str(k): asdict(_pass(tried, k, measure)) for k in ks},
        **{name: _amount(tried, effort) for name, effort in EFFORTS.items()},
        **_named_means(tried, AMOUNTS, evaluation.amounts, mean_amount),
    }
    if measure.prices is not None:
        mode_figures["cost"] = _amount(tried, measure.prices.of)
    return mode_figures


def _amount(tasks: Sequence[Sequence[Try]], value: Callable[[Try], float]) -> dict[str, Json]:
    return asdict(mean_amount([_mean(tries, value) for tries in tasks], _clusters(tasks)))


def _clusters(tasks: Sequence[Sequence[Try]]) -> list[str]:
    """The template of each task; for a task without a template, its own id."""
    return [tries[0].template or tries[0].task_id for tries in tasks]


def _named_means(
    tasks: Sequence[Sequence[Try]],
    values: NamedValues,
    names: Sequence[str],
    mean: Callable[[Sequence[float], Sequence[str]], Estimate],
) -> dict[str, Json]:
    """Mean of each named value over the attempts that have it; a value that no attempt has is absent."""
    means: dict[str, Json] = {}
    for name in names:
        having = [tries for tries in (_having(values, name, tries) for tries in tasks) if tries]
        if having:
            means[name] = asdict(mean([_mean(tries, _named(values, name)) for tries in having], _clusters(having)))
    return means


def _pass(tasks: Sequence[Sequence[Try]], k: int, measure: Measure) -> Estimate:
    """pass@k over the tasks with at least k attempts."""
    enough = [tries for tries in tasks if len(tries) >= k]
    if not enough:
        raise ConfigError(f"pass@{k} takes {k} tries of a task: no task has so many, raise --passes")
    return mean_of([_rate(tries, k, measure) for tries in enough], _clusters(enough))


def _pairs(
    before: Sequence[Sequence[Try | None]], after: Sequence[Sequence[Try | None]]
) -> list[tuple[list[Try], list[Try]]]:
    """The attempts at each task that both have attempted."""
    pairs = list(zip(by_task(before), by_task(after), strict=False))
    for index, (first, second) in enumerate(pairs):
        if first and second and first[0].task_id != second[0].task_id:
            raise ConfigError(
                f"held-out task {index} is {first[0].task_id} for one and {second[0].task_id} for the other: only "
                f"runs of the same [tasks] can be compared"
            )
    return [(first, second) for first, second in pairs if first and second]


def _difference(mode: SamplingMode, pairs: Sequence[tuple[list[Try], list[Try]]], measure: Measure) -> dict[str, Json]:
    """Differences for ``pairs``, the attempts at each task, before and after."""

    def change(value: Callable[[Try], float]) -> dict[str, Json]:
        return _paired(pairs, lambda tries: _mean(tries, value))

    mode_figures: dict[str, Json] = {
        "tasks": len(pairs),
        "templates": len(set(_clusters([after for _, after in pairs]))),
        "reward": change(_reward),
        "pass": _pass_differences(pairs, measure.ks if mode == "sampled" else (1,), measure),
        "sign_test": asdict(sign_test(*_sides(pairs, lambda tries: _mean(tries, measure.passed)))),
        **{name: change(effort) for name, effort in EFFORTS.items()},
    }
    return mode_figures if measure.prices is None else mode_figures | {"cost": change(measure.prices.of)}


def _paired(pairs: Sequence[tuple[list[Try], list[Try]]], value: Callable[[Sequence[Try]], float]) -> dict[str, Json]:
    """The difference, and the mean of each version over the same tasks."""
    before, after = _sides(pairs, value)
    difference = difference_of(before, after, _clusters([second for _, second in pairs]))
    return {**asdict(difference), "before": fmean(before), "after": fmean(after)}


def _named_differences(
    pairs: Sequence[tuple[list[Try], list[Try]]], values: NamedValues, names: Sequence[str]
) -> dict[str, Json]:
    """Difference of each named value over the tasks for which both have attempts with it; otherwise it is absent."""
    changes: dict[str, Json] = {}
    for name in names:
        having = [(_having(values, name, before), _having(values, name, after)) for before, after in pairs]
        both = [pair for pair in having if all(pair)]
        if both:
            changes[name] = _paired(both, partial(_mean, value=_named(values, name)))
    return changes


def _pass_differences(
    pairs: Sequence[tuple[list[Try], list[Try]]], ks: Sequence[int], measure: Measure
) -> dict[str, Json]:
    """pass@k over the tasks with at least k attempts in both."""
    rates: dict[str, Json] = {}
    for k in ks:
        enough = [pair for pair in pairs if min(map(len, pair)) >= k]
        rate = partial(_rate, k=k, measure=measure)
        rates[str(k)] = _paired(enough, rate) if enough else None
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


def _having(values: NamedValues, name: str, tries: Sequence[Try]) -> list[Try]:
    return [attempt for attempt in tries if name in values(attempt)]


def _named(values: NamedValues, name: str) -> Callable[[Try], float]:
    return lambda attempt: values(attempt)[name]


def _reward(attempt: Try) -> float:
    return attempt.reward
