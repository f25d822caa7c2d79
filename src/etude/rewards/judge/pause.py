"""Judging that stopped after an alarm, until somebody has looked: a file in the run folder, and why in it.

It outlives the process, so that a restart by itself does not go on with a judge that nobody looked at, and it is one
for all processes of a run. Whoever has looked removes it.
"""

from pathlib import Path
from uuid import uuid4


class JudgePause:
    """Whether judging is held, and why."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def reason(self) -> str:
        """Why, and what ends it; empty: judging goes on."""
        try:
            why = self._file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return f"the judge is held after an alarm: {why}; look at it, calibrate it again, then remove {self._file}"

    def begin(self, why: str) -> None:
        """Pause from now on."""
        fresh = self._file.with_name(f"{self._file.name}.{uuid4().hex}")  # several processes may hear of it at once
        fresh.write_text(why, encoding="utf-8", errors="replace")
        fresh.replace(self._file)
