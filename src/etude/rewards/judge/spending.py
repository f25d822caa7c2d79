"""What a run has spent on judging, in files of its run folder: a restarted process does not begin with a full budget.

Each process that judges has a file of its own there and reads those of the others. Written whole and renamed into place
after every call, which takes far longer than that.
"""

from dataclasses import asdict
from pathlib import Path

import orjson

from etude.errors import DamagedError
from etude.rewards.judge.budget import Spend


class SpendFile:
    """Remembers a :class:`~etude.rewards.judge.budget.Spend`; ``None`` is a run without a folder: nothing is."""

    def __init__(self, folder: Path | None, seat: int = 0) -> None:
        """``seat`` tells the processes of a run from each other."""
        self._folder = folder
        self._name = f"judge-spend-{seat}.json"

    def load(self) -> Spend:
        """What this process spent so far. Raises :class:`~etude.errors.DamagedError` for a file that does not say."""
        return Spend() if self._folder is None else _read(self._folder / self._name)

    def save(self, spent: Spend) -> Spend:
        """Remember, and return what all others have spent. Raises like :meth:`load`, about their files."""
        if self._folder is None:
            return Spend()
        fresh = self._folder / f"{self._name}.new"
        fresh.write_bytes(orjson.dumps(asdict(spent)))
        fresh.replace(self._folder / self._name)
        return self.others()

    def others(self) -> Spend:
        """What the other processes have spent. Raises like :meth:`load`, about their files."""
        files = [] if self._folder is None else self._folder.glob("judge-spend-*.json")
        return sum((_read(file) for file in files if file.name != self._name), Spend())


def _read(file: Path) -> Spend:
    if not file.exists():
        return Spend()
    try:
        return Spend(**orjson.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{file} does not say what was spent: {error}; remove it to begin at 0") from error
