"""Results of a run as one JSON object: ``report.json`` and the source of every figure on the page.

Owns the computation of figures from facts. An unknown figure (a run that stopped early) is ``None``, never 0. Averages
over tokens are weighted by tokens.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TypeAlias

from etude.config.recipe import RunConfig
from etude.dashboard.heldout import heldout_figures
from etude.dashboard.learning import cut_short, declined, ends, nothing_learnt, without_signal
from etude.dashboard.run_metrics import LIVE, TRAIN, RunMetrics, Tally, total
from etude.telemetry.events import EvalDone, MismatchMeasured, StepDone
from etude.telemetry.hacks import HackRates
from etude.telemetry.metrics import METRICS, Metric, Notation
from etude.telemetry.public import public
from etude.types import Json, RolloutStatus

Figures: TypeAlias = dict[str, Json]
"""One section of the report."""


def build_report(
    run: RunMetrics, config: RunConfig, *, machine: Mapping[str, Json], date: str, commit: str
) -> dict[str, Json]:
    """Every figure of a run. ``machine`` names the processor, its cores and the versions of Python and torch."""
    return build_figures(run, config, machine=machine, date=date, commit=commit) | {"curve": _curve(run)}


def build_figures(
    run: RunMetrics, config: RunConfig, *, machine: Mapping[str, Json], date: str, commit: str
) -> dict[str, Json]:
    """A report without its ``curve``, which has a row for each step."""
    steps = [timed.event for timed in run.steps]
    return {
        "name": config.name,
        "seed": config.seed,
        "date": date,
        "commit": commit,
        "machine": dict(machine),
        "finished": run.phase == "done",
        "steps": len(steps),
        "learning": learning_figures(run),
        "heldout": _heldout(run),
        "seconds": _seconds(run),
        "tokens": _tokens(run, steps),
        **_load(run, steps),
        "staleness": _staleness(steps, config.rollouts.max_staleness),
        "mismatch": _mismatch(run, steps),
        "weights": _weights(run),
        "rollouts": _rollouts(run.rollouts.get(TRAIN, Tally())),
        "live": _rollouts(run.rollouts.get(LIVE, Tally())),
        "regions": {name or "home": asdict(use) for name, use in sorted(run.regions.items())},
        "cheating": run.hacks.get(TRAIN, HackRates()).figures(),
        "judge_alarms": [asdict(alarm) for alarm in run.judge_alarms],
        "restarts": run.restarts,
        "memory_bytes_max": run.memory_bytes_max,
        "interruptions": max(0, len(run.segments) - 1),
        "midtrain_curve": _imitation_curve(run, "midtrain"),
        "sft_curve": _imitation_curve(run, "sft"),
        "heldout_curve": _heldout_curve(run),
        "lineage": [asdict(ended) for ended in run.lineage.values()],
        "config": public(config.model_dump(mode="json")),
    }


def _heldout(run: RunMetrics) -> Figures:
    before, after = run.evals.get("before"), run.evals.get("after")
    return heldout_figures(before, after) | {"recall_before": _recall(before), "recall_after": _recall(after)}


def _recall(result: EvalDone | None) -> float | None:
    """Share of the facts in summaries, among those that the task needs and the agent had seen by then."""
    parts = result.sampled_parts if result else {}
    return _ratio(_divide(parts.get("facts_kept", 0.0), parts.get("facts_seen", 0.0)))


def _seconds(run: RunMetrics) -> Figures:
    evals = [seconds for phase in ("eval-before", "eval-after") if (seconds := run.phase_s(phase)) is not None]
    return {
        "total": _tenth(run.total_s() if run.segments else None),
        "midtrain": _tenth(run.phase_s("midtrain")),
        "sft": _tenth(run.phase_s("sft")),
        "rl": _tenth(run.phase_s("rl")),
        "eval": _tenth(sum(evals) if evals else None),
    }


def _tokens(run: RunMetrics, steps: list[StepDone]) -> Figures:
    training = run.rollouts.get(TRAIN)
    engine = run.engine_in("rl")
    reused = sum(stats.reused_tokens for stats in engine)
    generated = sum(stats.generated_tokens for stats in engine)
    drafted = sum(stats.drafted_tokens for stats in engine)
    accepted = sum(stats.accepted_tokens for stats in engine)
    return {
        "generated": generated if engine else None,
        "kept": training.sampled_tokens if training else None,
        "trained": total(steps, "trained_tokens") if steps else None,
        "loss": total(steps, "loss_tokens") if steps else None,
        "midtrain": _read_tokens(run, "midtrain"),
        "sft": _read_tokens(run, "sft"),
        "reused_share": _ratio(_divide(reused, reused + sum(stats.prefill_tokens for stats in engine))),
        "accepted_share": _ratio(_divide(accepted, drafted)),
        "per_engine_step": _ratio(_divide(generated, generated - accepted)) if drafted else None,
    }


def _load(run: RunMetrics, steps: list[StepDone]) -> Figures:
    engine = run.engine_in("rl")
    engine_s = sum(stats.busy_s for stats in engine)
    trainer_s = total(steps, "busy_s")
    rl_s = run.phase_s("rl") or 0.0
    return {
        "busy": {
            "trainer": _ratio(_divide(trainer_s, rl_s)) if steps else None,
            "engine": _ratio(_divide(engine_s, rl_s * len(run.engines))) if engine else None,
        },
        "compute_ratio_inference_to_training": _ratio(_divide(engine_s, trainer_s) if engine else None),
    }


def _staleness(steps: list[StepDone], bound: int) -> Figures:
    tokens = total(steps, "staleness_tokens")
    return {
        "mean": _ratio(_divide(total(steps, "staleness_sum"), tokens)),
        "max": max((step.metrics.get("staleness_max", 0) for step in steps), default=None),
        "bound": bound,
    }


def _mismatch(run: RunMetrics, steps: list[StepDone]) -> Figures:
    compared = [step.metrics for step in steps if step.metrics["mismatch_tokens"]]
    tokens = sum(step["mismatch_tokens"] for step in compared)
    pairs = sum(step["mismatch_pairs"] for step in compared)
    return {
        "k1": _significant(_mean((step["k1"], step["mismatch_tokens"]) for step in compared)),
        "k3": _significant(_mean((step["k3"], step["mismatch_tokens"]) for step in compared)),
        "p99": _significant(_mean((step["mismatch_p99"], step["mismatch_tokens"]) for step in compared)),
        "p99_worst": _significant(max((step["mismatch_p99"] for step in compared), default=None)),
        "max": _significant(max((step["mismatch_max"] for step in compared), default=None)),
        "equal": _share(sum(step["mismatch_equal"] for step in compared), tokens),
        "flips": _significant(_divide(sum(step["mismatch_flips"] for step in compared), pairs)),
        "coverage": _ratio(_divide(tokens, total(steps, "staleness_tokens"))),
        "warnings": len(run.warnings) if compared else None,
        "by_position": _breakdown(run, "position"),
        "by_version": _breakdown(run, "version"),
    }


def _breakdown(run: RunMetrics, by: str) -> list[Json] | None:
    """One row for all steps' rows with the same first position, or version."""
    rows = [row for row in run.mismatch.values() if row.by == by]
    firsts = sorted({row.first for row in rows})
    return [_row([row for row in rows if row.first == first]) for first in firsts] or None


