"""Results of an evaluation: attempts at held-out tasks, and the figures computed from them.

    tries ──▶ one value per task ──▶ figures of one version          two of them ──▶ figures of the difference

Owns the types and the set of figures; the statistics are in :mod:`etude.dashboard.statistics`. A task that
infrastructure prevented is missing: it is counted, and no figure treats it as a failure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Literal, TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.config.recipe import is_pass
from etude.dashboard.formatting import MISSING, count, decimal, number_at, percent, points, signed, small
from etude.dashboard.statistics import Estimate, difference_of, mean_amount, mean_of, pass_at_k, sign_test
from etude.dashboard.terminal import ACCENT, DIM, WARN
from etude.errors import ConfigError
from etude.types import Json

Way: TypeAlias = Literal["sampled", "greedy"]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All evaluation attempts of one weight version."""

    run: str
    version: int
    digest: str
    tries: Mapping[Way, tuple[tuple[Try | None, ...], ...]]
    """Way → pass → task; ``None`` for an attempt that infrastructure prevented."""
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
        **{way: _way(way, evaluation, measure) for way in evaluation.tries},
    }


def differences(before: Evaluation, after: Evaluation, measure: Measure) -> dict[str, Json]:
    """Differences ``after`` − ``before`` as JSON, per sampling mode, over the tasks that both versions attempted, with
    the mean of each version over these.

    Raises :class:`~etude.errors.ConfigError` if their tasks differ.
    """
    ways: dict[str, Json] = {}
    for way in before.tries.keys() & after.tries.keys():
        pairs = _pairs(before.tries[way], after.tries[way])
        parts = [name for name in before.parts if name in after.parts]
        amounts = [name for name in before.amounts if name in after.amounts]
        ways[way] = {
            **_difference(way, pairs, measure),
            **_named_differences(pairs, AMOUNTS, amounts),
            "parts": _named_differences(pairs, PARTS, parts),
        }
    if not ways:
        raise ConfigError("the two were not evaluated in the same way: there is nothing to compare")
    return {way: ways[way] for way in sorted(ways, reverse=True)}


def by_task(passes: Sequence[Sequence[Try | None]]) -> list[list[Try]]:
    """Group attempts by task."""
    return [[attempt for attempt in tries if attempt is not None] for tries in zip(*passes, strict=True)]


