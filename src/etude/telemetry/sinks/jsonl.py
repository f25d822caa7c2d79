"""Files of JSON lines elsewhere, for other people's programs."""

from dataclasses import asdict
from pathlib import Path
from typing import final

import orjson

from etude.config.log import JsonlOptions
from etude.telemetry.events import Logged
from etude.telemetry.sinks.sink import SinkContext


@final
class JsonlSink:
    """Appends JSON lines to a file; implements :class:`~etude.telemetry.sinks.sink.Sink`."""

    def __init__(self, options: JsonlOptions, context: SinkContext) -> None:
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{context.run}-{context.id}.jsonl").open("ab")

    def emit(self, event: Logged) -> None:
        """Append one line and hand it to the system."""
        line = {"at_s": event.at_s, "process": event.process, "event": type(event.event).__name__}
        self._file.write(orjson.dumps(line | asdict(event.event)) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