def _row(rows: list[MismatchMeasured]) -> dict[str, Json]:
    tokens = sum(row.tokens for row in rows)
    return {
        "first": rows[0].first,
        "last": rows[0].last,
        "tokens": tokens,
        "k1": _significant(_mean((row.k1, row.tokens) for row in rows)),
        "k3": _significant(_mean((row.k3, row.tokens) for row in rows)),
        "p99": _significant(_mean((row.p99, row.tokens) for row in rows)),
        "max": _significant(max(row.max for row in rows)),
        "equal": _share(sum(row.equal for row in rows), tokens),
        "flips": _significant(_divide(sum(row.flips for row in rows), sum(row.pairs for row in rows))),
    }


def _weights(run: RunMetrics) -> Figures:
    published = [timed.event for timed in run.published]
    full = [weights.size_bytes for weights in published if weights.kind == "full"]
    deltas = [weights.size_bytes for weights in published if weights.kind == "delta"]
    pauses = [timed.event.pause_ms for timed in run.swapped]
    stages = [timed.event.stage_ms for timed in run.swapped]
    return {
        "versions": len({weights.version for weights in published}) if published else None,
        "full_bytes": full[-1] if full else None,
        "mean_delta_bytes": round(sum(deltas) / len(deltas)) if deltas else None,
        "state_bytes": published[-1].state_bytes if published else None,
        "publish_s": _significant(_mean((weights.seconds, 1) for weights in published)),
        "trainer_blocked_s": _significant(_mean((weights.blocked_s, 1) for weights in published)),
        "swap_pause_ms": _significant(_mean((pause, 1) for pause in pauses)),
        "swap_pause_ms_max": _significant(max(pauses, default=None)),
        "stage_ms": _significant(_mean((stage, 1) for stage in stages)),
        "stage_ms_max": _significant(max(stages, default=None)),
    }


