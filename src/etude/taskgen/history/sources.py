"""Histories of a project: the commits of a git repository, or the releases of a package on an index.

    git repository ──▶ commits, newest first ─┐
    pypi:NAME ──────▶ releases likewise ──────┴▶ Change: before, after, subject, day      tree(ref) ──▶ a plain folder

Owns the way to a history and to each of its trees. What a change makes a task is :mod:`.proposals`' affair. Git runs
without hooks and settings (:mod:`etude.taskgen.scrubbing`); releases are fetched by pip as sources.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, final

from etude.taskgen.failures import SourceError
from etude.taskgen.indexes import run_pip
from etude.taskgen.scrubbing import copy_clean, read_repository
from etude.taskgen.sources import INDEX, RECORD, download, fetch

LOG_FORMAT = "--format=%H%x00%P%x00%cs%x00%s"
"""Commit, parents, day and subject of a line of git's log."""
INDEX_TIMEOUT_S = 120.0
RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")
"""Releases that are no candidates or development versions of one."""


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

    def tree(self, name: str, folder: Path) -> Path:
        """The files of a commit."""
        archive = folder.with_name(f"{folder.name}.tar")
        read_repository(self._repository, "archive", "--format=tar", f"--output={archive.absolute()}", name)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
        return folder


@final
class Releases:
    """The releases of a package on an index; each is a change from the one before."""

    def __init__(self, reference: str, archives: Path | None = None) -> None:
        self.reference = reference
        self._name = reference.removeprefix(INDEX)
        self._archives = archives
        self._fetched = tempfile.TemporaryDirectory(prefix="etude-releases-", ignore_cleanup_errors=True)

    def changes(self, limit: int | None, since: str = "") -> Sequence[Change]:
        """The newest releases with a predecessor."""
        versions = self._versions()
        end = _index(self.reference, versions, since)
        steps = [Change(before=older, after=newer, subject="", day="") for newer, older in pairwise(versions)]
        return steps[:end][:limit]

    def tree(self, name: str, folder: Path) -> Path:
        """The source distribution of a release, which is fetched once: it is after one change and before the next."""
        place = Path(self._fetched.name) / name
        if not place.exists():
            incoming = Path(tempfile.mkdtemp(dir=self._fetched.name)) / "release"
            copy_clean(fetched := fetch(self._archive(name), incoming), incoming.with_name("tree"), {})
            if (fetched / RECORD).is_file():
                shutil.copyfile(fetched / RECORD, incoming.with_name("tree") / RECORD)
            with suppress(OSError):  # the same release at the same time
                incoming.with_name("tree").rename(place)
        shutil.copytree(place, folder)
        return folder

    def _archive(self, version: str) -> str:
        """The reference of a release's source distribution: the file, where it is kept."""
        if self._archives is None:
            return f"{INDEX}{self._name}=={version}"
        folder = self._archives / f"{self._name}-{version}"
        if not folder.exists():
            self._archives.mkdir(parents=True, exist_ok=True)
            incoming = Path(tempfile.mkdtemp(dir=self._archives, prefix=".")) / folder.name
            download(f"{self._name}=={version}", incoming)
            with suppress(OSError):  # the same release at the same time
                incoming.rename(folder)
            shutil.rmtree(incoming.parent, ignore_errors=True)
        return str(next(folder.iterdir()))

    def _versions(self) -> list[str]:
        """The index's versions, newest first. Raises :class:`~etude.taskgen.failures.SourceError`."""
        argv = [sys.executable, "-m", "pip", "index", "versions", self._name]
        try:
            done = run_pip(argv, timeout_s=INDEX_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SourceError(f"pip did not list the versions of {self._name} within {INDEX_TIMEOUT_S:g} s") from None
        output = done.stdout.decode(errors="replace")
        match = re.search(r"^Available versions: (.*)$", output, re.MULTILINE)
        if done.returncode != 0 or match is None:
            log = done.stderr.decode(errors="replace")
            raise SourceError(f"pip knows no versions of {self._name!r}: {log.strip()[-200:]}", log=log)
        return [version for version in match[1].split(", ") if RELEASE.fullmatch(version)]


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
