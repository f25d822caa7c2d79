"""Records of tasks that changes became: all that is needed to make a task again out of a history.

    suite/records.jsonl     a line of JSON per task; holds no line of anybody's code but names and prompts

So a suite is a few hundred kilobytes that can be passed on, while trees and tests come from where they are published
(`etude suite fetch`). A digest of these says whether they are what the task was validated with. Owns the form.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.errors import DamagedError
from etude.fsync import write_whole

RECORDS_FILE = "records.jsonl"
ID_LENGTH = 16
"""Hex digits of a task's id."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Ids and packages: who passes a suite on writes them, and files and folders are called by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """One task, and the change that it is made of."""

    task_id: str
    source: str
    """Reference of the history: ``pypi:NAME``, or the folder of a repository."""
    package: str
    before: str
    after: str
    day: str
    prompt: str
    template: str
    path: str
    name: str
    """Module and name of what is asked for; empty: all of the change."""
    lines: int
    difficulty: str
    about: tuple[str, ...]
    """Tests that fail before the change and pass after it, every time."""
    others: tuple[str, ...]
    """Tests that pass in both."""
    timeout_s: float
    digest: str
    """SHA-256 over the texts before the change and the tests after it."""
    added: str = ""
    """Day on which it came into the suite, ISO 8601; empty where that was not noted."""
    licence: str = ""
    """Licence of the project, as it states it."""
    canary: str = ""
    """The suite's: a text that has it was taken from here."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an id or a package that no file can be called by."""
        for field, name in (("task_id", self.task_id), ("package", self.package)):
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                raise ValueError(f"{field} = {name!r}: expected letters, digits, '.', '_' and '-'")


def id_of(package: str, before: str, after: str, about: Sequence[str]) -> str:
    """The id of a task: the same whenever it is made of the same change and asked by the same tests."""
    text = json.dumps([package, before, after, sorted(about)])
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def digest_of_texts(*groups: Mapping[str, str]) -> str:
    """SHA-256 over some groups of texts by path."""
    return hashlib.sha256(json.dumps([dict(sorted(group.items())) for group in groups]).encode()).hexdigest()


def read_records(folder: Path) -> list[HistoryRecord]:
    """The records of a suite, in order; none where there is no such file.

    Raises :class:`~etude.errors.DamagedError` for a line that is none.
    """
    file = folder / RECORDS_FILE
    records: list[HistoryRecord] = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], start=1):
        try:
            fields = json.loads(line)
            records.append(
                HistoryRecord(**{**fields, "about": tuple(fields["about"]), "others": tuple(fields["others"])})
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"{file}, line {number} is not a record of a task: {error}") from error
    return records


def write_records(folder: Path, records: Sequence[HistoryRecord]) -> None:
    """Write the records of a suite, whole or not at all; each task once."""
    unique = {record.task_id: record for record in records}
    lines = (json.dumps(asdict(each)) + "\n" for each in unique.values())
    write_whole(folder / RECORDS_FILE, "".join(lines).encode())
