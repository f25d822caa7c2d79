"""Selection of the artefacts that are copied from the agent's sandbox to the grading sandbox. Pure.

    original ──┐
               ├──carry──▶ Carried: entries that are written, removed, or not copied
    agent's  ──┘

The agent's files replace the original ones, and files that it deleted are deleted. Three kinds of entries are protected
and stay as in the original, whatever the agent has there: hidden tests, and the folders named ``tests`` that contain
them; files that configure a test runner or the interpreter before any test runs; and compiled files, which cannot be
reviewed. Links that lead out of the working folder are not copied, either. An entry that is not copied is no offence:
it is counted, and the rest is graded.
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
"""Files that a test runner or an interpreter reads or imports at its start."""
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "sitecustomize", "usercustomize", "__pycache__", ".pytest_cache"})
"""Folders that have the same effect."""
METADATA = (".dist-info", ".egg-info")
"""Suffixes of folders that register plugins."""
BINARIES = re.compile(r"\.(pyc|pyo|pyd|dll|dylib|pth|egg-link|egg)$|\.so(\.[0-9.]+)?$")
"""Files that cannot be reviewed, or that run code or redirect imports when an interpreter starts."""
SCRIPTS = (".py", ".sh", ".ini", ".cfg", ".toml")
"""Suffixes of those words of a command that are file names."""
TEST_FOLDERS = frozenset({"test", "tests"})
"""Folders that are protected as a whole if they contain hidden tests: helpers and data are part of a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Artefacts as they are placed in the grading sandbox."""

    entries: tuple[Entry, ...]
    """Written there."""
    removed: tuple[str, ...]
    """Deleted before: the agent deleted it, or has an entry of another kind in its place."""
    left: tuple[str, ...]
    """Not copied, although different from the original."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Paths that the agent must not change."""

    files: frozenset[str]
    """Hidden tests, and files that the command names."""
    folders: frozenset[str]
    """Test folders that contain any of them."""
    ancestors: frozenset[str]
    """Folders above any of them."""

    @classmethod
    def of(cls, tests: Iterable[str], command: Sequence[str] = ()) -> "Ground":
        """The protected paths for the given test files and the command that runs them."""
        scripts = [word for word in command if word.endswith(SCRIPTS)]
        files = frozenset(posixpath.normpath(name) for name in (*tests, *scripts))
        above = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
        folders = frozenset(name for name in above if PurePosixPath(name).name in TEST_FOLDERS)
        return cls(files, folders, frozenset(above))

    def holds(self, name: str) -> bool:
        """True for a file or folder that is protected."""
        parts = PurePosixPath(name).parts
        if parts[-1] in SETTINGS or BINARIES.search(parts[-1]) or not RUNNERS.isdisjoint(parts):
            return True
        if any(part.endswith(METADATA) for part in parts):
            return True
        own = self.files | self.folders
        return any("/".join(parts[:depth]) in own for depth in range(1, len(parts) + 1))


def carry(original: Iterable[Entry], agents: Iterable[Entry], ground: Ground) -> Carried:
    """Select the entries of ``agents`` to copy; ``original`` are the entries of an untouched sandbox.

    Empty folders are harmless, and are copied unless they are protected.
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
    """True for an entry that takes the place of a hidden test's parent folder."""
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
    """True for a folder that must stay although the agent deleted it, since it contains protected files."""
    return folder in ground.ancestors or any(name.startswith(f"{folder}/") and ground.holds(name) for name in before)
