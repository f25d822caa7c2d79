"""Publishing a model's weights and saying so."""

import time
from collections.abc import Mapping

from torch import Tensor

from etude.run.states import to_stored
from etude.telemetry.events import WeightsPublished
from etude.telemetry.log import EventLog
from etude.weights.publish import Publisher
from etude.weights.state import state_bytes


def publish_and_log(publisher: Publisher, state: Mapping[str, Tensor], version: int, events: EventLog) -> None:
    """Publish ``state`` as ``version``: full or as a lossless delta, visible once its commit record is."""
    started_s = time.perf_counter()
    stored = to_stored(state)
    record = publisher.publish(stored, version=version, step=version)
    events.write(
        WeightsPublished(
            version=version,
            kind=record.kind,
            size_bytes=record.size_bytes,
            state_bytes=state_bytes(stored),
            seconds=time.perf_counter() - started_s,
        )
    )
