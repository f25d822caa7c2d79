"""Lending with real parts: production's metrics over HTTP, and processes that start and stop as decided."""

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from etude.config.fleet import FleetConfig, LendingConfig, RegionConfig
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, InfrastructureError
from etude.fleet.lending import ProductionLoad
from etude.fleet.specs import ProcessSpec
from etude.run.fleet_check import look_at_fleet
from etude.run.folder import RunFolder
from etude.run.lending import Lender, MetricsProduction, first_tokens, make_production, quantile
from etude.run.placement import place_on
from etude.run.supervision import Supervisor
from etude.telemetry.log import EventLog
from waiting import wait_until

SGLANG = """\
# HELP sglang:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 2.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 3.0
sglang:time_to_first_token_seconds_count{model_name="m"} 3.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 0.4
"""
SHARED = """\
# TYPE etude_first_token_seconds histogram
etude_first_token_seconds_bucket{le="1.0",traffic="production"} 4.0
etude_first_token_seconds_bucket{le="+Inf",traffic="production"} 4.0
etude_first_token_seconds_bucket{le="1.0",traffic="rollout"} 0.0
etude_first_token_seconds_bucket{le="+Inf",traffic="rollout"} 900.0
"""


class Page:
    """The page of a vLLM server, by the library that it writes its own with."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.running = Gauge("vllm:num_requests_running", "Running.", ["model_name"], registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "Waiting.", ["model_name"], registry=registry)
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "TTFT.", ["model_name"], buckets=(0.1, 0.5, 1.0), registry=registry
        )
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.stop()


def lending(*urls: str, **keys: object) -> LendingConfig:
    return LendingConfig.model_validate({"places": 4, "metrics": urls, "calm_s": 0.0, "lead_s": 1.0} | keys)


def test_load_is_the_sum_of_all_pages_and_first_tokens_are_recent_ones(page: Page) -> None:
    other, now = Page(), [0.0]
    try:
        production = MetricsProduction(lending(page.url, other.url), lambda: now[0])
        page.running.labels("m").set(3)
        other.running.labels("m").set(2)
        other.waiting.labels("m").set(1)
        for _ in range(100):
            page.first_token.labels("m").observe(0.9)
        assert production.load() == ProductionLoad(running=5, waiting=1, first_token_p95_s=None)
        for _ in range(20):
            other.first_token.labels("m").observe(0.05)
        now[0] = 10.0
        assert production.load().first_token_p95_s == pytest.approx(0.095), "of the twenty alone"
        now[0] = 41.0
        production.load()
        assert production.load().first_token_p95_s is None, "a moment without calls"
    finally:
        other.stop()


def test_a_page_that_is_away_or_no_page_is_told(page: Page) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        away = f"http://127.0.0.1:{unused.getsockname()[1]}/metrics"
    for url in (away, page.url.replace("127.0.0.1:", "127.0.0.1:x")):
        with pytest.raises(InfrastructureError, match=f"production's page {url} cannot be read"):
            MetricsProduction(lending(page.url, url)).load()


def test_a_page_without_calls_is_no_production_without_calls() -> None:
    registry = CollectorRegistry()
    Gauge("process_cpu_seconds", "Something else.", registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    region = RegionConfig(name="eu", engines=1, lent_engines=1, store="memory://",
                          lending=lending(f"http://127.0.0.1:{server.server_port}/metrics"))  # fmt: skip

    async def look() -> dict[str, str]:
        fleet = FleetConfig(home="eu", regions=(region,))
        return {finding.name: finding.words async for finding in look_at_fleet(fleet, None)}

    try:
        with pytest.raises(InfrastructureError, match=r"does not report running calls: it has none of etude_calls"):
            MetricsProduction(region.lending).load()
        assert "does not report running calls" in asyncio.run(look())["eu: production"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_pages_of_other_servers_are_read_and_rollouts_are_not_production() -> None:
    assert first_tokens(text_string_to_metric_families(SGLANG)) == {0.1: 2.0, float("inf"): 3.0}
    assert first_tokens(text_string_to_metric_families(SHARED)) == {1.0: 4.0, float("inf"): 4.0}


def test_quantiles_are_those_of_prometheus() -> None:
    """Promtool's test of histogram_quantile: 0.5 of 1, 3, 6 by 1, 2, 4 is 2 + 2 · (3 − 3) / 3."""
    buckets = {1.0: 1.0, 2.0: 3.0, 4.0: 6.0, float("inf"): 6.0}
    assert quantile(buckets, 0.5) == 2.0
    assert quantile(buckets, 0.75) == pytest.approx(3.0)
    assert quantile({1.0: 1.0, float("inf"): 100.0}, 0.95) == 1.0
    assert quantile({1.0: 0.0, float("inf"): 0.0}, 0.95) is None


