"""Upload of a working folder's files to a place below the run's URL, and download from there.

    files/            the definition of the run, for every process (:mod:`etude.run.working_folder`)
    evaluations/      ledgers of `etude eval`
    judge/0/          votes of a rollouts process's judge, what they cost, and why judging is paused
    sinks/            positions of the sinks

A place has sets of files, of which the newest is valid (:mod:`etude.run.stored_files`). Each disk stores the number of
its last set: a newer set comes from another machine, and the files that it changed replace the local ones. A database
is uploaded as a consistent snapshot, even while it is written to.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from etude.errors import RunFolderError
from etude.fsync import write_whole
from etude.run.folder import RunFolder
from etude.run.run_url import open_run_files
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import FileSet, StoredFile, stored_file

TRIES = 100
"""Attempts to upload a set of files after another process uploaded one."""
RECENT = 2
"""Sets retained at a place with one writer: a process may still read the previous one."""
DATABASE = ".db"
"""Suffix of SQLite databases, which have additional files."""
MOST_COPIED_BYTES = 1 << 20
"""Maximum bytes of a file that may be replaced during the upload: a report, a recipe, a judge's spending."""


@final
class KeptFiles:
    """The files at one place; does nothing for a run without a URL.

    Every method raises :class:`~etude.errors.InfrastructureError` when the storage fails.
    """

    def __init__(self, folder: RunFolder, place: str, outages: StoreOutages | None = None) -> None:
        self._folder = folder
        self._stored = open_run_files(folder, place, outages) if folder.url else None
        self._had = folder.path / f".{place.replace('/', '-')}.kept"
        """The file with the number of this disk's last set."""

    def bring(self) -> None:
        """Download the newest set, unless this disk has it; no process may have its files open.

        Raises :class:`~etude.errors.DamagedError` for an incomplete file.
        """
        if self._stored is None:
            return
        numbers, last = self._stored.numbers(), self.last()
        newest = max(numbers, default=0)
        if newest <= last:
            return
        before: FileSet = self._stored.read(last) if last in numbers else {}
        for path, file in self._stored.read(newest).items():
            target = self._folder.path / path
            if target.is_file() and (before.get(path) == file or stored_file(target) == file):
                continue  # no other machine changed it: this disk's is the same or newer
            if target.suffix == DATABASE:
                for beside in ("-wal", "-shm"):
                    target.with_name(target.name + beside).unlink(missing_ok=True)
            self._stored.fetch(path, file, self._folder.path)
        self.note(newest)

    def keep(self, *names: str, whole: bool = False, is_first: bool = False) -> None:
        """Upload the current files and folders ``names``.

        The other files of the newest set stay in it, even with concurrent uploads; a disk without them must still
        :meth:`bring` them. With ``whole``, ``names`` are the complete set and this is the only writer; older sets are
        then deleted. With ``is_first``, this raises :class:`~etude.errors.RunFolderError` unless it writes the
        place's first set.
        """
        if self._stored is None:
            return
        with TemporaryDirectory(prefix=".kept-", dir=self._folder.path) as scratch:
            still = {path: _still(self._folder.path / path, Path(scratch)) for path in _paths(self._folder.path, names)}
            fresh = {path: stored_file(file) for path, file in still.items()}
            for _ in range(TRIES):
                newest = max(self._stored.numbers(), default=0)
                if is_first and newest:
                    raise RunFolderError(
                        f"another machine created a run at {self._folder.url} meanwhile: continue it with "
                        f"--resume {self._folder.url}, or choose another place"
                    )
                before: FileSet = self._stored.read(newest) if newest else {}
                after = fresh if whole else {**before, **fresh}
                if after == before:
                    return
                for path in (path for path, file in fresh.items() if before.get(path) != file):
                    self._send(still[path], fresh[path])
                if self._stored.put(newest + 1, after):
                    if whole or self.last() == newest:
                        self.note(newest + 1)
                    if whole:
                        self._stored.remove(range(newest + 2 - RECENT))
                    return
        raise RunFolderError(
            f"{self._folder.url} was changed {TRIES} times meanwhile: other processes write to it without end"
        )

    def last(self) -> int:
        """The number of this disk's last set, 0 for none."""
        return int(self._had.read_text("ascii")) if self._had.is_file() else 0

    def note(self, number: int) -> None:
        """Record that this disk has the set ``number``, unless it has a newer one."""
        if number > self.last():
            write_whole(self._had, f"{number}\n".encode("ascii"))

    def _send(self, source: Path, file: StoredFile) -> None:
        assert self._stored is not None
        descriptor = os.open(source, os.O_RDONLY)
        try:
            self._stored.send(descriptor, file)
        finally:
            os.close(descriptor)


def _paths(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    """The existing files of some names, ``/``-separated."""
    for name in names:
        path = folder / name
        candidates = [path] if path.is_file() else path.rglob("*")
        yield from (one.relative_to(folder).as_posix() for one in candidates if one.is_file())


def _still(file: Path, scratch: Path) -> Path:
    """A snapshot of ``file``; a large file itself, since large files never change."""
    copy = scratch / f"{len(list(scratch.iterdir()))}"
    if file.suffix == DATABASE:
        uri = f"{file.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database, closing(sqlite3.connect(copy)) as target:
            database.backup(target)
        return copy
    if file.stat().st_size > MOST_COPIED_BYTES:
        return file
    shutil.copyfile(file, copy)
    return copy
