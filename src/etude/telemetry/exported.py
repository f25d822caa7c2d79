"""The values that a run's Prometheus endpoint exports, for all processes, folded from events.

Owns their names, labels and arithmetic. A dashboard (``examples/grafana/etude.json``) is generated from this table and
the table of metrics. Does not own the values that a gateway or an engine exports (:mod:`etude.gateway.request_log`,
:mod:`etude.engines.http`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.telemetry.events import (
    AlertChanged,
    EngineStats,
    EvalDone,
    ImitationProgress,
    Logged,
    MemoryUsed,
    Outage,
    PhaseStarted,
    ProcessStarted,
    RolloutClosed,
    SinkFailed,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.metrics import METRICS

TRAIN = "etude_train_"
"""Prefix of the names of a step's metrics; the rest is the name in the table of metrics."""
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One exported value."""

    title: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    """Labels besides ``run``, which all values have."""
    kind: Literal["gauge", "counter"] = "gauge"
    section: str = "Run"
    """Row of the dashboard."""


def _of_step(title: str, unit: str) -> Exported:
    return Exported(title=title, unit=unit, section="Training")


EXPORTED: Mapping[str, Exported] = MappingProxyType(
    {
        "etude_step": Exported(title="newest step"),
        "etude_phase": Exported(title="the phase that it is in is 1", labels=("phase",)),
        "etude_heldout_pass": Exported(title="held-out pass rate", labels=("label", "way"), section="Training"),
        **{TRAIN + name: _of_step(metric.title, metric.unit) for name, metric in METRICS.items()},
        "etude_reward_part": Exported(title="mean of a part of the reward", labels=("part",), section="Training"),
        "etude_imitation_loss": Exported(
            title="loss of mid-training and SFT", unit="nats per token", labels=("phase",), section="Training"
        ),
        "etude_rollouts": Exported(
            title="rollouts that ended", labels=("purpose", "status"), kind="counter", section="Rollouts"
        ),
        "etude_rollout_stage_seconds": Exported(
            title="time of rollouts by stage", unit="s", labels=("stage",), kind="counter", section="Rollouts"
        ),
        "etude_rollouts_hacked": Exported(
            title="rollouts in which cheating was found", labels=("purpose",), kind="counter", section="Rollouts"
        ),
        "etude_engine_busy_seconds": Exported(
            title="time in which an engine computed", unit="s", labels=("process",), kind="counter", section="Engines"
        ),
        "etude_engine_generated_tokens": Exported(
            title="tokens that an engine sampled", labels=("process",), kind="counter", section="Engines"
        ),
        "etude_engine_prefill_tokens": Exported(
            title="prompt tokens that an engine read", labels=("process",), kind="counter", section="Engines"
        ),
        "etude_engine_drafted_tokens": Exported(
            title="drafts that an engine verified", labels=("process",), kind="counter", section="Engines"
        ),
        "etude_engine_accepted_tokens": Exported(
            title="drafts that were what it sampled", labels=("process",), kind="counter", section="Engines"
        ),
        "etude_engine_running": Exported(title="calls that an engine works on", labels=("process",), section="Engines"),
        "etude_engine_waiting": Exported(title="calls that wait in an engine", labels=("process",), section="Engines"),
        "etude_weights_served": Exported(
            title="weight version that an engine serves", labels=("process",), section="Weights"
        ),
        "etude_weights_published": Exported(title="newest weight version", section="Weights"),
        "etude_weights_bytes": Exported(title="size of the newest version", unit="bytes", section="Weights"),
        "etude_memory_bytes": Exported(title="memory of the run's processes, without sandboxes", unit="bytes"),
        "etude_process_starts": Exported(title="starts of a process", labels=("process",), kind="counter"),
        "etude_outage": Exported(title="outage of a dependency that a process waits for", labels=("process", "what")),
        "etude_alert_firing": Exported(title="a rule of alerts holds", labels=("alert",)),
        "etude_sink_lost_events": Exported(title="events that a sink will never get", labels=("sink",)),
    }
)
"""Name → exported value. Prometheus appends ``_total`` to the names of counters."""


class ExportedValues:
    """The current values, after the last added event."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}

    def __iter__(self) -> Iterator[tuple[str, Exported, Mapping[Labels, float]]]:
        for name, values in self._values.items():
            yield name, EXPORTED[name], values

    def add(self, logged: Logged) -> None:
        """Update the values from one event."""
        process = logged.process
        match logged.event:
            case PhaseStarted(phase=phase):
                self._values["etude_phase"] = {(phase,): 1.0}
            case StepDone() as done:
                self._step(done)
            case ImitationProgress() as progress:
                if progress.loss is not None:
                    self._set("etude_imitation_loss", progress.loss, progress.phase)
            case EvalDone() as done:
                self._set("etude_heldout_pass", done.sampled_pass, done.label, "sampled")
                self._set("etude_heldout_pass", done.greedy_pass, done.label, "greedy")
            case RolloutClosed() as closed:
                self._count("etude_rollouts", 1, closed.purpose, closed.status)
                self._count("etude_rollouts_hacked", closed.hacked, closed.purpose)
                for stage, seconds in closed.stage_s.items():
                    self._count("etude_rollout_stage_seconds", seconds, stage)
            case EngineStats() as stats:
                self._count("etude_engine_busy_seconds", stats.busy_s, process)
                self._count("etude_engine_generated_tokens", stats.generated_tokens, process)
                self._count("etude_engine_prefill_tokens", stats.prefill_tokens, process)
                self._count("etude_engine_drafted_tokens", stats.drafted_tokens, process)
                self._count("etude_engine_accepted_tokens", stats.accepted_tokens, process)
                self._set("etude_engine_running", stats.running, process)
                self._set("etude_engine_waiting", stats.waiting, process)
            case WeightsSwapped(version=version):
                self._set("etude_weights_served", version, process)
            case WeightsPublished() as published:
                self._set("etude_weights_published", published.version)
                self._set("etude_weights_bytes", published.size_bytes)
            case MemoryUsed(size_bytes=size):
                self._set("etude_memory_bytes", size)
            case ProcessStarted(process=started):
                self._count("etude_process_starts", 1, started)
            case Outage() as outage:
                self._set("etude_outage", outage.seconds > 0, process, outage.what)
            case AlertChanged() as alert:
                self._set("etude_alert_firing", alert.firing, alert.alert)
            case SinkFailed() as failed:
                self._set("etude_sink_lost_events", failed.lost, failed.sink)
            case _:
                pass

    def _step(self, done: StepDone) -> None:
        self._set("etude_step", done.step)
        for name in METRICS:
            if name in done.metrics:
                self._set(TRAIN + name, done.metrics[name])
            else:
                self._values.pop(TRAIN + name, None)
        for part, value in done.reward_parts.items():
            self._set("etude_reward_part", value, part)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values.setdefault(name, {})[labels] = float(value)

    def _count(self, name: str, value: float, *labels: str) -> None:
        values = self._values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value
