"""``[log]`` and ``[[alerts]]``: trackers of a run, and alerts."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section

SINKS = Registry(
    "log.to: kind",
    "sink",
    {
        "wandb": "etude.telemetry.sinks.wandb:open_wandb",
        "trackio": "etude.telemetry.sinks.trackio:open_trackio",
        "mlflow": "etude.telemetry.sinks.mlflow:open_mlflow",
        "tensorboard": "etude.telemetry.sinks.tensorboard:open_tensorboard",
        "prometheus": "etude.telemetry.sinks.prometheus:PrometheusSink",
        "otlp": "etude.telemetry.sinks.otlp:OtlpSink",
        "jsonl": "etude.telemetry.sinks.jsonl:JsonlSink",
    },
)
"""Sinks by name: each is called with its options and a :class:`~etude.telemetry.sinks.sink.SinkContext`."""


class WandbOptions(Section):
    """Weights & Biases. Who you are is known from `wandb login` or ``WANDB_API_KEY``; ``WANDB_MODE=offline`` works."""

    project: str = Field(default="etude", min_length=1)
    """The project."""
    entity: str = ""
    """The team or user; empty: your default one."""
    folder: str = ""
    """Folder for its own files; empty: the run folder."""


class TrackioOptions(Section):
    """Trackio, in a local database, or in a Space of the Hugging Face Hub, to which ``HF_TOKEN`` lets you."""

    project: str = Field(default="etude", min_length=1)
    """The project."""
    space_id: str = ""
    """``USER/SPACE``; empty: this machine, below ``TRACKIO_DIR``."""


class MlflowOptions(Section):
    """MLflow. Passwords are in its own variables (``MLFLOW_TRACKING_USERNAME``, …), never in here."""

    url: str = ""
    """``http://HOST:PORT``, ``sqlite:///FILE`` or a folder; empty: ``MLFLOW_TRACKING_URI``."""
    experiment: str = Field(default="etude", min_length=1)
    """The experiment; it is created if missing."""


class TensorboardOptions(Section):
    """Event files of TensorBoard."""

    folder: str = ""
    """The folder; empty: ``tensorboard/`` in the run folder."""


class PrometheusOptions(Section):
    """One HTTP endpoint with the newest figures of all processes of the run, in Prometheus' text format."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=9105, ge=0, le=65535)
    """The port; 0: any free one, named in its log."""


class OtlpOptions(Section):
    """Traces over OTLP/HTTP. Headers with keys are in ``OTEL_EXPORTER_OTLP_HEADERS``, never in here."""

    url: str = ""
    """``http://HOST:4318``; empty: ``OTEL_EXPORTER_OTLP_ENDPOINT``, or this machine."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the rollouts that are traced, chosen by their ids."""


class JsonlOptions(Section):
    """Files of JSON lines in a folder, one for each run: every event."""

    folder: str = Field(min_length=1)
    """The folder; it is created if missing."""


SINK_OPTIONS = OptionsOf(
    "log.to",
    "kind",
    {
        "wandb": WandbOptions,
        "trackio": TrackioOptions,
        "mlflow": MlflowOptions,
        "tensorboard": TensorboardOptions,
        "prometheus": PrometheusOptions,
        "otlp": OtlpOptions,
        "jsonl": JsonlOptions,
    },
    names=SINKS,
)


class SinkConfig(Section):
    """``[[log.to]]``: one tracker. If it fails or is slow, that is reported and never delays the run."""

    kind: Annotated[str, AfterValidator(SINKS)]
    """A tracker, an exporter, or a sink of your own (``docs/trackers.md``)."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(SINK_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``options`` of its kind."""


def spell_out(to: object) -> object:
    """``log.to`` as tables: ``"wandb"`` stands for ``{ kind = "wandb" }``."""
    if not isinstance(to, list | tuple):
        return to
    return tuple({"kind": each} if isinstance(each, str) else each for each in to)


