"""Files of a working folder that are kept at a place below the URL of its run, and brought from there.

    files/            what makes the run what it is; every process has them (:mod:`etude.run.working_folder`)
    evaluations/      ledgers of `etude eval`
    judge/0/          votes of a rollouts process's judge, what they cost, and why judging is paused

A place has sets of files, of which the newest counts (:mod:`etude.run.stored_files`). A disk remembers the number of
the set that it had last: where there is a newer one, another machine put it, and its files replace those here. A
database is kept as it is at one moment, also while it is written to.
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
from etude.run.folder import RunFolder
from etude.run.run_url import open_run_files
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import FileSet, StoredFile, stored_file

TRIES = 100
"""Times that a set of files is put anew because another process put one."""
RECENT = 2
"""Sets of a place with one writer that stay: somebody may be reading the one before."""
DATABASE = ".db"
"""Suffix of SQLite's files, which have others beside them."""
MOST_COPIED_BYTES = 1 << 20
"""Bytes of a file that may be replaced while it is kept: a report, a recipe, what a judge has spent."""


@final
class KeptFiles:
    """The files at one place; does nothing for a run without a URL.

    Every method raises :class:`~etude.errors.InfrastructureError` when the storage does not do its part.
    """

    def __init__(self, folder: RunFolder, place: str, outages: StoreOutages | None = None) -> None:
        self._folder = folder
        self._stored = open_run_files(folder, place, outages) if folder.url else None
        self._had = folder.path / f".{place.replace('/', '-')}.kept"
        """The file with the number of the set that this disk had last."""

    def bring(self) -> None:
        """Fetch the newest set, unless this disk had it; nobody may have its files open.

        Raises :class:`~etude.errors.DamagedError` for a file that is not whole.
        """
        if self._stored is None:
            return
        newest = max(self._stored.numbers(), default=0)
        if newest <= self._last():
            return
        for path, file in self._stored.read(newest).items():
            target = self._folder.path / path
            if target.suffix == DATABASE:
                for beside in ("-wal", "-shm"):
                    target.with_name(target.name + beside).unlink(missing_ok=True)
            if not target.is_file() or stored_file(target) != file:
                self._stored.fetch(path, file, self._folder.path)
        self._note(newest)

    def keep(self, *names: str, whole: bool = False) -> None:
        """Keep files of the folder, and those below folders, as they are now.

        The other files of the newest set stay in it, whoever else keeps some at the same time; a disk that has not had
        them is still to :meth:`bring` them. With ``whole`` these are all, and this is the only process that keeps any
        there: then older sets go.
        """
        if self._stored is None:
            return
        with TemporaryDirectory(prefix=".kept-", dir=self._folder.path) as scratch:
            still = {path: _still(self._folder.path / path, Path(scratch)) for path in _paths(self._folder.path, names)}
            fresh = {path: stored_file(file) for path, file in still.items()}
            for _ in range(TRIES):
                newest = max(self._stored.numbers(), default=0)
                before: FileSet = self._stored.read(newest) if newest else {}
                after = fresh if whole else {**before, **fresh}
                if after == before:
                    return
                for path in (path for path, file in fresh.items() if before.get(path) != file):
                    self._send(still[path], fresh[path])
                if self._stored.put(newest + 1, after):
                    if whole or self._last() == newest:
                        self._note(newest + 1)
                    if whole:
                        self._stored.remove(range(newest + 2 - RECENT))
                    return
        raise RunFolderError(
            f"{self._folder.url} was changed {TRIES} times meanwhile: other processes write to it without end"
        )

    def _send(self, source: Path, file: StoredFile) -> None:
        assert self._stored is not None
        descriptor = os.open(source, os.O_RDONLY)
        try:
            self._stored.send(descriptor, file)
        finally:
            os.close(descriptor)

    def _last(self) -> int:
        """The number of the set that this disk had last, 0 for none."""
        return int(self._had.read_text("ascii")) if self._had.is_file() else 0

    def _note(self, number: int) -> None:
        with TemporaryDirectory(prefix=".kept-", dir=self._folder.path) as own:
            fresh = Path(own) / "number"
            fresh.write_text(f"{number}\n", encoding="ascii")
            fresh.replace(self._had)


def _paths(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    """The files of some names that are there, ``/``-separated."""
    for name in names:
        path = folder / name
        candidates = [path] if path.is_file() else path.rglob("*")
        yield from (one.relative_to(folder).as_posix() for one in candidates if one.is_file())


def _still(file: Path, scratch: Path) -> Path:
    """A file with the bytes that ``file`` has at one moment: itself where it is large, since those never change."""
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
