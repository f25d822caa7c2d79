"""Durable checkpoints and phase models: written to the disk, then copied to the URL of a run, so that the run can
continue after the loss of a disk.

    trainer    save n ──▶ publish n ┄┄ claim batch n + 1, forward, backward ┄┄▶ finish ──▶ save n + k
    copies       └──────▶ written? ──▶ send the files, put the manifest ──▶ durable ─┘

A checkpoint becomes durable during the next steps; the trainer decides what waits for that. Mid-training and SFT copy
their checkpoints in the same way, and wait for a copy before they save again. Each copied folder has its place below
the URL, by the name that it has in the run folder: ``checkpoints``, ``phases/sft/model``.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import final

from etude.closing import Closing
from etude.errors import DamagedError
from etude.run.folder import RunFolder
from etude.run.phase_folders import place as place_folder
from etude.run.run_url import open_run_files
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import StoredFile, StoredFiles, stored_file
from etude.trainer.checkpoint import KEEP, MANIFEST

MEANWHILE_S = 1.0
"""Interval of other work during a wait for a copy."""
CHECKPOINTS = "checkpoints"
"""The trainer's checkpoints: their place below the URL and in the run folder, and the name of their sets."""
ONLY = 1
"""Number of the only set at a model's place."""


@final
class CheckpointCopies(Closing):
    """Makes one checkpoint at a time durable, on a separate thread; without a URL, a checkpoint on the
    disk is durable.
    """

    def __init__(self, folder: RunFolder, outages: StoreOutages, place: str = CHECKPOINTS) -> None:
        self._checkpoints = folder.path / place
        self._stored = open_run_files(folder, place, outages) if folder.url else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint copies")
        self._step = 0
        self._copy: Future[None] | None = None
        self.restorable = 0
        """The newest step with a durable checkpoint; 0: none yet."""

    def close(self) -> None:
        """Wait for the copy in progress."""
        self._thread.shutdown()

    def start(self, step: int, written: Future[None] | None = None) -> None:
        """Start to make the checkpoint of ``step`` durable; it is on the disk once ``written`` is done. It must stay in
        the folder until the copy is complete.
        """
        assert self._copy is None, "one checkpoint at a time: finish the one before first"
        self._step = step
        self._copy = self._thread.submit(self._copy_written, step, written)

    @property
    def is_complete(self) -> bool:
        """True if :meth:`finish` would return at once."""
        return self._copy is None or self._copy.done()

    def wait(self) -> None:
        """Wait until the copy in progress is complete, on any thread. Raises the copy's error."""
        if (copy := self._copy) is not None:
            copy.result()

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until the copy in progress is complete; ``meanwhile`` is called at intervals.

        Raises the copy's error.
        """
        if self._copy is None:
            return
        while not wait([self._copy], MEANWHILE_S).done:
            meanwhile()
        copy, self._copy = self._copy, None
        copy.result()
        self.restorable = self._step

    def _copy_written(self, step: int, written: Future[None] | None) -> None:
        if written is not None:
            written.result()
        if self._stored is not None:
            _send(self._stored, step, _Opened(checkpoint_path(self._checkpoints, step)))


@final
class _Opened(Closing):
    """The open files of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        manifest = json.loads((path / MANIFEST).read_bytes())["files"]
        self.files: dict[str, StoredFile] = {}
        self.descriptors: dict[str, int] = {}
        for name in (*manifest, MANIFEST):
            descriptor = os.open(path / name, os.O_RDONLY)
            self._stack.callback(os.close, descriptor)
            self.descriptors[name] = descriptor
            size_bytes = os.fstat(descriptor).st_size
            digest = manifest.get(name)  # the digest computed during the save
            self.files[name] = (
                stored_file(path / name) if digest is None else StoredFile(sha256=digest, size_bytes=size_bytes)
            )

    def close(self) -> None:
        """Close them."""
        self._stack.close()


def _send(stored: StoredFiles, step: int, opened: _Opened) -> None:
    with opened:
        for name, file in opened.files.items():
            stored.send(opened.descriptors[name], file)
    if not stored.put(step, opened.files):
        raise DamagedError(
            f"the copy of checkpoint {step} has other bytes than this one: another trainer saved that step, so this "
            f"one stops"
        )
    stored.remove(_outdated(stored.numbers(), step))


def _outdated(numbers: Iterable[int], step: int) -> list[int]:
    """The copies that are obsolete once that of ``step`` exists."""
    return sorted(number for number in numbers if number <= step)[:-KEEP]


def restore_checkpoint(folder: RunFolder, place: str = CHECKPOINTS) -> None:
    """Fetch the newest copy of a run's checkpoints, unless this disk has it or a newer one.

    Raises :class:`~etude.errors.DamagedError` for an incomplete copy.
    """
    if not folder.url:
        return
    stored, checkpoints = open_run_files(folder, place), folder.path / place
    newest = max(stored.numbers(), default=0)
    if newest > max(_local_steps(checkpoints), default=0):
        _restore(stored, newest, checkpoint_path(checkpoints, newest))


def copy_model(folder: RunFolder, place: str, outages: StoreOutages) -> None:
    """Copy an immutable folder, such as the model of a phase; does nothing if it is copied already or the run has no
    URL.

    Raises :class:`~etude.errors.DamagedError` if the copy is of another model.
    """
    if not folder.url:
        return
    stored, path = open_run_files(folder, place, outages), folder.path / place
    files = {one.relative_to(path).as_posix(): stored_file(one) for one in path.rglob("*") if one.is_file()}
    for name, file in files.items():
        with (path / name).open("rb") as stream:
            stored.send(stream.fileno(), file)
    if not stored.put(ONLY, files):
        raise DamagedError(f"the copy of {path} at {folder.url}/{place} is of another model: another process made it")


def restore_model(folder: RunFolder, place: str) -> None:
    """Fetch a copied folder, unless this disk has it. Raises as :func:`restore_checkpoint` does."""
    if folder.url and not (folder.path / place).exists():
        stored = open_run_files(folder, place)
        if stored.numbers():
            _restore(stored, ONLY, folder.path / place)


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """The folder of a checkpoint (:class:`~etude.trainer.checkpoint.Checkpoints`)."""
    return checkpoints / f"step-{step:08d}"


def _restore(stored: StoredFiles, number: int, target: Path) -> None:
    files: Mapping[str, StoredFile] = stored.read(number)

    def fill(partial: Path) -> None:
        for name, file in files.items():
            stored.fetch(name, file, partial)

    place_folder(target, fill)


def _local_steps(checkpoints: Path) -> list[int]:
    names = (path.name.removeprefix("step-") for path in checkpoints.glob("step-*"))
    return [int(name) for name in names if name.isdecimal()]
