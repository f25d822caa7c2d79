"""The report as labelled lines, for the terminal and the page.

Owns the text, not the layout or the figures (:mod:`~etude.dashboard.report`).
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial

from etude.config.recipe import RunConfig
from etude.dashboard.formatting import (
    MISSING,
    brief,
    count,
    decimal,
    duration,
    milliseconds,
    number_at,
    percent,
    size,
    small,
    small_percent,
    write_metric,
)
from etude.dashboard.heldout import RATES
from etude.dashboard.learning import ends, shares
from etude.dashboard.run_metrics import TRAIN, RunMetrics, Tally, total
from etude.telemetry.events import AlertChanged, EvalFailed, Logged, SinkFailed, StepDone
from etude.telemetry.metrics import METRICS
from etude.types import Json, RolloutStatus

SILENCE_S = 30.0
"""Time without any event after which a notice is shown: processes report every few seconds."""
PREPARES = "reading texts, learning a tokenizer"
"""Work of a phase before its first step."""


def summary(report: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Label and text of every line except the held-out result; unknown figures are dashes."""
    of = partial(number_at, report)
    return [
        *_kinds(report),
        (
            "time",
            f"{duration(of('seconds.total'))} in all"
            + "".join(f", {name} {duration(seconds)}" for name, seconds in phases(report)),
        ),
        ("steps", count(of("steps"))),
        ("signal", _signal(report)),
        (
            "tokens",
            f"{brief(of('tokens.midtrain'))} in midtrain, {brief(of('tokens.generated'))} generated, "
            f"{brief(of('tokens.trained'))} trained",
        ),
        ("busy in RL", f"trainer {percent(of('busy.trainer'), 0)}, engine {percent(of('busy.engine'), 0)}"),
        ("inference", f"{decimal(of('compute_ratio_inference_to_training'))} s per second of training"),
        ("prefix cache", f"{percent(of('tokens.reused_share'), 0)} of prompt tokens reused"),
        *_drafts(of("tokens.accepted_share"), of("tokens.per_engine_step")),
        (
            "staleness",
            f"mean {decimal(of('staleness.mean'))}, max {count(of('staleness.max'))} of "
            f"{count(of('staleness.bound'))} allowed",
        ),
        (
            "mismatch",
            f"k3 {small(of('mismatch.k3'))}, p99 {small(of('mismatch.p99'))}, max {small(of('mismatch.max'))}, "
            f"{percent(of('mismatch.equal'))} equal to the last bit; {percent(of('mismatch.coverage'))} of tokens "
            f"compared",
        ),
        *_routes(of("mismatch.flips")),
        *_summaries(of("heldout.recall_before"), of("heldout.recall_after")),
        (
            "weights",
            f"{count(of('weights.versions'))} versions, deltas {size(of('weights.mean_delta_bytes'))} of "
            f"{size(of('weights.state_bytes'))}",
        ),
        (
            "swap",
            f"pause {milliseconds(of('weights.swap_pause_ms'))}, worst "
            f"{milliseconds(of('weights.swap_pause_ms_max'))}; staged in {milliseconds(of('weights.stage_ms'))}",
        ),
        (
            "rollouts",
            f"{count(of('rollouts.graded'))} graded, {count(of('rollouts.failed_infra'))} failed, "
            f"{count(of('rollouts.dropped'))} dropped",
        ),
        (
            "cheating",
            f"{percent(of('cheating.hack_rate'))} of rollouts, {count(of('cheating.quarantined'))} quarantined, "
            f"{count(of('cheating.zeroed'))} zeroed; impossible tasks passed: "
            f"{count(of('cheating.impossible.passed'))} of {count(of('cheating.impossible.tried'))}",
        ),
        ("memory", f"{size(of('memory_bytes_max'))} at most, sandboxes aside"),
        ("restarts", f"{count(of('restarts'))} of processes, {count(of('interruptions'))} of the run"),
    ]


def phases(report: Mapping[str, Json]) -> list[tuple[str, float]]:
    """The phases that ran, in order, with the seconds of each."""
    config = report["config"]
    assert isinstance(config, dict)
    names = {"midtrain": "midtrain", "sft": "SFT", "rl": "RL", "eval": "evaluation"}
    times = [(name, number_at(report, f"seconds.{key}")) for key, name in names.items() if not _is_off(config, key)]
    return [(name, seconds) for name, seconds in times if seconds is not None]


