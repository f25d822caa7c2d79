"""The tab *Compare*: two versions or runs, task by task, with paired intervals and the rollouts that differ.

    RUN:LABEL, RUN:LABEL ──▶ tasks that both have attempted ──▶ rates, their difference, templates, tasks

Owns the set of figures; :mod:`etude.dashboard.statistics` owns the statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import cast

from etude.dashboard.statistics import Estimate, difference_of, mean_of, sign_test
from etude.errors import UserError
from etude.types import Json
from etude.ui.heldout_tries import HeldoutTry, TriedTask, Way, evaluations, heldout_tries
from etude.ui.routes import NotFound, Routes, RunQuery
from etude.ui.runs import RunList

WAYS: tuple[Way, ...] = ("sampled", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A task that both have attempted, and its value in each: a share of passes, or a mean reward."""

    before: TriedTask
    after: TriedTask
    values: tuple[float, float]


def compare(runs: RunList, options: Mapping[str, str]) -> Json:
    """Compare two evaluations, ``b`` − ``a``, each as RUN:LABEL; ``way`` is ``sampled`` or ``greedy``.

    Raises :class:`~etude.errors.UserError` if they cannot be compared.
    """
    way = cast(Way, options.get("way") or "sampled")
    if way not in WAYS:
        raise UserError(f"way={way!r}: expected {' or '.join(WAYS)}")
    (before, its_run), (after, other_run) = (_side(runs, options.get(name, ""), way) for name in ("a", "b"))
    has_fractions = any(
        each.reward not in (0, 1) for task in (*before.values(), *after.values()) for each in task.tries
    )
    pairs = [
        _Pair(before=task, after=other, values=(_value(task, has_fractions), _value(other, has_fractions)))
        for task_id, task in before.items()
        if (other := after.get(task_id)) and task.tries and other.tries
    ]
    if not pairs:
        raise UserError("the two have no held-out task in common: there is nothing to compare")
    firsts, seconds = [pair.values[0] for pair in pairs], [pair.values[1] for pair in pairs]
    clusters = [pair.before.cluster for pair in pairs]
    return {
        "measure": "reward" if has_fractions else "pass",
        "tasks": len(pairs),
        "untried": len(before.keys() | after.keys()) - len(pairs),
        "a": _estimate(mean_of(firsts, clusters)),
        "b": _estimate(mean_of(seconds, clusters)),
        "difference": _estimate(difference_of(firsts, seconds, clusters)),
        "sign": asdict(sign_test(firsts, seconds)),
        "templates": [_template(name, pairs) for name in dict.fromkeys(clusters)],
        "rows": [_row(pair, its_run, other_run) for pair in pairs],
    }


def evaluation_list(query: RunQuery) -> Json:
    """The evaluations of a run that can be compared."""
    return evaluations(query.run)


def _side(runs: RunList, text: str, way: Way) -> tuple[dict[str, TriedTask], str]:
    """The tasks of RUN:LABEL by their ids, and the run's id."""
    run_id, _, label = text.partition(":")
    run = runs.get(run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id!r} here")
    tasks = heldout_tries(run, label, way)
    if not any(task.tries for task in tasks):
        raise NotFound(f"run {run_id!r} has no {way} tries of an evaluation {label!r}")
    return {task.task_id: task for task in tasks}, run_id


def _value(task: TriedTask, has_fractions: bool) -> float:
    return fmean(each.reward if has_fractions else float(each.passed) for each in task.tries)


def _template(name: str, pairs: Sequence[_Pair]) -> Json:
    """Figures of one template's tasks; a single task has no interval."""
    own = [pair.values for pair in pairs if pair.before.cluster == name]
    firsts, seconds = [first for first, _ in own], [second for _, second in own]
    difference = difference_of(firsts, seconds, [name] * len(own)) if len(own) > 1 else None
    return {
        "template": name,
        "tasks": len(own),
        "a": fmean(firsts),
        "b": fmean(seconds),
        "low": None if difference is None else difference.low,
        "high": None if difference is None else difference.high,
    }


def _row(pair: _Pair, its_run: str, other_run: str) -> Json:
    task = pair.before
    return {
        "task": task.task_id,
        "template": task.template,
        "prompt": task.prompt,
        "a": pair.values[0],
        "b": pair.values[1],
        "a_tries": [_try(each, its_run) for each in task.tries],
        "b_tries": [_try(each, other_run) for each in pair.after.tries],
    }


def _try(attempt: HeldoutTry, run_id: str) -> Json:
    rollout, traits = attempt.rollout, attempt.rollout.traits if attempt.rollout else None
    return {
        "run": run_id,
        "reward": attempt.reward,
        "passed": attempt.passed,
        "rollout": rollout.rollout_id if rollout else None,
        "reason": rollout.reason if rollout else None,
        "turns": traits.turns if traits else None,
        "tokens": traits.sampled_tokens if traits else None,
    }


def _estimate(estimate: Estimate) -> Json:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "method": estimate.method}


ROUTES: Routes = {"GET /evaluations": evaluation_list}
