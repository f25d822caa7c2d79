"""``[telemetry]``: where the events of a run go beside its folder."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section

SINKS = Registry("telemetry.sinks: kind", "sink", {"jsonl": "etude.telemetry.sinks:JsonlSink"})
"""Sinks by name: each is called with its options and a :class:`~etude.telemetry.sinks.SinkContext`."""


class JsonlOptions(Section):
    """Files of JSON lines in a folder, one for each process."""

    folder: str = Field(min_length=1)
    """The folder, which is made where it is missing."""


SINK_OPTIONS = OptionsOf("telemetry.sinks", "kind", {"jsonl": JsonlOptions}, names=SINKS)


class SinkConfig(Section):
    """``[[telemetry.sinks]]``: one of them. One that fails or is slow loses events and never holds the run up."""

    kind: Annotated[str, AfterValidator(SINKS)]
    """Files elsewhere, or a sink of your own (``docs/extending.md``)."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(SINK_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``options`` of its kind."""


class TelemetryConfig(Section):
    """``[telemetry]``: who is told of events beside the run folder, which has them all."""

    sinks: tuple[SinkConfig, ...] = ()
    """``[[telemetry.sinks]]``, in any order."""
    page: bool | Literal["auto"] = "auto"
    """True if `etude run` serves a page of the run while it goes on (``docs/live-page.md``). ``auto``: where somebody
    sees the URL, since standard output is a terminal.
    """