@dataclass
class Scripted:
    """A production with a scripted load."""

    load_now: ProductionLoad | None = field(
        default_factory=lambda: ProductionLoad(running=0, waiting=0, first_token_p95_s=None)
    )

    def load(self) -> ProductionLoad:
        if self.load_now is None:
            raise InfrastructureError("production is away")
        return self.load_now


def test_people_are_told_what_is_lent_and_the_forecast_is_kept(tmp_path: Path) -> None:
    production, messages, file = Scripted(), list[str](), tmp_path / "lending-eu.json"
    lender = Lender(lending("http://unread"), ["serve-1", "serve-2"], production, file, messages.append)
    assert lender.withheld == {"serve-1", "serve-2"}, "until something is known"
    lender.look(0.0)
    assert lender.withheld == set()
    production.load_now = None
    lender.look(3600.0)
    lender.look(3601.0)
    assert lender.withheld == {"serve-1", "serve-2"}
    production.load_now = ProductionLoad(running=5, waiting=0, first_token_p95_s=0.1)
    lender.look(7300.0)
    lender.look(11000.0)
    assert messages == [
        "lent: the machines of serve-1, serve-2: production has 0 calls",
        "production is away; production keeps its machines until it answers",
        "given back: the machines of serve-1, serve-2",
        "production answers again",
    ]
    assert json.loads(file.read_text()) == {"0": 0.0, "2": 5.0}


def test_a_production_whose_own_code_fails_has_its_machines(tmp_path: Path) -> None:
    class Broken:
        def load(self) -> ProductionLoad:
            raise KeyError("calls")

    messages = list[str]()
    lender = Lender(lending("http://unread"), ["serve-1"], Broken(), tmp_path / "a folder" / "f.json", messages.append)
    lender.look(0.0)
    assert lender.withheld == {"serve-1"}
    trouble = "production's load cannot be read: KeyError: 'calls'"
    assert messages == [f"{trouble}; production keeps its machines until it answers"]


def test_lending_goes_on_after_an_error_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the thread ended, and production never got its machines back."""
    monkeypatch.setattr("etude.run.lending.LOOK_S", 0.01)
    production, messages = Scripted(), list[str]()
    good, production.load_now = production.load_now, "many calls"  # type: ignore[assignment]  # somebody else's code
    with Lender(lending("http://unread"), ["serve-1"], production, tmp_path / "f.json", messages.append) as lender:
        lender.start()
        wait_until(lambda: messages != [])
        production.load_now = good
        wait_until(lambda: lender.withheld == set())
    assert messages[0].startswith("lending fails and is tried again: AttributeError")
    assert messages[1:] == ["lent: the machines of serve-1: production has 0 calls"]


def test_a_fleet_that_cannot_lend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"regions\.lending: metrics is empty"):
        LendingConfig(places=8)
    with pytest.raises(ValueError, match=r"regions\.lending\.own would have no effect with places = 0"):
        LendingConfig(own=3)
    with pytest.raises(ValueError, match=r"eu has \[regions\.lending\] and no lent_engines"):
        RegionConfig(name="eu", engines=1, lending=lending("http://unread"))
    with pytest.raises(ConfigError, match=r"regions\.lending\.production = '@none\.py:Mine' cannot be imported"):
        make_production(LendingConfig.model_construct(production="@none.py:Mine"))


def test_a_lent_engine_runs_while_production_is_idle_and_ends_when_it_is_not(page: Page, tmp_path: Path) -> None:
    region = RegionConfig(name="home", engines=2, lent_engines=1, lending=lending(page.url))
    fleet = FleetConfig(home="home", regions=(region,))
    folder, messages = RunFolder.create(tmp_path / "run", RunConfig()), list[str]()
    idle = "import time; time.sleep(600)"
    specs = [
        ProcessSpec(name=f"serve-{replica}", command=("python3", "-c", idle), region="home", is_lent=bool(replica))
        for replica in range(2)
    ]
    page.running.labels("m").set(9)
    with EventLog(folder.events, "supervisor") as events:
        supervisor = Supervisor(
            specs, place_on(fleet, folder), folder, events, messages.append, heartbeat_timeout_s=900.0
        )

        def running() -> set[str]:
            supervisor.check()
            return {name for name, status in supervisor.statuses.items() if status.is_running}

        try:
            assert running() == {"serve-0"}
            page.running.labels("m").set(0)
            wait_until(lambda: running() == {"serve-0", "serve-1"})
            page.waiting.labels("m").set(1)
            wait_until(lambda: running() == {"serve-0"})
            assert [line.partition(":")[0] for line in messages] == ["lent", "given back"]
        finally:
            supervisor.stop()
