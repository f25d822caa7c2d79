"""Copies of a recipe's data at the URL of its run, so that only the machine that starts it must have them.

    tasks.folder = "tasks/mine" ──pack──▶ URL/data ──▶ data/3f9a…/mine in the working folder of its users

Data sets, task folders, conversations, texts and a model folder are copied once, when the run is made, and are named by
their digest: ``run.toml`` says ``@data/3f9a…/mine``. A folder is packed into one tar, which preserves execute
permissions and internal links. A process fetches the data that it needs when it starts: rollouts need tasks, engines
nothing.

Data above a size limit, and files that belong to a machine, are not copied: each machine must have them at the same
path, and a process that does not find them reports an error.
"""

import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etude.config.data_paths import DATA, LIMIT_GIB, MIXTURE, change_data, data_of
from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.errors import ConfigError, DamagedError
from etude.run.folder import RunFolder, exclusive
from etude.run.phase_folders import place
from etude.run.resolve import machine_paths
from etude.run.run_url import open_stored
from etude.run.stored_files import StoredFile, stored_file

GIB = 1 << 30
TELL_S = 5.0
"""Interval of progress messages."""
TAR = ".tar"
"""Suffix of a folder's copy."""
DIGITS = 12
"""Hexadecimal digits of a copy's SHA-256 in its path."""
FETCH_S = 3600.0
"""Longest wait for another process of this machine that fetches the same data."""

