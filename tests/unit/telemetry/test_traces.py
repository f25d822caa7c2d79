"""One trace for each rollout, over all processes, as a collector receives it over OTLP/HTTP."""

from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ReceivedSpan

from etude.config.log import OtlpOptions
from etude.telemetry.events import GroupAdmitted, Logged, RolloutClosed, StepDone
from etude.telemetry.log import EventReader
from etude.telemetry.sinks.otlp import OtlpSink
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.traces import RolloutTraces, Span, trace_id
from receivers import receiver
from run_events import small_run, write

NS = 1_000_000_000


def timed(folder: Path, steps: int) -> list[Logged]:
    """The events of ``small_run``, one per second, except that rollouts end five seconds after their calls."""
    write(folder, list(small_run(steps)))
    events, at_s = [], 1000.0
    for logged in EventReader(folder).new():
        at_s += 5.0 if isinstance(logged.event, RolloutClosed | StepDone) else 1.0
        events.append(Logged(at_s=at_s, process=logged.process, event=logged.event))
    return events


def spans_of(events: list[Logged], share: float = 1.0) -> list[Span]:
    traces = RolloutTraces("run1", share)
    return [span for logged in events for span in traces.add(logged)]


def test_a_trace_goes_from_admission_to_the_step_that_consumed_it(tmp_path: Path) -> None:
    events = timed(tmp_path, 2)
    trace = [span for span in spans_of(events) if span.trace_id == trace_id("rollout1")]
    root = next(span for span in trace if span.parent_id is None)
    admitted = [logged.at_s for logged in events if isinstance(logged.event, GroupAdmitted)][1]
    step = next(logged.at_s for logged in events if isinstance(logged.event, StepDone) and logged.event.step == 2)
    assert (root.start_s, max(span.end_s for span in trace)) == (admitted, step)
    names = ["queue", "session", "sandbox", "play", "grading", "scoring", "wait", "train"]
    children = {span.name: span for span in trace if span.parent_id == root.span_id}
    assert list(children) == names
    for before, after in pairwise(names):  # one after the other, without a gap
        assert children[before].end_s == pytest.approx(children[after].start_s), (before, after)
    calls = [span for span in trace if span.parent_id == children["play"].span_id]
    engines = [span for span in trace if span.parent_id in {call.span_id for call in calls}]
    assert [len(calls), len(engines)] == [2, 2]
    assert {span.service for span in trace} == {"rollouts", "gateway", "sandbox", "serve", "grader", "train"}
    assert len({span.span_id for span in trace}) == len(trace)


def test_the_same_events_give_the_same_ids_and_a_share_the_same_rollouts(tmp_path: Path) -> None:
    events = timed(tmp_path, 8)
    assert spans_of(events) == spans_of(events)
    some = {span.trace_id for span in spans_of(events, 0.5)}
    assert some < {span.trace_id for span in spans_of(events)}


def test_a_step_and_its_rollouts_link_to_each_other(tmp_path: Path) -> None:
    spans = spans_of(timed(tmp_path, 1))
    step = next(span for span in spans if span.name == "step 1")
    (trained,) = [span for span in spans if span.name == "train"]
    assert step.links == ((trained.trace_id, trained.span_id),)
    assert trained.links == ((step.trace_id, step.span_id),)


def test_a_collector_receives_traces_over_otlp(tmp_path: Path) -> None:
    events = timed(tmp_path, 1)
    with receiver() as (url, received):
        context = SinkContext(run="tiny", id="run1", folder=tmp_path, config={})
        sink = OtlpSink(OtlpOptions(url=url), context)
        for logged in events:
            sink.emit(logged)
        sink.close()
    spans: dict[str, tuple[str, ReceivedSpan]] = {}
    assert {posted.path for posted in received} == {"/v1/traces"}
    for posted in received:
        for resource in ExportTraceServiceRequest.FromString(posted.body).resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for span in resource.scope_spans[0].spans:
                if int.from_bytes(span.trace_id) == trace_id("rollout0"):
                    spans[span.name] = (names["service.name"], span)
    service, chat = spans["chat policy"]
    assert (service, spans["generate"][0], spans["grading"][0]) == ("etude-gateway", "etude-serve", "etude-grader")
    attributes = {pair.key: pair.value for pair in chat.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.request.model"].string_value == "policy"
    assert attributes["gen_ai.usage.input_tokens"].int_value == 100
    assert chat.kind == ReceivedSpan.SPAN_KIND_CLIENT
    assert chat.end_time_unix_nano - chat.start_time_unix_nano == NS
    assert chat.parent_span_id == spans["play"][1].span_id
    assert len(spans["train"][1].links) == 1


def test_spans_wait_for_a_collector_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    events = timed(tmp_path, 1)
    closed = next(number for number, logged in enumerate(events) if isinstance(logged.event, RolloutClosed))
    with receiver() as (url, received):
        sink = OtlpSink(OtlpOptions(url=url), SinkContext(run="tiny", id="1", folder=tmp_path, config={}))
        for logged in events[:closed]:
            sink.emit(logged)
    with pytest.raises(ConnectionError):
        sink.emit(events[closed])
    with receiver(port=int(url.rpartition(":")[2])) as (_, received):
        sink.emit(events[closed])
    sink.close()
    (posted,) = received
    resources = ExportTraceServiceRequest.FromString(posted.body).resource_spans
    assert (
        sum(len(resource.scope_spans[0].spans) for resource in resources) == 6
    )  # without calls, which gateways write of traced runs alone