def _is_off(config: Mapping[str, Json], phase: str) -> bool:
    """True if a phase has no work: it is entered nevertheless, to pass the model on."""
    section = config.get(phase)
    return phase == "midtrain" and isinstance(section, dict) and section.get("tokens") == 0


def _kinds(report: Mapping[str, Json]) -> list[tuple[str, str]]:
    """A row for each kind of held-out task, if there are several; reports of older versions have none."""
    heldout = report["heldout"]
    rows = heldout.get("kinds") if isinstance(heldout, dict) else None
    return [
        (
            str(row["kind"]),
            ", ".join(
                f"{mode} {percent(number_at(row, f'{rate}_before'))} → {percent(number_at(row, f'{rate}_after'))}"
                for mode, rate in RATES.items()
            )
            + f" of {count(number_at(row, 'n'))} tasks",
        )
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def _signal(report: Mapping[str, Json]) -> str:
    """Groups with a signal, and the finish reasons of rollouts."""
    groups, without = number_at(report, "learning.groups"), number_at(report, "learning.groups_without_signal")
    if groups is None or without is None:
        return MISSING
    learning = report["learning"]
    assert isinstance(learning, dict)
    ended = learning["ended"]
    assert isinstance(ended, dict)
    counts = Counter({name: number for name, number in ended.items() if isinstance(number, int)})
    parts = [f"in {count(groups - without)} of {count(groups)} groups"]
    parts += [f"rollouts ended: {shares(counts)}"] if counts else []
    resampled = number_at(report, "learning.groups_resampled")
    parts += [f"{count(resampled)} more left out, having none"] if resampled else []
    unchanged = number_at(report, "learning.versions_unchanged")
    parts += [f"{count(unchanged)} versions without a change"] if unchanged else []
    return "; ".join(parts)


def _summaries(before: float | None, after: float | None) -> tuple[tuple[str, str], ...]:
    """A row, if tasks name the facts that a summary must contain."""
    if before is None and after is None:
        return ()
    return (("summaries", f"keep {percent(before)} → {percent(after)} of the needed facts that had been seen"),)


def _drafts(accepted: float | None, per_step: float | None) -> tuple[tuple[str, str], ...]:
    """The row about the draft head, if it was used."""
    if accepted is None:
        return ()
    return (("drafts", f"{percent(accepted, 0)} accepted, {decimal(per_step)} tokens per engine step and sequence"),)


def _routes(flips: float | None) -> tuple[tuple[str, str], ...]:
    """A row, if routes were recorded."""
    if flips is None:
        return ()
    return (("routes", f"{small_percent(flips)} of the engine’s experts differ from the trainer’s own choice"),)


def render_line(run: RunMetrics, config: RunConfig, now_s: float) -> str:
    """A run's progress, and its outages, on one line."""
    silence = silence_line(run, now_s)
    return "; ".join((_progress(run, config, now_s), *([silence] if silence else []), *outage_lines(run, now_s)))


def silence_line(run: RunMetrics, now_s: float) -> str:
    """A notice of a long time without any event; otherwise empty."""
    silent_s = now_s - run.segments[-1].end_s if run.segments and run.phase != "done" else 0.0
    return f"no event for {duration(silent_s)}" if silent_s > SILENCE_S else ""


def outage_lines(run: RunMetrics, now_s: float) -> list[str]:
    """One line for each outage that a process waits for: its duration and reason."""
    return [
        f"{process} waits for {what}, away for {now_s - outage.at_s:.0f} s: {outage.event.reason}"
        for (process, what), outage in run.outages.items()
    ]


def notice_line(logged: Logged) -> str:
    """The line to show for an event while a run is active; usually empty."""
    match logged.event:
        case AlertChanged() as alert if "log" in alert.to:
            return f"alert {alert.alert!r} {'fires' if alert.firing else 'is over'}: {alert.summary}"
        case EvalFailed(label=label, reason=reason):
            return f"evaluation {label} failed: {reason}; training continues"
        case SinkFailed() as failed:
            lost = f"; {count(failed.lost)} events lost" if failed.lost else ""
            return f"sink {failed.sink}: {failed.reason}{lost}; the run continues"
        case _:
            return ""


def _progress(run: RunMetrics, config: RunConfig, now_s: float) -> str:
    phase = run.phase or "starting"
    start = f"[{run.total_s(now_s):6.0f} s] "
    if phase in ("midtrain", "sft"):
        return start + _imitation_progress(run, config, phase)
    if phase.startswith("eval-"):
        return f"{start}{phase}: {_tries(run, config, phase.removeprefix('eval-'))}"
    if phase == "rl":
        return f"{start}rl: {_step_progress(run, config) if run.steps else _first_batch(run, config)}"
    return start + phase


def _imitation_progress(run: RunMetrics, config: RunConfig, phase: str) -> str:
    if phase in run.lineage:
        return f"{phase} is done: engine, gateway, trainer and rollouts are starting"
    if phase == "midtrain" and not config.midtrain.tokens:
        return "publishing the model that RL starts from"
    if not run.imitation.get(phase):
        return f"{phase}: {PREPARES}"
    progress = run.imitation[phase][-1].event
    loss = "" if progress.loss is None else f"loss {progress.loss:.3f}, "
    return f"{phase}: step {progress.step}/{progress.steps}, {loss}{progress.tokens_per_s:,.0f} tokens/s"


def _tries(run: RunMetrics, config: RunConfig, label: str) -> str:
    tallies = [run.rollouts.get(f"{label}-{mode}", Tally()) for mode in ("sampled", "greedy")]
    graded = " and ".join(
        f"{tally.statuses[RolloutStatus.GRADED]} {mode}"
        for mode, tally in zip(("sampled", "greedy"), tallies, strict=True)
    )
    return f"{graded} tries graded, of {config.eval.tasks} each{_failed(*tallies)}"


def _first_batch(run: RunMetrics, config: RunConfig) -> str:
    tally, rollouts = run.rollouts.get(TRAIN, Tally()), config.rollouts
    size_of_batch = rollouts.groups_per_step * rollouts.group_size
    return (
        f"{tally.statuses[RolloutStatus.GRADED]} of {size_of_batch} rollouts of the first step graded{_failed(tally)}"
    )


def _failed(*tallies: Tally) -> str:
    """The number of rollouts that infrastructure failed, if there are any."""
    failed = sum(tally.statuses[RolloutStatus.FAILED_INFRA] for tally in tallies)
    return f", {failed} failed and were tried again" if failed else ""


def _step_progress(run: RunMetrics, config: RunConfig) -> str:
    recent = [timed.event for timed in run.steps[-4:]]
    reward, last = total(recent, "reward_mean") / len(recent), recent[-1].metrics
    bound, k3 = config.numerics.warn_k3, last.get("k3", 0.0)
    warning = f" above {bound:g}!" if k3 > bound else ""
    staleness = f"staleness ≤ {last.get('staleness_max', 0):.0f}"
    groups, hinted = last["groups"], last.get("hinted_turns")
    signal = f"signal in {groups - last['groups_without_signal']:.0f} of {groups:.0f} groups"
    signal += f" ({last['groups_resampled']:.0f} more left out)" if last.get("groups_resampled") else ""
    hints = f"{hinted:.0f} turns hinted at {last.get('hint_kl', 0.0):.2f} nats, " if hinted else ""
    ended = f"ended {shares(ends(recent[-1:]))}, " if recent[-1].ended else ""
    return (
        f"step {recent[-1].step}/{config.trainer.steps}, reward {reward:.3f}, {signal}, {ended}"
        f"{', '.join(live(recent[-1]))}, {hints}{staleness}, k3 {k3:.1e}{warning}"
        f"{_failed(run.rollouts.get(TRAIN, Tally()))}"
    )


def live(step: StepDone) -> list[str]:
    """The metrics of a step that are shown while a run is active, as text."""
    shown = ((metric, step.metrics.get(name)) for name, metric in METRICS.items() if metric.live)
    return [f"{metric.live} {write_metric(metric, value, digits=3)}" for metric, value in shown]
