"""Histories of a project: the commits of a git repository, or the releases of a package on an index.

    git repository ──▶ commits, newest first ─┐
    pypi:NAME ──────▶ releases likewise ──────┴▶ Change: before, after, subject, day      tree(ref) ──▶ a plain folder

Owns the way to a history and to each of its trees. What a change makes a task is :mod:`.proposals`' affair. Git runs
without hooks and settings (:mod:`etude.taskgen.scrubbing`); releases are source distributions of an index.
"""

import re
import shutil
import tarfile
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, final

from etude.taskgen.failures import SourceError
from etude.taskgen.projects import PROJECT_NAME
from etude.taskgen.scrubbing import copy_clean, read_repository
from etude.taskgen.sources import INDEX, RECORD, download, fetch, versions_of

LOG_FORMAT = "--format=%H%x00%P%x00%cs%x00%s"
"""Commit, parents, day and subject of a line of git's log."""
RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")
"""Releases that are no candidates or development versions of one."""
TREE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")
"""Names of trees: commits and versions. Who passes a suite on writes them, and they become arguments and paths here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of a history."""

    before: str
    after: str
    """Names of the two trees: commits, or versions."""
    subject: str
    """First line of its message; empty for a release."""
    day: str
    """ISO 8601; empty where it is not known."""

    @property
    def candidate_id(self) -> str:
        """Its id in the log of verdicts."""
        return f"{self.before}..{self.after}"


class History(Protocol):
    """The changes of one project."""

    reference: str
    """Reference by which it was opened."""

    def changes(self, limit: int | None, since: str = "") -> Sequence[Change]:
        """The newest changes, newest first, ``limit`` at most; ``since``: those that came after a tree of that name.

        Raises :class:`~etude.taskgen.failures.SourceError` for a name that is not in the history.
        """
        ...

    def gather(self, names: Iterable[str]) -> None:
        """Bring what some of its trees are made of to this machine, at once where that is faster than one by one."""
        ...

    def tree(self, name: str, folder: Path) -> Path:
        """Write the tree of one of its names into the new folder ``folder``; returns where its project is.

        Raises :class:`~etude.taskgen.failures.SourceError`.
        """
        ...


def open_history(reference: str, archives: Path | None = None) -> History:
    """The history of ``pypi:NAME``, or of the git repository in a folder.

    ``archives`` is a folder in which source distributions that were fetched are kept; by default they are not.
    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    if reference.startswith(INDEX):
        return Releases(reference, archives)
    folder = Path(reference)
    if (folder / ".git").exists() or (folder / "HEAD").is_file():
        return Commits(reference)
    raise SourceError(f"{reference!r} has no history here: expected the folder of a git repository, or {INDEX}NAME")


@final
class Commits:
    """The commits of a git repository that lead to its head, merges as their first parent saw them."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._repository = Path(reference)

    def changes(self, limit: int | None, since: str = "") -> Sequence[Change]:
        """The newest commits with a parent."""
        most = [] if limit is None or since else [f"--max-count={limit}"]
        log = read_repository(self._repository, "log", "--first-parent", *most, LOG_FORMAT)
        commits = [line.split("\0", 3) for line in log.splitlines()]
        newer = commits[: _index(self.reference, [commit for commit, *_ in commits], since)]
        return [
            Change(before=parents.split()[0], after=commit, subject=subject, day=day)
            for commit, parents, day, subject in newer[:limit]
            if parents
        ]

    def gather(self, names: Iterable[str]) -> None:
        """Do nothing: a repository is here."""

    def tree(self, name: str, folder: Path) -> Path:
        """The files of a commit."""
        check_tree_name(name)
        archive = folder.with_name(f"{folder.name}.tar")
        read_repository(self._repository, "archive", "--format=tar", f"--output={archive.absolute()}", name)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
        return folder


@final
class Releases:
    """The releases of a package on an index of which there is a source; each is a change from the one before."""

    def __init__(self, reference: str, archives: Path | None = None) -> None:
        self.reference = reference
        self._name = reference.removeprefix(INDEX)
        if not PROJECT_NAME.fullmatch(self._name):
            raise SourceError(f"{reference!r} names no project of an index: write {INDEX}NAME")
        self._fetched = Path(tempfile.mkdtemp(prefix="etude-releases-"))
        weakref.finalize(self, shutil.rmtree, self._fetched, ignore_errors=True)
        self._archives = (archives or self._fetched / "archives") / self._name
        self._fetching = threading.Lock()

    def changes(self, limit: int | None, since: str = "") -> Sequence[Change]:
        """The newest releases with a predecessor."""
        versions = [version for version in versions_of(self._name) if RELEASE.fullmatch(version)]
        end = _index(self.reference, versions, since)
        steps = [Change(before=older, after=newer, subject="", day="") for newer, older in pairwise(versions)]
        return steps[:end][:limit]

    def gather(self, names: Iterable[str]) -> None:
        """Fetch the source distributions of some releases at once; one that cannot be had is missed by its tree."""
        with self._fetching, suppress(SourceError):
            missing = [name for name in dict.fromkeys(names) if not (self._archives / check_tree_name(name)).exists()]
            if missing:
                download(self._name, missing, self._archives)

    def tree(self, name: str, folder: Path) -> Path:
        """The source distribution of a release, which is unpacked once: it is after one change and before the next."""
        place = self._fetched / check_tree_name(name)
        if not place.exists():
            incoming = Path(tempfile.mkdtemp(dir=self._fetched)) / "release"
            copy_clean(fetched := fetch(str(self._archive(name)), incoming), incoming.with_name("tree"), {})
            if (fetched / RECORD).is_file():
                shutil.copyfile(fetched / RECORD, incoming.with_name("tree") / RECORD)
            with suppress(OSError):  # the same release at the same time
                incoming.with_name("tree").rename(place)
        shutil.copytree(place, folder)
        return folder

    def _archive(self, version: str) -> Path:
        """The source distribution of a release. Raises :class:`~etude.taskgen.failures.SourceError`."""
        with self._fetching:
            archive = next((self._archives / version).glob("*"), None)
            return archive or download(self._name, [version], self._archives)[version]


def check_tree_name(name: object) -> str:
    """The name, if it can be one of a commit or a release. Raises :class:`~etude.taskgen.failures.SourceError`."""
    if not isinstance(name, str) or not TREE.fullmatch(name):
        raise SourceError(f"{name!r} is no commit and no release: correct it in the suite, or leave its task out")
    return name


def _index(reference: str, names: Sequence[str], since: str) -> int | None:
    """The place of a name among those of a history; ``None`` without a name.

    Raises :class:`~etude.taskgen.failures.SourceError` for one that is not among them.
    """
    if not since:
        return None
    if since not in names:
        raise SourceError(
            f"{reference!r} has no {since!r}, at which the last build ended: its history is another one now; say how "
            f"many of its newest changes are to be tried (--changes N)"
        )
    return names.index(since)