def _way(way: Way, evaluation: Evaluation, measure: Measure) -> dict[str, Json]:
    passes, tasks = len(evaluation.tries[way]), by_task(evaluation.tries[way])
    tried = [tries for tries in tasks if tries]
    if not tried:
        raise ConfigError(f"every {way} try failed by infrastructure: see the logs, and evaluate again")
    ks = measure.ks if way == "sampled" else (1,)
    clusters = _clusters(tried)
    figures_of_way: dict[str, Json] = {
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
        figures_of_way["cost"] = _amount(tried, measure.prices.of)
    return figures_of_way


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


def _difference(way: Way, pairs: Sequence[tuple[list[Try], list[Try]]], measure: Measure) -> dict[str, Json]:
    """Differences for ``pairs``, the attempts at each task, before and after."""

    def change(value: Callable[[Try], float]) -> dict[str, Json]:
        return _paired(pairs, lambda tries: _mean(tries, value))

    figures_of_way: dict[str, Json] = {
        "tasks": len(pairs),
        "templates": len(set(_clusters([after for _, after in pairs]))),
        "reward": change(_reward),
        "pass": _pass_differences(pairs, measure.ks if way == "sampled" else (1,), measure),
        "sign_test": asdict(sign_test(*_sides(pairs, lambda tries: _mean(tries, measure.passed)))),
        **{name: change(effort) for name, effort in EFFORTS.items()},
    }
    return figures_of_way if measure.prices is None else figures_of_way | {"cost": change(measure.prices.of)}


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


WAYS = ("sampled", "greedy")
"""Sampling modes in display order."""
Notation = Callable[[float | None], str]
"""Function that formats a figure."""


def evaluation_table(figures: Mapping[str, Json]) -> RenderableType:
    """Text table of one version: its pass rates, tokens, time and cost."""
    parts: list[RenderableType] = [_title([figures])]
    for way in _ways(figures):
        table = _table(_tries(figures, way), "mean", "95 % interval")
        for label, path, written, _ in _rows(figures, way):
            of = partial(number_at, figures)
            low, high = written(of(f"{path}.low")), written(of(f"{path}.high"))
            table.add_row(label, Text(written(of(f"{path}.value")), "bold"), f"{low} to {high}")
        parts += [Text(), table]
    return Group(*parts, *_footnotes(figures))


def comparison_table(
    before: Mapping[str, Json], after: Mapping[str, Json], differences: Mapping[str, Json]
) -> RenderableType:
    """Text table of two versions on the tasks that both tried, and their difference."""
    parts: list[RenderableType] = [_title([before, after])]
    for way in _ways(differences):
        table = _table(_tries(after, way), str(before["label"]), str(after["label"]), "difference", "95 % interval")
        for label, path, written, changed in _rows(after, way):
            value, low, high = (number_at(differences, f"{path}.{name}") for name in ("value", "low", "high"))
            is_clear = value is not None and low is not None and high is not None and low * high > 0
            table.add_row(
                label,
                written(number_at(differences, f"{path}.before")),
                written(number_at(differences, f"{path}.after")),
                Text(changed(value), "bold" if is_clear else "default"),
                f"{changed(low)} to {changed(high)}",
            )
        parts += [Text(), table, _test(differences, way)]
    return Group(*parts, *_footnotes(differences))


def _title(versions: list[Mapping[str, Json]]) -> RenderableType:
    first, last = versions[0], versions[-1]
    names = [f"{version['run']} {version['label']}" for version in versions]
    if len(names) > 1 and first["run"] == last["run"]:
        names[1] = str(last["label"])
    text = Text(" → ".join(names), f"bold {ACCENT}")
    passes = f"graded {number_at(last, 'pass_at'):g} or better passes"
    return text.append(f" · {count(number_at(last, 'tasks'))} held-out tasks · {passes}", DIM)


def _ways(figures: Mapping[str, Json]) -> list[str]:
    return [way for way in WAYS if way in figures]


def _tries(figures: Mapping[str, Json], way: str) -> Text:
    """The header of the first column: the sampling mode and the number of missing attempts."""
    passes, missing = number_at(figures, f"{way}.passes"), number_at(figures, f"{way}.missing")
    text = Text(way if way == "greedy" else f"sampled ×{count(passes)}", ACCENT)
    return text.append(f", {count(missing)} tries missing", WARN) if missing else text


def _section(figures: Mapping[str, Json], way: str) -> dict[str, Json]:
    section = figures[way]
    assert isinstance(section, dict)
    return section


def _rows(figures: Mapping[str, Json], way: str) -> Iterator[tuple[str, str, Notation, Notation]]:
    """Rows: label, path, formatter of the figure, and formatter of a difference."""
    section = _section(figures, way)
    rates = section["pass"]
    assert isinstance(rates, dict)
    for k in rates:
        yield f"pass@{k}", f"{way}.pass.{k}", percent, points
    yield "reward", f"{way}.reward", partial(decimal, digits=3), partial(signed, digits=3)
    parts = section["parts"]
    assert isinstance(parts, dict)
    for name in parts:
        yield f"  {name}", f"{way}.parts.{name}", partial(decimal, digits=3), partial(signed, digits=3)
    for name in LABELS:
        if name in section and (name not in IF_ANY or number_at(figures, f"{way}.{name}.value")):
            yield LABELS[name], f"{way}.{name}", _number, _signed_number


LABELS: Mapping[str, str] = {
    "sampled_tokens": "tokens sampled",
    "new_tokens": "tokens read",
    "prompt_tokens": "tokens prompted",
    "turns": "turns",
    "seconds": "seconds",
    "call_s": "seconds per call",
    "tool_errors": "tool errors",
    "refused_calls": "calls refused",
    "summaries": "summaries",
    "cost": "cost",
}
"""Figure of an attempt → label of its row, in the order of rows."""


IF_ANY = ("summaries", "refused_calls")
"""Figures without a row if they are zero."""


def _test(differences: Mapping[str, Json], way: str) -> RenderableType:
    wins, losses, ties, p = (
        number_at(differences, f"{way}.sign_test.{name}") for name in ("wins", "losses", "ties", "p")
    )
    name = "McNemar, exact" if way == "greedy" else "exact sign test over tasks"
    text = Text(f"better on {count(wins)} tasks, worse on {count(losses)}, alike on {count(ties)}: ")
    return text.append(f"p = {small(p)}", "bold" if p is not None and p < 0.05 else "default").append(f" ({name})", DIM)


def _footnotes(figures: Mapping[str, Json]) -> Iterator[RenderableType]:
    methods: dict[str, None] = {}
    for way in _ways(figures):
        methods |= dict.fromkeys(_methods(_section(figures, way)))
    templates = max(number_at(figures, f"{way}.templates") or 0.0 for way in _ways(figures))
    yield Text()
    yield Text(f"intervals over {count(templates)} templates: {'; '.join(methods)}", DIM)
    yield Text("tokens, turns, seconds and cost are per try; tokens read leave out what an earlier turn had", DIM)
    busy_s = number_at(figures, "engine_seconds")
    if busy_s:
        yield Text(f"engine busy {decimal(busy_s, 1)} s for all tries that were ever made of this version", DIM)


def _methods(section: Json) -> Iterator[str]:
    if isinstance(section, dict):
        method = section.get("method")
        if isinstance(method, str):
            yield method
        for part in section.values():
            yield from _methods(part)


def _table(first: Text, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, border_style=DIM, header_style=DIM, show_edge=False, pad_edge=False)
    table.add_column(first, min_width=16, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None) -> str:
    """Format with three digits or more, since the magnitudes differ much."""
    if value is None or abs(value) >= 1000:
        return count(value)
    return small(value) if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def _signed_number(value: float | None) -> str:
    return MISSING if value is None else f"{'+' if value >= 0 else '−'}{_number(abs(value))}"
