"""A whole run that sends data to trackers, a trace collector and a webhook, with its sink process killed on the way."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from etude.telemetry.events import AlertChanged, RolloutClosed, SinkFailed, StepDone
from etude.telemetry.log import EventReader
from etude.telemetry.traces import trace_id
from receivers import receiver
from tiny_runs import DEADLINE_S, make_tiny_start
from waiting import wait_until

STEPS = 60
RECIPE = """
name = "told"

[model]
checkpoint = "{start}"

[tasks]
options = {{ kinds = ["arith"] }}

[midtrain]
tokens = 0

[rollouts]
groups_per_step = 2
group_size = 2
concurrency = 8

[harness.options]
max_turns = 2
max_tokens_per_turn = 16

[trainer]
steps = {steps}

[eval]
tasks = 4

[log]
to = [
  "tensorboard",
  {{ kind = "otlp", options = {{ url = "{collector}" }} }},
  {{ kind = "jsonl", options = {{ folder = "far" }} }},
  {{ kind = "prometheus", options = {{ port = {port} }} }},
]

[[alerts]]
name = "busy"
when = "busy_s > 0 for 2 steps"
to = ["log", "page", "webhook"]
webhook = "{hook}"
"""


@pytest.mark.heavy("a whole run: a minute")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_everybody_is_told_of_a_run_once_whatever_becomes_of_the_process_that_tells(
    tmp_path: Path, unused_port: int
) -> None:
    with receiver() as (collector, spans), receiver() as (hook, calls):
        start, run = make_tiny_start(tmp_path / "start"), tmp_path / "run"
        text = RECIPE.format(start=start, steps=STEPS, collector=collector, hook=hook, port=unused_port)
        (tmp_path / "run.toml").write_text(text)
        command = [sys.executable, "-m", "etude", "run", "run.toml", "--out", "run"]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as play:
            try:
                wait_until(lambda: bool(calls), timeout_s=DEADLINE_S)
                wait_until(lambda: "etude_step" in _metrics(unused_port), timeout_s=DEADLINE_S)
                os.kill(_sinks_of(play.pid), signal.SIGKILL)
                printed, _ = play.communicate(timeout=DEADLINE_S)
            finally:
                play.kill()
    assert play.returncode == 0 or "nothing was learnt" in printed, printed
    logged = EventReader(run / "events").new()
    steps = [each.event.step for each in logged if isinstance(each.event, StepDone)]
    assert steps == [*range(1, STEPS + 1)]
    (lines,) = [file.read_bytes().splitlines() for file in (tmp_path / "far").glob("told-*.jsonl")]
    sent = [line["step"] for line in map(orjson.loads, lines) if line["event"] == "StepDone"]
    assert (
        len(sent) == len(set(sent)) >= STEPS - 1
    )  # what was under way when it was killed may be missing, none is twice
    assert [each.event for each in logged if isinstance(each.event, SinkFailed)] == []
    assert [each.event.firing for each in logged if isinstance(each.event, AlertChanged)] == [True]
    assert "alert 'busy' fires: busy_s" in printed
    assert [json.loads(call.body)["alert"] for call in calls] == ["busy"]
    assert (run / "tensorboard" / "report.html").is_file()
    _check_traces([span for each in spans for span in _spans(each.body)], [each.event for each in logged])


def _check_traces(spans: list[tuple[str, str, int]], events: list[object]) -> None:
    """Nearly every rollout has a trace over all processes."""
    trained = [event for event in events if isinstance(event, RolloutClosed) and event.purpose == "train"]
    whole = 0
    for closed in trained:
        mine = {(service, name) for service, name, trace in spans if trace == trace_id(closed.rollout_id)}
        needed = {
            ("rollouts", "play"),
            ("gateway", "chat policy"),
            ("serve", "generate"),
            ("grader", "grading"),
            ("train", "train"),
        }
        whole += {(f"etude-{service}", name) for service, name in needed} <= mine
    assert whole >= len(trained) // 2


def _spans(body: bytes) -> list[tuple[str, str, int]]:
    """Service, name and trace of each span."""
    return [
        (next(pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"),
         span.name, int.from_bytes(span.trace_id))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for span in resource.scope_spans[0].spans
    ]  # fmt: skip


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _sinks_of(supervisor: int) -> int:
    """The process that feeds sinks, of those that a supervisor started."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return next(int(pid) for pid in children if b"sinks" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
