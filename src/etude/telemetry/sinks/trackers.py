"""The fold from events to curves, tables and texts, the same for all trackers of experiments.

    StepDone          ──▶ train/NAME (the table of metrics), reward/PART, ended/REASON      axis: train/step
    ImitationProgress ──▶ midtrain/…, sft/…; HeldoutLoss ──▶ heldout/PHASE_loss             axis: PHASE/step
    EvalDone          ──▶ heldout/sampled_pass, …, and a table of its tasks                 axis: heldout/step
    PhaseEnded        ──▶ lineage: digests of the weights that a phase began and ended with
    RolloutClosed     ──▶ texts of some rollouts, with every tenth step and each evaluation
    the end           ──▶ report.html

A step that is done again after a crash is sent once: it is the same, to the bits. Owns names and choice; how a tracker
takes them is a :class:`Tracker`'s.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, final

from etude.telemetry.events import (
    EvalDone,
    HeldoutLoss,
    ImitationProgress,
    Logged,
    PhaseEnded,
    RolloutClosed,
    StepDone,
)
from etude.telemetry.metrics import METRICS
from etude.telemetry.sinks.sink import SinkContext
from etude.types import Json, RolloutStatus

SAMPLE_EVERY = 10
"""Steps between two of which rollouts are sent as text."""
TRAIN = "train"
"""Purpose of training rollouts, and the axis of their steps."""
TEXT_CHARACTERS = 50_000
"""Longest part of a rollout's text that is sent."""
Cell: TypeAlias = str | float | bool | None
"""A value of a table."""


class Tracker(Protocol):
    """One run in an experiment tracker. Every method may raise ``OSError`` while the tracker is away."""

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """Add a point to some curves. ``axis`` is the name of their steps; ``at_s`` is Unix time."""
        ...

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table."""
        ...

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        """Add a text."""
        ...

    def describe(self, facts: Mapping[str, str]) -> None:
        """Set facts of the whole run."""
        ...

    def artefact(self, file: Path) -> None:
        """Keep a file with the run, in place of an older one of its name."""
        ...

    def close(self) -> None:
        """End; the tracker's run may be continued later."""
        ...


@final
class TrackerSink:
    """Feeds one tracker; implements :class:`~etude.telemetry.sinks.sink.Sink`."""

    def __init__(self, tracker: Tracker, context: SinkContext) -> None:
        self._tracker = tracker
        self._context = context
        self._sent: dict[str, int] = {}
        """Axis → the newest step that was sent."""
        self._newest: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=context.samples or 1))
        """Purpose → ids of the newest graded rollouts."""
        for logged in context.past():
            self._fold(logged)

    def emit(self, event: Logged) -> None:
        """Send what comes of one event."""
        match event.event:
            case StepDone() as step:
                self._once("train", step.step, lambda: self._send_step(step, event.at_s))
            case ImitationProgress() as progress:
                values = {name: getattr(progress, name) for name in ("loss", "action_loss", "tokens", "tokens_per_s")}
                curves = {
                    f"{progress.phase}/{name}": float(value) for name, value in values.items() if value is not None
                }
                send = lambda: self._tracker.log(f"{progress.phase}/step", progress.step, event.at_s, curves)  # noqa: E731
                self._once(progress.phase, progress.step, send)
            case HeldoutLoss() as heldout:
                self._once(f"heldout-{heldout.phase}", heldout.step, lambda: self._send_loss(heldout, event.at_s))
            case EvalDone() as done:
                self._send_eval(done, event.at_s)
            case PhaseEnded() as ended:
                facts = {"digest": ended.digest, "parent": ended.parent, "steps": str(ended.steps)}
                self._tracker.describe({f"lineage/{ended.phase}/{name}": value for name, value in facts.items()})
            case _:
                pass
        self._fold(event)

    def close(self) -> None:
        """Send the report, where it is written, and end."""
        if self._context.report.is_file():
            self._tracker.artefact(self._context.report)
        self._tracker.close()

    def _fold(self, logged: Logged) -> None:
        """Take in an event that was sent."""
        match logged.event:
            case StepDone(step=step):
                self._note("train", step)
            case ImitationProgress(phase=phase, step=step):
                self._note(phase, step)
            case HeldoutLoss(phase=phase, step=step):
                self._note(f"heldout-{phase}", step)
            case RolloutClosed(status=RolloutStatus.GRADED) as closed:
                self._newest[closed.purpose].append(closed.rollout_id)
            case _:
                pass

    def _note(self, axis: str, step: int) -> None:
        self._sent[axis] = max(step, self._sent.get(axis, step))

    def _once(self, axis: str, step: int, send: Callable[[], None]) -> None:
        """Send a step, unless it or a later one was sent before."""
        if step > self._sent.get(axis, -1):
            send()

    def _send_step(self, done: StepDone, at_s: float) -> None:
        rollouts = sum(done.ended.values())
        values = {f"train/{name}": value for name, value in done.metrics.items() if name in METRICS}
        values |= {f"reward/{name}": value for name, value in done.reward_parts.items()}
        values |= {f"ended/{reason}": number / rollouts for reason, number in done.ended.items()}
        self._tracker.log("train/step", done.step, at_s, values)
        if done.step == 1 or done.step % SAMPLE_EVERY == 0:
            self._send_samples(TRAIN, done.step, at_s)

    def _send_loss(self, heldout: HeldoutLoss, at_s: float) -> None:
        values = {"loss": heldout.loss, "action_loss": heldout.action_loss}
        curves = {f"heldout/{heldout.phase}_{name}": value for name, value in values.items() if value is not None}
        self._tracker.log(f"{heldout.phase}/step", heldout.step, at_s, curves)

    def _send_eval(self, done: EvalDone, at_s: float) -> None:
        names = ("sampled_pass", "sampled_stderr", "greedy_pass", "greedy_stderr")
        values = {f"heldout/{name}": float(getattr(done, name)) for name in names}
        values |= {f"heldout/sampled_{name}": value for name, value in done.sampled_parts.items()}
        self._tracker.log("heldout/step", done.version, at_s, values)
        columns = ["task", "sampled_reward", "sampled_passed", "greedy_reward", "greedy_passed"]
        cells = (done.clusters, done.sampled_rewards, done.sampled_passed, done.greedy_rewards, done.greedy_passed)
        rows = [list(row) for row in zip(*cells, strict=False)]
        if rows:
            self._tracker.table(f"heldout/tasks/{done.label}", done.version, columns, rows)
        self._send_samples(f"{done.label}-sampled", done.version, at_s)

    def _send_samples(self, purpose: str, step: int, at_s: float) -> None:
        rollouts = list(self._newest[purpose]) if self._context.samples else []
        for number, rollout_id in enumerate(rollouts, start=1):
            text = self._context.read_rollout(rollout_id)
            if text:
                self._tracker.text(f"rollouts/{purpose}/{number}", step, at_s, text[:TEXT_CHARACTERS])


def flat(tree: Mapping[str, Json], prefix: str = "") -> dict[str, str | int | float | bool]:
    """A tree of values with one key for each: ``engine.max_length``; lists as text."""
    leaves: dict[str, str | int | float | bool] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool):
            leaves[f"{prefix}{name}"] = value
        elif value is not None:
            leaves[f"{prefix}{name}"] = str(value)
    return leaves
