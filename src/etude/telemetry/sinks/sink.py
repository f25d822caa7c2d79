"""The protocol of sinks: others than the run folder that are told of a run.

    events/*.jsonl ──▶ EventTail ──▶ Sink.emit      one of each for every sink, in the process `etude sinks`

Owns what a sink is given. Does not own the pace, the place where it stopped or what becomes of trouble
(:mod:`etude.telemetry.tail`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.telemetry.events import Logged
from etude.types import Json


class Sink(Protocol):
    """Takes events; called from one thread of its own.

    One is made for each run by calling what ``log.to`` names with its options and a :class:`SinkContext`. It gets each
    event once, in order of time, and after a restart those that came since.
    """

    def emit(self, event: Logged) -> None:
        """Take one event. ``OSError`` means that the other end is away: the event is given again later, for as long as
        it takes. After any other error it is given twice more, and then it is lost and counted.
        """
        ...

    def close(self) -> None:
        """Take no more: the run has stopped, and its report is written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The run that a sink is made for, beside its own options."""

    run: str
    """Name of the run."""
    id: str
    """Letters and digits that no other run has, and that stay when it is resumed, on any machine."""
    folder: Path
    """Folder of the run."""
    config: Mapping[str, Json]
    """The resolved recipe as JSON has it, without anything secret (:mod:`etude.telemetry.public`)."""
    past: Callable[[], Iterable[Logged]] = tuple
    """The events that it was given before a restart, in order of time."""
    read_rollout: Callable[[str], str] = lambda rollout_id: ""
    """The text of a rollout by its id."""
    samples: int = 0
    """``log.samples``."""

    @property
    def report(self) -> Path:
        """The report page, once it is there."""
        return self.folder / "report.html"
