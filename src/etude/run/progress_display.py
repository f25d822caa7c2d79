"""Live progress of a run: a panel on a terminal, plain lines everywhere else."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live

from etude.config.recipe import RunConfig
from etude.dashboard.formatting import visible
from etude.dashboard.learning import warnings
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.terminal import WARN, render
from etude.dashboard.text import notice_line, render_line
from etude.telemetry.log import EventReader

PANEL_S = 0.5
"""Interval at which the panel is redrawn."""
LINE_S = 10.0
"""Interval at which a line is printed without a terminal."""


class ProgressDisplay:
    """Displays a run's events as they are written; writes nothing itself."""

    def __init__(
        self,
        events: Path,
        config: RunConfig,
        out: TextIO,
        page: str = "",
        look_beside: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """``page`` is the URL of the run's page, if any. ``look_beside`` is called at every update; its lines are
        shown.
        """
        self._page = page
        self._look_beside = look_beside
        self._reader = EventReader(events)
        self._config = config
        self.metrics = RunMetrics()
        """Metrics of all events read so far."""
        self._console = Console(file=out)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._shown_s = 0.0
        self._warnings: list[str] = []
        """Current warnings: each is printed once, however long it lasts."""

    def __enter__(self) -> Self:
        if self._page:
            self._console.print(f"page: {self._page}", soft_wrap=True, highlight=False, markup=False)
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._live:
            self._live.stop()

    def update(self) -> None:
        """Show new notices at once, and new events at most once per interval."""
        for line in self._look_beside():
            self.notice(line)
        if time.monotonic() - self._shown_s >= (PANEL_S if self._live else LINE_S):
            self._show()

    def notice(self, words: str) -> None:
        """Print a permanent line, above the panel."""
        self._console.print(
            f"[{self.metrics.total_s(time.time()):6.0f} s] {words}", soft_wrap=True, highlight=False, markup=False
        )

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        for logged in self._reader.new():
            self.metrics.add(logged)
            if line := notice_line(logged):
                self.notice(line)
        if self._live:
            self._live.update(render(self.metrics, self._config, time.time(), self._page), refresh=True)
        else:
            self._console.print(render_line(self.metrics, self._config, time.time()), soft_wrap=True)
            notices = warnings(self.metrics)
            for notice in notices:
                if notice not in self._warnings:
                    self._console.print(f"warning: {visible(notice)}", style=WARN, soft_wrap=True, markup=False)
            self._warnings = notices
