"""Traces of rollouts over OTLP/HTTP, by OpenTelemetry's own exporter; of the extra ``otlp``."""

from typing import final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from etude.config.log import OtlpOptions
from etude.telemetry.events import Logged
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.traces import RolloutTraces, Span

SCOPE = InstrumentationScope("etude")
PATH = "/v1/traces"
NS = 1e9
"""Nanoseconds of a second."""


@final
class OtlpSink:
    """Sends the spans of rollouts; implements :class:`~etude.telemetry.sinks.sink.Sink`."""

    def __init__(self, options: OtlpOptions, context: SinkContext) -> None:
        self._traces = RolloutTraces(context.id, options.share)
        for logged in context.past():
            self._traces.add(logged)
        self._exporter = OTLPSpanExporter(endpoint=options.url.rstrip("/") + PATH if options.url else None)
        self._run = {"service.namespace": context.run, "service.instance.id": context.id}
        self._unsent: list[Span] = []

    def emit(self, event: Logged) -> None:
        """Send the spans that an event completes. Raises ``ConnectionError`` where the collector cannot be reached."""
        if not self._unsent:
            self._unsent = self._traces.add(event)
        if self._unsent and self._exporter.export([self._readable(span) for span in self._unsent]) is not (
            SpanExportResult.SUCCESS
        ):
            raise ConnectionError("the collector of traces did not take them")
        self._unsent = []

    def close(self) -> None:
        """Send no more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # its own package has no annotation there

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=Resource({**self._run, "service.name": f"etude-{span.service}"}),
            attributes=span.attributes,
            links=[Link(_context(*ids)) for ids in span.links],
            kind=SpanKind.CLIENT if span.is_call else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=round(NS * span.start_s),
            end_time=round(NS * span.end_s),
            instrumentation_scope=SCOPE,
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