class LogConfig(Section):
    """``[log]``: trackers of the run, beside its folder, which has all events."""

    to: Annotated[tuple[SinkConfig, ...], BeforeValidator(spell_out)] = ()
    """Sinks: names, such as ``["wandb", "prometheus"]``, or tables ``[[log.to]]`` where they have options."""
    page: bool | Literal["terminal"] = "terminal"
    """True if ``etude run`` serves a page of the run while it goes on (``docs/live-page.md``). ``terminal``: only if
    standard output is a terminal.
    """
    samples: int = Field(default=2, ge=0)
    """Rollouts of every tenth step, and of each evaluation, whose text is sent to trackers."""

    @property
    def has_traces(self) -> bool:
        """True if rollouts are traced, for which gateways write an event for each model call."""
        return any(sink.kind == "otlp" for sink in self.to)

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        kinds = [sink.kind for sink in self.to]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), "")
        if twice:
            raise ValueError(f"log.to names {twice!r} twice: each sink can be there once")
        return self


WATCHED = ("no_signal", "decline", "mismatch", "hack_rate", "lag", "cost")
"""Values that alerts watch beside the metrics of a step (:mod:`etude.telemetry.alerts`)."""
ALERT_KEY = "ETUDE_ALERT_KEY"
"""Environment variable with the key by which webhooks are signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A value that an alert watches, the bound that it is compared with, and for how long that must hold."""

    watch: str
    comparison: str
    bound: float
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The condition that is written so. Raises ``ValueError``."""
        form = CONDITION.fullmatch(text)
        if form is None:
            raise ValueError(
                f"{text!r} is not a condition: expected such as 'mismatch > 0.001', 'reward_mean < 0.1 for 5 steps' or "
                f"'lag >= 4 for 600 s'"
            )
        lasting, unit = float(form["lasting"] or 0), form["unit"]
        return cls(
            watch=form["watch"],
            comparison=form["comparison"],
            bound=float(form["bound"]),
            steps=round(lasting) if unit and unit.startswith("step") else 0,
            seconds=lasting if unit == "s" else 0.0,
        )

    def holds(self, value: float) -> bool:
        """True if it holds now."""
        return COMPARISONS[self.comparison](value, self.bound)


COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
CONDITION = re.compile(
    rf"\s*(?P<watch>\w+)\s*(?P<comparison>[<>]=?)\s*(?P<bound>{NUMBER})"
    r"(\s+for\s+(?P<lasting>\d{1,9}(?:\.\d*)?)\s*(?P<unit>steps?|s))?\s*"
)


class AlertConfig(Section):
    """``[[alerts]]``: one rule. It fires once its condition has held for the given time, and ends with it."""

    name: str = Field(min_length=1, max_length=100)
    """Unique name in messages."""
    when: str
    """The condition, such as ``"reward_mean < 0.1 for 5 steps"`` or ``"lag >= 4 for 600 s"``; without ``for`` it fires
    at once. Watched is a metric of a step, as report.json's curve names it, or ``no_signal`` (steps in a row from which
    nothing can be learnt), ``decline`` (of the mean reward, as a share of its best), ``mismatch`` (k3 of the newest
    step), ``hack_rate`` (of the newest 100 training rollouts), ``lag`` (weight versions that the slowest engine is
    behind), ``cost`` (what judges have cost so far).
    """
    to: tuple[Literal["log", "page", "webhook"], ...] = ("log", "page")
    """``log``: a line among the run's own; ``page``: page and terminal; ``webhook``: a POST with JSON."""
    webhook: str = ""
    """``https://HOST/PATH``, or ``$NAME`` of an environment variable that has the URL, where that is a secret. Signed
    with HMAC-SHA256 where ``ETUDE_ALERT_KEY`` is set.
    """

    @property
    def condition(self) -> Condition:
        """``when``, parsed."""
        return Condition.parse(self.when)

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        where = f"alerts: {self.name!r}"
        try:
            Condition.parse(self.when)
        except ValueError as error:
            raise ValueError(f"{where}: when = {error}") from None
        if ("webhook" in self.to) != bool(self.webhook):
            raise ValueError(f'{where}: to = ["webhook"] and webhook = "https://…" go together')
        if self.webhook and not self.webhook.startswith("$") and not is_webhook_url(self.webhook):
            raise ValueError(f"{where}: webhook is not a URL: expected https://HOST/PATH, or $NAME")
        return self


def is_webhook_url(text: str) -> bool:
    """True for a URL to which a webhook can be sent: ASCII without spaces and line ends."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_plain(text)
    except ValueError:  # a port that is no number, or a bracket without its other
        return False


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def check_alerts(alerts: Sequence[AlertConfig]) -> None:
    """Raise ``ValueError`` for two rules of one name."""
    names = [alert.name for alert in alerts]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise ValueError(f"alerts has two rules named {twice!r}: give one another name")
