"""Rules fire when they hold for long enough, resolve when they no longer do, and reach people and webhooks."""

import json
import socket
import threading
from pathlib import Path

import pytest

from etude.config.log import AlertConfig
from etude.telemetry.alerts import AlertRules
from etude.telemetry.events import (
    AlertChanged,
    Event,
    Logged,
    MemoryUsed,
    SinkFailed,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.sinks import alerts
from etude.telemetry.sinks.alerts import SIGNATURE, TRIES, AlertSink, signature
from etude.telemetry.sinks.sink import SinkContext
from receivers import receiver
from run_events import rollout, step


def changes(rule: AlertConfig, events: list[Event], every_s: float = 1.0) -> list[tuple[int, bool]]:
    """Number of the event, from 0, and whether the rule fires or resolves."""
    rules = AlertRules([rule], cost=lambda: 3.5)
    return [
        (number, change.firing)
        for number, event in enumerate(events)
        for change in rules.add(Logged(at_s=number * every_s, process="p", event=event))
    ]


def test_a_rule_fires_after_steps_in_a_row_and_resolves() -> None:
    rule = AlertConfig(name="gradient", when="grad_norm > 1 for 2 steps")
    events: list[Event] = [step(number, grad_norm=norm) for number, norm in enumerate([2, 0.5, 2, 2, 2, 0.5, 0.5])]
    assert changes(rule, events) == [(3, True), (5, False)]


def test_a_rule_fires_after_seconds_also_between_steps() -> None:
    rule = AlertConfig(name="reward", when="reward_mean < 0.2 for 5 s")
    events: list[Event] = [step(1), *[MemoryUsed(size_bytes=1)] * 4, step(9)]
    assert changes(rule, events, every_s=2.0) == [(3, True), (5, False)]


@pytest.mark.parametrize(
    ("when", "events"),
    [
        ("no_signal > 2.0", [step(number, groups_without_signal=1.0) for number in range(3)]),
        ("decline > 0.4", [step(n, reward_mean=0.9 if n <= 10 else 0.5, reward_low=0.0) for n in range(1, 21)]),
        ("mismatch > 1e-3", [step(1), step(2), step(3, k3=1e-2)]),
        ("hack_rate > 0.5", [rollout(0), rollout(1, hacked=True), rollout(2, hacked=True)]),
        ("cost > 3.0", [rollout(0), MemoryUsed(size_bytes=1), step(1)]),
        (
            "lag >= 2",
            [
                WeightsSwapped(version=1, stage_ms=1.0, pause_ms=1.0),
                *(
                    WeightsPublished(version=n, kind="full", size_bytes=1, state_bytes=1, seconds=0.0, blocked_s=0.0)
                    for n in (2, 3)
                ),
            ],
        ),
    ],
)
def test_what_is_watched_beside_metrics(when: str, events: list[Event]) -> None:
    assert changes(AlertConfig(name="one", when=when), events) == [(len(events) - 1, True)]


def test_a_webhook_is_told_of_both_ends_signed_and_once_after_a_restart(tmp_path: Path) -> None:
    with receiver() as (url, received):
        rule = AlertConfig(name="reward", when="reward_mean < 0.2", to=("log", "webhook"), webhook="$HOOK")
        events = [Logged(at_s=float(n), process="train", event=step(n)) for n in (1, 1, 3)]
        written: list[Event] = []
        for before in (0, 1):  # started again behind the first event
            context = SinkContext(run="tiny", id="1", folder=tmp_path, config={}, past=events[:before].copy)
            sink = AlertSink([rule], context, written.append, {"HOOK": url, "ETUDE_ALERT_KEY": "secret"})
            for logged in events[before : 1 if not before else 3]:
                sink.emit(logged)
    assert [(event.firing, event.to) for event in written if isinstance(event, AlertChanged)] == [
        (True, ["log", "webhook"]),
        (False, ["log", "webhook"]),
    ]
    bodies = [json.loads(posted.body) for posted in received]
    assert [(body["run"], body["alert"], body["firing"]) for body in bodies] == [
        ("tiny", "reward", True),
        ("tiny", "reward", False),
    ]
    assert all(posted.headers[SIGNATURE] == signature(posted.body, "secret") for posted in received)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirected_webhook_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(alerts, "FIRST_PAUSE_S", 0.01)
    with receiver([status], location="/elsewhere") as (url, received):
        failed = webhook_failure(tmp_path, url)
    assert [posted.path for posted in received] == ["/"] * TRIES
    assert f"{status}" in failed.reason
    assert "set webhook to the URL that it leads to" in failed.reason


@pytest.mark.parametrize("url", ["secret", "http://127.0.0.1/a secret", "http://127.0.0.1:secret/"])
def test_a_webhook_without_a_url_is_told_of_without_its_value(tmp_path: Path, url: str) -> None:
    failed = webhook_failure(tmp_path, url)
    assert "webhook is not a URL" in failed.reason
    assert "secret" not in failed.reason


def test_a_webhook_whose_answer_is_no_http_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "FIRST_PAUSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(TRIES):
                with server.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        failed = webhook_failure(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert "BadStatusLine" in failed.reason


def webhook_failure(folder: Path, url: str) -> SinkFailed:
    """The failure of a rule that fires once, with its webhook in an environment variable."""
    rule = AlertConfig(name="reward", when="reward_mean < 0.2", to=("webhook",), webhook="$HOOK")
    written: list[Event] = []
    context = SinkContext(run="tiny", id="1", folder=folder, config={})
    AlertSink([rule], context, written.append, {"HOOK": url}).emit(Logged(at_s=1.0, process="train", event=step(1)))
    changed, failed = written
    assert isinstance(changed, AlertChanged)
    assert isinstance(failed, SinkFailed)
    return failed


def test_a_webhook_that_fails_is_tried_a_few_times_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "FIRST_PAUSE_S", 0.01)
    written: list[Event] = []
    with receiver([500]) as (url, received):
        rule = AlertConfig(name="reward", when="reward_mean < 0.2", to=("webhook",), webhook=url)
        context = SinkContext(run="tiny", id="1", folder=tmp_path, config={})
        AlertSink([rule], context, written.append, {}).emit(Logged(at_s=1.0, process="train", event=step(1)))
    assert len(received) == TRIES
    failed = written[-1]
    assert isinstance(failed, SinkFailed)
    assert "500" in failed.reason
    assert url not in failed.reason
