"""Sources of repositories: a folder, a git repository, a source distribution, or one on a package index.

Owns the conversion of each source to a plain folder with the project at its top. Archives cannot write outside the
folder; git runs without hooks. An archive from an index is fetched with the settings of this machine's pip
(:mod:`etude.taskgen.source_index`), and none of its programs runs.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from etude.taskgen.failures import SourceError
from etude.taskgen.indexes import run_pip
from etude.taskgen.scrubbing import clean_files, clone, copy_clean, read_repository

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
FETCH_TIMEOUT_S = 600.0
INDEX = "pypi:"
SOURCE_INDEX = (sys.executable, "-P", str(Path(__file__).with_name("source_index.py")))
"""The script that lists and fetches; with ``-P``, nothing is imported from its working folder."""
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")
ARCHIVE_BYTES = 512 << 20
"""Maximum unpacked size of an archive."""
ARCHIVE_MEMBERS = 100_000
"""Maximum files and folders in an archive."""
EXTENSION_BYTES = 1 << 20
"""Maximum size of the names and attributes of a member of a tar, which are read into memory."""
EXTENSIONS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
"""Types of the headers that announce them."""
TEXT_BYTES = 2 << 20
"""Maximum size of a source file; a larger file is not read."""
RECORD = "PKG-INFO"
"""File that describes a source distribution; it is read, but left out of every copy."""


def fetch(reference: str, folder: Path) -> Path:
    """Fetch a repository into the new folder ``folder``; return the folder of its project.

    ``reference`` is a folder, the path or URL of a git repository, an archive, or ``pypi:NAME==VERSION``.
    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    folder.mkdir(parents=True)
    if reference.startswith(INDEX):
        if not PINNED.fullmatch(requirement := reference.removeprefix(INDEX)):
            raise SourceError(f"{requirement!r} is not pinned: write {INDEX}NAME==VERSION")
        name, _, version = requirement.partition("==")
        return _unpack(download(name, [version], folder / "download")[version], folder / "tree")
    path = Path(reference)
    if path.is_file() and reference.endswith(ARCHIVES):
        return _unpack(path, folder / "tree")
    if path.is_dir() and not (path / "HEAD").is_file():
        copy_clean(path, folder / "tree", {})
        return folder / "tree"
    if path.is_dir():  # a bare repository
        archive = (folder / "head.tar").absolute()
        read_repository(path, "archive", "--format=tar", f"--output={archive}", "HEAD")
        _unpack(archive, folder / "tree")
        return folder / "tree"
    if re.match(r"(git\+)?(https?|ssh|git|file)://|[\w.-]+@[\w.-]+:", reference):
        url = reference.removeprefix("git+")
        clone(url, folder / "tree", timeout_s=FETCH_TIMEOUT_S)
        return folder / "tree"
    raise SourceError(
        f"{reference!r} is not a folder, git URL or archive ({', '.join(ARCHIVES)}) here; an index: pypi:NAME==VERSION"
    )


def read_texts(tree: Path) -> Mapping[str, str]:
    """Every text file below ``tree``, by its path, without leftovers except the top-level record.

    Links are not followed: they may point to files of this machine.
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


def versions_of(name: str) -> list[str]:
    """The versions whose source is on an index, newest first.

    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    versions, log = _ask_index("list", name)
    if not versions:
        raise SourceError(f"no index of pip's has a source distribution of {name!r}: {log[-200:]}", log=log)
    return versions


def download(name: str, versions: Sequence[str], folder: Path) -> dict[str, Path]:
    """Fetch source distributions from an index, each into ``folder/VERSION``; return version → archive.

    Raises :class:`~etude.taskgen.failures.SourceError`, with the reasons, if a version is unavailable; the other
    requested versions are then in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _, log = _ask_index("fetch", name, str(folder), *versions)
    archives = {version: next((folder / version).glob("*"), None) for version in versions}
    matches = {version: archive for version, archive in archives.items() if archive is not None}
    if len(matches) < len(archives):
        missing = ", ".join(version for version in archives if version not in matches)
        last = log.splitlines()[-1] if log else "nothing came"
        raise SourceError(f"the source of {name} {missing} could not be fetched: {last}", log=log)
    return matches


def _ask_index(verb: str, name: str, *arguments: str) -> tuple[list[str], str]:
    """The lines of the script's standard output, and its standard error."""
    try:
        done = run_pip([*SOURCE_INDEX, verb, name, *arguments], timeout_s=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SourceError(f"the index did not {verb} {name} within {FETCH_TIMEOUT_S:g} s") from None
    return done.stdout.decode(errors="replace").split(), done.stderr.decode(errors="replace").strip()


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive and return the project's folder: the only top-level folder, if there is just one entry."""
    folder.mkdir()
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(archive) as zipped:
                _check_size(archive, (member.file_size for member in zipped.infolist()))
                zipped.extractall(folder)
        else:
            with tarfile.open(archive, tarinfo=_Header) as packed:
                _check_size(archive, (member.size for member in packed))
                packed.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise SourceError(f"{archive} cannot be unpacked: {error}") from error
    inner = list(folder.iterdir())
    return inner[0] if len(inner) == 1 and inner[0].is_dir() else folder


class _Header(tarfile.TarInfo):
    """The header of a member; raises ``tarfile.ReadError`` for names or attributes beyond the limit."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in EXTENSIONS and header.size > EXTENSION_BYTES:
            raise tarfile.ReadError(f"a name or an attribute of {header.size} bytes")
        return header


def _check_size(archive: Path, sizes: Iterable[int]) -> None:
    """Read the members' sizes; raise an error at the first one beyond the limits."""
    size_bytes = 0
    for number, member_bytes in enumerate(sizes, start=1):
        size_bytes += member_bytes
        if size_bytes > ARCHIVE_BYTES or number > ARCHIVE_MEMBERS:
            raise SourceError(f"{archive} unpacks to more than {ARCHIVE_BYTES} bytes or {ARCHIVE_MEMBERS} members")


def remove(folder: Path) -> None:
    """Remove a folder that :func:`fetch` created, even if its folders are read-only."""
    for inner, folders, _ in os.walk(folder):
        for name in folders:
            if not (Path(inner) / name).is_symlink():
                (Path(inner) / name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
