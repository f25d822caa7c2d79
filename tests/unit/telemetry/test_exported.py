"""The run's Prometheus endpoint, read by Prometheus' own parser, and the dashboard made from the same table."""

import json
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import grafana
from etude.config.log import PrometheusOptions
from etude.gateway.request_log import Metrics
from etude.telemetry.exported import EXPORTED, TRAIN
from etude.telemetry.log import EventReader
from etude.telemetry.sinks.prometheus import PrometheusSink
from etude.telemetry.sinks.sink import SinkContext
from run_events import small_run, write


def test_one_endpoint_has_the_newest_figures_of_all_processes(tmp_path: Path) -> None:
    write(tmp_path, list(small_run(3)))
    events = EventReader(tmp_path).new()
    context = SinkContext(run="tiny", id="1", folder=tmp_path, config={}, past=lambda: events[:-9])
    sink = PrometheusSink(PrometheusOptions(port=0), context)
    try:
        for logged in events[-9:]:
            sink.emit(logged)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        sink.close()
    values = {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["etude_step",] == 3
    assert values["etude_train_reward_mean",] == 0.3
    assert values["etude_phase", "rl"] == 1
    assert values["etude_heldout_pass", "before", "greedy"] == 1
    assert values["etude_rollouts_total", "train", "graded"] == 3
    assert values["etude_rollout_stage_seconds_total", "grading"] == 4 * 0.4
    assert values["etude_engine_generated_tokens_total", "serve"] == 90
    assert values["etude_weights_served", "serve"] == 3
    assert ("etude_train_entropy",) not in values  # what a step cannot know is absent, never 0


def test_the_dashboard_is_up_to_date_and_asks_for_what_is_exported() -> None:
    assert grafana.FILE.read_text() == grafana.dashboard(), "python tools/grafana.py"
    names = {name + ("_total" if figure.kind == "counter" else "") for name, figure in EXPORTED.items()}
    gateway = text_string_to_metric_families(Metrics(dict).page().decode())
    for family in gateway:
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    panels = json.loads(grafana.dashboard())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    queried = {name for query in queries for name in re.findall(r"\betude_\w+", query)}
    assert queried <= names, queried - names
    assert {TRAIN + "reward_mean", "etude_calls_total", "etude_heldout_pass"} <= queried
