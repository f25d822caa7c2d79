"""Progress of a suite along the histories that it is made of: up to where each was tried, with what, and on which day.

    suite/histories.json     {SOURCE: {newest, day, base, before}}

So a refresh goes on where the last build or refresh ended, and installs what that installed, without being told. Owns
the form of the file; what is tried is :mod:`.validator`'s.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.errors import DamagedError
from etude.fsync import write_whole
from etude.taskgen.history.sources import Change

PROGRESS_FILE = "histories.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryProgress:
    """The end of the last build or refresh of one history."""

    newest: str
    """Name of the newest tree whose change was tried; all changes up to it have their verdict."""
    day: str
    """Day on which it was tried, ISO 8601."""
    base: str = ""
    """The stored base system that its dependencies were installed over; empty: the provider's own."""
    before: str = ""
    """A date: nothing that was uploaded to an index later was installed."""


def newest_tried(changes: Sequence[Change], failed: Collection[Change]) -> str:
    """The name of the newest tree up to which all changes have a verdict that counts, of ``changes`` newest first;
    empty where the very first of them failed by the sandbox's fault.
    """
    newest = ""
    for change in reversed(changes):
        if change in failed:
            break
        newest = change.after
    return newest


def read_progress(folder: Path) -> dict[str, HistoryProgress]:
    """The progress of a suite, by history; none where there is no such file.

    Raises :class:`~etude.errors.DamagedError` for a file that is not so.
    """
    file = folder / PROGRESS_FILE
    if not file.exists():
        return {}
    try:
        return {source: HistoryProgress(**fields) for source, fields in json.loads(file.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read: {error}; expected {{SOURCE: {{newest, day}}}}") from error


def write_progress(folder: Path, progress: Mapping[str, HistoryProgress]) -> None:
    """Write the progress of a suite, whole or not at all."""
    fields = {source: asdict(each) for source, each in sorted(progress.items())}
    write_whole(folder / PROGRESS_FILE, (json.dumps(fields, indent=1) + "\n").encode())
