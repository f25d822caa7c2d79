"""Artefacts that are copied from the agent's sandbox to the grading sandbox, and those that are not. Pure.

    original ──┐
               ├──carry──▶ Carried: what is written, what is removed, what was left behind
    agent's  ──┘

The agent's files replace the original ones, and what it deleted is deleted. Three kinds of things are the grader's
ground, which stays as it was, whatever the agent has there: hidden tests, and the folders named ``tests`` that they
lie in; files that tell a test runner or the interpreter what to do before any test is run; and compiled files, which
none can read. Links that lead out of the working folder are left behind, too. Being left behind is no offence: it is
counted, and the rest is graded.
"""

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.sandboxes.images.archives import Entry, EntryKind

SETTINGS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
    | {"pyproject.toml", ".coveragerc", "pyvenv.cfg", "sitecustomize.py", "usercustomize.py", "pytest.py", "pluggy.py"}
)
"""Files that are read, or imported, by a test runner or an interpreter that starts."""
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "sitecustomize", "usercustomize", "__pycache__", ".pytest_cache"})
"""Folders that stand for such files."""
METADATA = (".dist-info", ".egg-info")
"""Suffixes of folders that announce plugins."""
BINARIES = re.compile(r"\.(pyc|pyo|pyd|dll|dylib|pth|egg-link|egg)$|\.so(\.[0-9.]+)?$")
"""Files that no person can read, or that run, or redirect, what an interpreter imports when it starts."""
SCRIPTS = (".py", ".sh", ".ini", ".cfg", ".toml")
"""Suffixes of a command's words that name files."""
TEST_FOLDERS = frozenset({"test", "tests"})
"""Folders that belong to the hidden tests in them as a whole: helpers and data are part of a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Artefacts as they are placed in the grading sandbox."""

    entries: tuple[Entry, ...]
    """Written there."""
    removed: tuple[str, ...]
    """Deleted there before: the agent has it no more, or has something else in its place."""
    left: tuple[str, ...]
    """Not taken along, and not the same as in the original."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Names that the agent must not change."""

    files: frozenset[str]
    """Hidden tests, and files that the command names."""
    folders: frozenset[str]
    """Test folders that hold any of them."""
    ancestors: frozenset[str]
    """Folders above any of them."""

    @classmethod
    def of(cls, tests: Iterable[str], command: Sequence[str] = ()) -> "Ground":
        """The ground of some test files and the command that runs them."""
        scripts = [word for word in command if word.endswith(SCRIPTS)]
        files = frozenset(posixpath.normpath(name) for name in (*tests, *scripts))
        above = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
        folders = frozenset(name for name in above if PurePosixPath(name).name in TEST_FOLDERS)
        return cls(files, folders, frozenset(above))

    def holds(self, name: str) -> bool:
        """True for a file or folder that is the grader's."""
        parts = PurePosixPath(name).parts
        if parts[-1] in SETTINGS or BINARIES.search(parts[-1]) or not RUNNERS.isdisjoint(parts):
            return True
        if any(part.endswith(METADATA) for part in parts):
            return True
        own = self.files | self.folders
        return any("/".join(parts[:depth]) in own for depth in range(1, len(parts) + 1))


def carry(original: Iterable[Entry], agents: Iterable[Entry], ground: Ground) -> Carried:
    """Select which of ``agents`` entries are copied; ``original`` are those of an untouched sandbox.

    Folders that hold nothing of the agent's are harmless, and are taken along wherever they are not the grader's.
    """
    before = {entry.name: entry for entry in original}
    taken: dict[str, Entry] = {}
    left: list[str] = []
    for entry in agents:
        is_barred = ground.holds(entry.name) or _leads_out(entry) or _bars(entry, ground)
        if not is_barred:
            taken[entry.name] = entry
        elif not _same(entry, before.get(entry.name)):
            left.append(entry.name)
    removed = [
        name
        for name, entry in before.items()
        if not ground.holds(name) and (name not in taken or taken[name].kind is not entry.kind)
        if not (entry.kind is EntryKind.FOLDER and _holds_kept(name, before, ground))
    ]
    return Carried(entries=tuple(taken.values()), removed=tuple(removed), left=tuple(left))


def _bars(entry: Entry, ground: Ground) -> bool:
    """True for an entry that would be in the way of a hidden test."""
    return entry.kind is not EntryKind.FOLDER and entry.name in ground.ancestors


def _leads_out(entry: Entry) -> bool:
    if entry.kind is not EntryKind.LINK:
        return False
    end = posixpath.normpath(posixpath.join(posixpath.dirname(entry.name), entry.target))
    return end == ".." or end.startswith(("../", "/"))


def _same(entry: Entry, other: Entry | None) -> bool:
    if other is None:
        return entry.kind is EntryKind.FOLDER
    return (entry.kind, entry.data, entry.target) == (other.kind, other.data, other.target)


def _holds_kept(folder: str, before: Iterable[str], ground: Ground) -> bool:
    """True for a folder that the agent deleted, and that has to stay for the grader's files in it."""
    return folder in ground.ancestors or any(name.startswith(f"{folder}/") and ground.holds(name) for name in before)
