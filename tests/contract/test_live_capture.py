"""Gateway and feedback process, killed repeatedly under load: no acknowledged record is lost or doubled."""

from pathlib import Path

import pytest

from bench.live.ingest import measure_loss, measure_speed


@pytest.mark.heavy("a minute")
def test_kill_9_loses_and_doubles_nothing(tmp_path: Path) -> None:
    figures = measure_loss(tmp_path / "run", load_s=10.0)
    assert (figures["lost"], figures["doubled"]) == (0, 0), figures
    counts = [figures[name] for name in ("kills", "answers", "events", "duplicates")]
    assert all(isinstance(count, int) and count > 0 for count in counts), figures


def test_every_event_of_the_measurement_is_joined(place: str) -> None:
    assert measure_speed(place, events=2000, batch=1000).keys() >= {"reported_per_s", "joined_per_s"}
