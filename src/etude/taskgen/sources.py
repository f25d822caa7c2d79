"""Sources of repositories: a folder, a git repository, a source distribution, or one on a package index.

Owns the way to a plain folder with the project at its top. Archives are unpacked without leaving the folder; git runs
without hooks. ``pip`` fetches from indexes with this machine's settings; note that pip asks the package's own build
program for its metadata, so do not fetch by name what you would not install: fetch the file and give its path. That
program is told nobody's keys but those of the indexes.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from etude.taskgen.failures import SourceError
from etude.taskgen.indexes import run_pip
from etude.taskgen.scrubbing import clean_files, clone, copy_clean

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
FETCH_TIMEOUT_S = 600.0
INDEX = "pypi:"
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")
ARCHIVE_BYTES = 512 << 20
"""The most that an archive may unpack to."""
TEXT_BYTES = 2 << 20
"""A larger file is no source."""
RECORD = "PKG-INFO"
"""File in which a source distribution describes itself; read, though it is left out of every copy."""


def fetch(reference: str, folder: Path) -> Path:
    """Fetch a repository into the new folder ``folder``; returns the folder of its project.

    ``reference`` is a folder, the path or URL of a git repository, an archive, or ``pypi:NAME==VERSION``.
    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    folder.mkdir(parents=True)
    if reference.startswith(INDEX):
        return _unpack(download(reference.removeprefix(INDEX), folder / "download"), folder / "tree")
    path = Path(reference)
    if path.is_file() and reference.endswith(ARCHIVES):
        return _unpack(path, folder / "tree")
    if path.is_dir() and not (path / "HEAD").is_file():
        copy_clean(path, folder / "tree", {})
        return folder / "tree"
    if path.is_dir() or re.match(r"(git\+)?(https?|ssh|git|file)://|[\w.-]+@[\w.-]+:", reference):
        url = reference.removeprefix("git+")
        clone(url, folder / "tree", timeout_s=FETCH_TIMEOUT_S)
        return folder / "tree"
    raise SourceError(
        f"{reference!r} is no folder, git URL or archive ({', '.join(ARCHIVES)}) here; an index: pypi:NAME==VERSION"
    )


def read_texts(tree: Path) -> Mapping[str, str]:
    """Every file below ``tree`` that is text, by its path, leftovers not counted but for the record at the top.

    No link is followed: it may lead to a file of this machine.
    """
    texts: dict[str, str] = {}
    for path in clean_files(tree):
        if (tree / path).stat().st_size <= TEXT_BYTES:
            try:
                texts[path] = (tree / path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
    record = tree / RECORD
    if not record.is_symlink() and record.is_file() and record.stat().st_size <= TEXT_BYTES:
        texts.setdefault(RECORD, record.read_text(encoding="utf-8", errors="replace"))
    return texts


def download(requirement: str, folder: Path) -> Path:
    """Fetch the source distribution of ``NAME==VERSION`` from an index into a folder.

    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    if not PINNED.fullmatch(requirement):
        raise SourceError(f"{requirement!r} is not pinned: write {INDEX}NAME==VERSION")
    name = requirement.partition("==")[0]
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "-d", str(folder)]
    try:
        done = run_pip([*argv, requirement], timeout_s=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SourceError(f"pip did not fetch {requirement} within {FETCH_TIMEOUT_S:g} s") from None
    matches = sorted(folder.glob("*")) if folder.is_dir() else []
    if done.returncode != 0 or not matches:
        output = done.stderr.decode(errors="replace").strip()
        last = output.splitlines()[-1] if output else "no file came"
        raise SourceError(f"pip could not fetch the source of {requirement}: {last}", log=output)
    return matches[0]


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive; a single folder at its top is the project."""
    folder.mkdir()
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(archive) as zipped:
                _check_size(archive, sum(member.file_size for member in zipped.infolist()))
                zipped.extractall(folder)
        else:
            with tarfile.open(archive) as packed:
                _check_size(archive, sum(member.size for member in packed))
                packed.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise SourceError(f"{archive} cannot be unpacked: {error}") from error
    inner = list(folder.iterdir())
    return inner[0] if len(inner) == 1 and inner[0].is_dir() else folder


def _check_size(archive: Path, size_bytes: int) -> None:
    if size_bytes > ARCHIVE_BYTES:
        raise SourceError(f"{archive} unpacks to {size_bytes} bytes, at most {ARCHIVE_BYTES}")


def remove(folder: Path) -> None:
    """Remove a folder that :func:`fetch` made, whatever it holds."""
    for inner, folders, _ in os.walk(folder):
        for name in folders:
            if not (Path(inner) / name).is_symlink():
                (Path(inner) / name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
