"""What a run has spent on judging, in a file of its run folder: a restarted process does not begin with a full purse.

Owns the file. Written whole and renamed into place after every call, which takes far longer than that.
"""

from dataclasses import asdict
from pathlib import Path

import orjson

from etude.errors import DamagedError
from etude.rewards.judging.budget import Spend


class SpendFile:
    """Remembers a :class:`~etude.rewards.judging.budget.Spend`; ``None`` is a run without a folder: nothing is."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def load(self) -> Spend:
        """What was spent so far. Raises :class:`~etude.errors.DamagedError` for a file that does not say."""
        if self._file is None or not self._file.exists():
            return Spend()
        try:
            return Spend(**orjson.loads(self._file.read_bytes()))
        except (ValueError, TypeError) as error:
            raise DamagedError(f"{self._file} does not say what was spent: {error}; remove it to begin at 0") from error

    def save(self, spent: Spend) -> None:
        """Remember."""
        if self._file is not None:
            fresh = self._file.with_name(f"{self._file.name}.new")
            fresh.write_bytes(orjson.dumps(asdict(spent)))
            fresh.replace(self._file)