def _rollouts(tally: Tally) -> Figures:
    """Counts of rollouts by status; zero is a known value once any rollout has closed."""
    return {str(status): tally.statuses[status] if tally.closed else None for status in RolloutStatus}


def _read_tokens(run: RunMetrics, phase: str) -> int | None:
    timeline = run.imitation.get(phase)
    return timeline[-1].event.tokens if timeline else None


def _heldout_curve(run: RunMetrics) -> list[Json]:
    """Every held-out measurement, in order: losses of the imitation phases, pass rates of RL by weight version."""
    losses: list[Json] = [
        {
            "phase": phase,
            "step": step,
            "loss": _ratio(heldout_loss.loss),
            "action_loss": _ratio(heldout_loss.action_loss),
            "sources": _ratios(heldout_loss.sources),
        }
        for (phase, step), heldout_loss in sorted(run.heldout.items())
    ]
    passes: list[Json] = [
        {
            "phase": "rl",
            "step": done.version,
            "tasks": done.tasks,
            "sampled_pass": _ratio(done.sampled_pass),
            "sampled_stderr": _ratio(done.sampled_stderr),
            "sampled_parts": _ratios(done.sampled_parts),
            "greedy_parts": _ratios(done.greedy_parts),
        }
        for done in sorted(run.evals.values(), key=lambda done: done.version)
    ]
    return losses + passes


def _imitation_curve(run: RunMetrics, phase: str) -> list[Json]:
    return [
        {
            "step": timed.event.step,
            "tokens": timed.event.tokens,
            "loss": _ratio(timed.event.loss),
            "action_loss": _ratio(timed.event.action_loss),
        }
        for timed in run.imitation.get(phase, [])
    ]


def _curve(run: RunMetrics) -> list[Json]:
    """Every metric of every step; ``None`` if the step has no value."""
    changed = run.changed
    return [
        {
            "step": timed.event.step,
            "seconds": _tenth(run.phase_s("rl", until_s=timed.at_s)),
            **{name: _written(metric, timed.event.metrics.get(name)) for name, metric in METRICS.items()},
            "ended": dict(timed.event.ended),
            "weights_changed": changed.get(timed.event.step),
            "reward_parts": _ratios(timed.event.reward_parts),
        }
        for timed in run.steps
    ]


def _written(metric: Metric, value: float | None) -> float | None:
    match metric.notation:
        case Notation.COUNT:
            return value
        case Notation.DECIMAL:
            return _ratio(value)
        case Notation.SIGNIFICANT:
            return _significant(value)


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _share(part: float, whole: float) -> float | None:
    """A share that is 1 only for all: it is rounded down, so that nearly all is never shown as all."""
    share = _divide(part, whole)
    return None if share is None else math.floor(share * 10_000) / 10_000


def _mean(weighted: Iterable[tuple[float, float]]) -> float | None:
    """Mean of values by weight; ``None`` if there are none."""
    pairs = list(weighted)
    return _divide(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _ratios(values: Mapping[str, float]) -> dict[str, Json]:
    return {name: _ratio(value) for name, value in values.items()}


def _tenth(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _significant(value: float | None) -> float | None:
    """Four significant digits, for values of unknown magnitude."""
    return None if value is None else float(f"{value:.4g}")


def learning_figures(run: RunMetrics) -> dict[str, Json]:
    """The section ``learning`` of a report; ``None`` before the first step."""
    steps = [timed.event for timed in run.steps]
    ended = ends(steps)
    groups = total(steps, "groups")
    return {
        "groups": groups or None,
        "groups_without_signal": total(steps, "groups_without_signal") if groups else None,
        "groups_resampled": total(steps, "groups_resampled") if groups else None,
        "ended": dict(ended.most_common()),
        "cut_short": cut_short(ended),
        "versions_unchanged": sum(not changed for changed in run.changed.values()) if run.changed else None,
        "warning": without_signal(steps) or declined(steps),
        "nothing_learnt": nothing_learnt(run),
    }