Tell = Callable[[str], None]
"""Receives progress messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """Data named by a recipe."""

    key: str
    path: Path
    files: int
    size_bytes: int

    def __str__(self) -> str:
        """The description for messages."""
        files = f"{self.files:,} files, " if self.files > 1 else ""
        return f"{self.key} = {str(self.path)!r} ({files}{formatting.size(self.size_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """The data of a recipe to copy, and the data that each machine must have."""

    copied: tuple[DataPath, ...] = ()
    left: tuple[DataPath, ...] = ()
    """Data above the limit."""
    own: tuple[tuple[str, str], ...] = ()
    """Key and path of files that belong to a machine."""

    def describe(self) -> Iterator[str]:
        """Yield a line for each item."""
        yield from (f"copied: {data}" for data in self.copied)
        yield from (f"too large to be copied (--copy-limit), every machine must have it: {data}" for data in self.left)
        yield from (f"every machine that needs it must have it: {key} = {path!r}" for key, path in self.own)


def plan_data(config: RunConfig, limit_gib: float = LIMIT_GIB) -> DataPlan:
    """Inspect the data that a recipe names, on this machine, without copying.

    Raises :class:`~etude.errors.ConfigError` for data that is missing or cannot be copied.
    """
    every = []
    for key, path in dict.fromkeys(data_of(config.model_dump(mode="json"))):
        if key != MIXTURE or config.midtrain.tokens:
            every.append(_measured(key, Path(path).absolute()))
    return DataPlan(
        copied=tuple(data for data in every if data.size_bytes <= limit_gib * GIB),
        left=tuple(data for data in every if data.size_bytes > limit_gib * GIB),
        own=tuple(machine_paths(config)),
    )


def send_data(url: str, config: RunConfig, plan: DataPlan, folder: Path, tell: Tell = lambda line: None) -> RunConfig:
    """Copy data to the URL of a run; returns the recipe with the future paths in its working ``folder``.

    Raises :class:`~etude.errors.ConfigError` for unreadable data.
    """
    for line in plan.describe():
        tell(line)
    stored, names = open_stored(url, DATA), dict[tuple[str, str], str]()
    folder.parent.mkdir(parents=True, exist_ok=True)
    files: dict[str, StoredFile] = {}
    for data in plan.copied:
        with TemporaryDirectory(prefix=".data-", dir=folder.parent) as scratch:
            source = _packed(data, Path(scratch)) if data.path.is_dir() else data.path
            file = stored_file(source)
            name = f"{file.sha256[:DIGITS]}/{data.path.name}"
            files[name + (TAR if data.path.is_dir() else "")] = file
            with source.open("rb") as stream:
                stored.send(stream.fileno(), file, _Progress(data.key, file.size_bytes, tell))
        names[data.key, str(data.path)] = str(folder.absolute() / DATA / name)
    if files:
        newest = max(stored.numbers(), default=0)
        if not stored.put(newest + 1, files):
            raise ConfigError(f"{url}/{DATA}: another run is being made at this URL: choose another place")
    return _renamed(config, names)


def bring_data(folder: RunFolder, *sections: str) -> None:
    """Fetch the data that some sections of a run's recipe name, unless this disk has them; does nothing for a run
    without a URL.

    Raises :class:`~etude.errors.ConfigError` for data that was neither copied nor is on this machine, and
    :class:`~etude.errors.DamagedError` for an incomplete copy.
    """
    if not folder.url:
        return
    config = folder.config()
    data = [(key, Path(path)) for key, path in data_of(config.model_dump(mode="json"))]
    with exclusive(folder, "data", wait_s=FETCH_S):
        for key, path in data:
            is_needed = key.split(".")[0] in sections and (key != MIXTURE or config.midtrain.tokens)
            if path.exists() or not is_needed:
                continue
            if not path.is_relative_to(folder.path.absolute() / DATA):
                raise ConfigError(
                    f"{key} = {str(path)!r} is not on this machine, and was too large to be copied to {folder.url}: "
                    f"put it there, or start another run with a larger --copy-limit"
                )
            _fetch(folder, key, path)


def _fetch(folder: RunFolder, key: str, path: Path) -> None:
    stored, data = open_stored(folder.url, DATA), folder.path.absolute() / DATA
    files = stored.read(max(stored.numbers(), default=1))
    name = path.relative_to(data).as_posix()
    data.mkdir(exist_ok=True)
    if name in files:
        stored.fetch(name, files[name], data)
        return
    packed = name + TAR
    if packed not in files:
        raise DamagedError(f"{key}: {folder.url}/{DATA} has no {name!r}: restore it from a copy")
    with TemporaryDirectory(prefix=".tar-", dir=data) as scratch:
        stored.fetch(packed, files[packed], Path(scratch))

        def fill(partial: Path) -> None:
            try:
                with tarfile.open(Path(scratch) / packed) as tar:
                    tar.extractall(partial, filter="data")
            except (tarfile.TarError, OSError) as error:
                raise DamagedError(f"{key}: {folder.url}/{DATA}/{packed} cannot be unpacked: {error}") from error

        place(path, fill)


def _measured(key: str, path: Path) -> DataPath:
    if path.is_file():
        return DataPath(key=key, path=path, files=1, size_bytes=path.stat().st_size)
    if not path.is_dir():
        raise ConfigError(f"{key}: there is no {str(path)!r} on this machine: correct the path, or leave it out")
    sizes = [file.stat().st_size for _, file in _members(key, path) if stat.S_ISREG(file.lstat().st_mode)]
    return DataPath(key=key, path=path, files=len(sizes), size_bytes=sum(sizes))


def _members(key: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """The members of a folder: a name below it, and the file or folder with the content. Links that lead out of it, as
    in a model cache, are followed; internal links are preserved.

    Raises :class:`~etude.errors.ConfigError` for what cannot be copied.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            text = path.readlink()
            inside = os.path.normpath(path.parent / text).startswith(f"{folder}{os.sep}")
            if not text.is_absolute() and inside:
                yield name, path
            elif path.is_file():
                yield name, path.resolve()
            else:
                raise ConfigError(f"{key}: the link {path} points outside of the folder, to no file: remove it")
        elif path.is_file() or path.is_dir():
            yield name, path
        else:
            raise ConfigError(f"{key}: {path} is not a file, folder or link and cannot be copied: remove it")


def _packed(data: DataPath, scratch: Path) -> Path:
    """Pack a folder into a tar that is identical for equal contents."""
    packed = scratch / f"folder{TAR}"

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        return member

    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in _members(data.key, data.path):
            tar.add(file, name, recursive=False, filter=anonymous)
    return packed


def _renamed(config: RunConfig, names: dict[tuple[str, str], str]) -> RunConfig:
    tree: dict[str, Any] = config.model_dump(mode="json")
    change_data(tree, lambda key, path: names.get((key, str(Path(path).absolute())), path))
    return parse_config(tree, source="run.toml")


@dataclass(slots=True)
class _Progress:
    """Reports the progress of a copy at intervals."""

    key: str
    size_bytes: int
    tell: Tell
    sent_bytes: int = 0
    told_s: float = field(default_factory=time.monotonic)

    def __call__(self, part_bytes: int) -> None:
        """Count a part."""
        self.sent_bytes += part_bytes
        if time.monotonic() - self.told_s >= TELL_S:
            self.told_s = time.monotonic()
            of = f"{formatting.size(self.sent_bytes)} of {formatting.size(self.size_bytes)}"
            self.tell(f"{self.key}: {of}")
