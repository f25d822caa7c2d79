"""Background publication of a model's weights into a run's log.

    trainer     publish n ──▶ claim batch n + 1, forward, backward ──▶ release ──▶ optimiser step ──▶ land ──▶ publish …
    publisher       └────────▶ read, encode, upload, commit ─────────────────────────────────────────────┘

The publisher owns the content and the upload; this module decides when the trainer may continue.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Self, final

from torch import Tensor

from etude.errors import EtudeError, trace_of
from etude.telemetry.events import WeightsPublished
from etude.telemetry.log import EventLog
from etude.weights.log import WeightLog
from etude.weights.publish import Publication, Publisher
from etude.weights.state import state_bytes
from etude.weights.tensors import to_stored

MEANWHILE_S = 1.0
"""Interval at which a wait for a version does other work."""

logger = logging.getLogger(__name__)


@final
class WeightPublishing:
    """Publishes one version at a time and logs it; leaving the context waits for the current one."""

    def __init__(self, log: WeightLog, recipe: str, events: EventLog) -> None:
        self._publisher = Publisher(log)
        self._recipe = recipe
        self._events = events
        self._started_s = 0.0
        self._ended_s: float | None = None
        self._blocked_s = 0.0
        self._state_bytes = 0
        self._publication: Publication | None = None
        self._logged: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.close()

    def start(
        self, state: Mapping[str, Tensor], version: int, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Start to publish ``state`` as ``version``; its tensors must not change before :meth:`release`.

        The version becomes visible when ``before_commit``, which is called on another thread, has returned.
        """
        assert self._publication is None, "one version at a time: land the one before first"
        stored = to_stored(state)
        self._started_s, self._blocked_s, self._ended_s = time.perf_counter(), 0.0, None
        self._state_bytes = state_bytes(stored)
        self._publication = self._publisher.publish(
            stored, version=version, step=version, recipe=self._recipe, before_commit=before_commit
        )
        self._publication.record.add_done_callback(self._note_end)

    def release(self) -> None:
        """Wait until the published tensors may change; usually there is no wait."""
        if self._publication is not None:
            self._blocked_s += self._publication.wait_read()

    @property
    def is_visible(self) -> bool:
        """True if :meth:`land` would return at once."""
        return self._publication is None or self._publication.done

    def land(self, meanwhile: Callable[[], None] = lambda: None) -> int | None:
        """Wait until the version in progress is visible and return it; ``None`` if there is none.

        Waits while the store is unavailable; ``meanwhile`` is called at intervals.
        """
        if self._publication is None:
            return None
        waiting_s = time.perf_counter()
        while not wait([self._publication.record], MEANWHILE_S).done:
            meanwhile()
        record = self._publication.result()
        self._blocked_s += time.perf_counter() - waiting_s
        self._tell_failures()
        ended_s = self._ended_s or time.perf_counter()  # a waiter may wake before the end is recorded
        self._publication = None
        self._events.write(
            WeightsPublished(
                version=record.version,
                kind=record.kind,
                size_bytes=record.size_bytes,
                state_bytes=self._state_bytes,
                seconds=ended_s - self._started_s,
                blocked_s=self._blocked_s,
                digest=record.digest,
            )
        )
        return record.version

    def _tell_failures(self) -> None:
        """Log what publishing does not wait for and went wrong, each kind of error once."""
        for error in self._publisher.take_failures():
            if (kind := type(error).__name__) not in self._logged:
                self._logged.add(kind)
                words = str(error) if isinstance(error, EtudeError) else trace_of(error)
                logger.warning("a version has no short way for new readers: %s (logged once)", words)

    def _note_end(self, _record: object) -> None:
        self._ended_s = time.perf_counter()
