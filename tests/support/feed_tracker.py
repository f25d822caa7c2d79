"""Feed the events of a run to one tracker, as `etude sinks` does: run by the Python of .venv-trackers.

python feed_tracker.py KIND OPTIONS.json RUN
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from etude.config.log import SINK_OPTIONS, SINKS
from etude.telemetry.public import public
from etude.telemetry.sinks.sink import Sink, SinkContext
from etude.telemetry.tail import EventTail, SinkThread


def main(kind: str, options: str, run: Path) -> None:
    tail = EventTail(run / "events", run / f"{kind}.json")
    context = SinkContext(
        run="tiny",
        id="1f2e3d4c",
        folder=run,
        config=public({"seed": 7, "engine": {"max_length": 64}, "harness": {"environment": {"KEY": "sk-secret"}}}),
        past=tail.past,
        read_rollout=lambda rollout_id: f"<script>text of {rollout_id}",
        samples=1,
    )
    sink = SINK_OPTIONS.classes[kind](**json.loads(options))
    make = cast("Callable[[], Sink]", partial(SINKS.make, kind, sink, context))
    thread = SinkThread(kind, tail, make, lambda *message: sys.exit(f"trouble: {message}"))
    thread.start()
    thread.end()
    assert thread.join(), "no end"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
