"""Publishing a model's weights: what it does not wait for is published when it fails."""

from pathlib import Path

import pytest
import torch

from etude.objects import ObjectStore
from etude.run.publishing import WeightPublishing
from etude.telemetry.log import EventLog
from etude.weights.log import WeightLog

LATER = 64
"""Versions by which the failed link of version 4 must have been reported."""


def test_a_link_that_cannot_be_stored_is_logged_once_and_publishing_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: nobody read the error, and new readers got a longer way with each version."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "links").write_text("a file where the folder of links should be")
    with (
        EventLog(tmp_path / "events", "train") as events,
        WeightPublishing(WeightLog(ObjectStore(str(store))), "recipe", events) as publishing,
    ):

        def publish(version: int) -> None:
            publishing.start({"weight": torch.arange(64.0) + version}, version)
            publishing.release()
            assert publishing.land() == version

        published = 0
        while not caplog.records:
            assert published <= LATER
            publish(published)
            published += 1
        for version in range(published, published + 9):
            publish(version)
    (record,) = caplog.records
    assert "no short way for new readers" in record.getMessage()
