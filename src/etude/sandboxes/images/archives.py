"""Reading, checking and writing of untrusted tar archives in memory. Pure.

Owns the valid contents of an archive: files, folders and symbolic links, with unique names that stay below the target
folder and lead through no link. :mod:`etude.sandboxes.folders` and the providers own the sources and targets of the
files.
"""

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

EXPORT_LIMIT_BYTES = 64 << 20
"""Default limit of an archive's size."""
MAX_ENTRIES = 200_000
"""Maximum number of entries of one archive: several times the files of a large repository."""
NAME_LIMIT_BYTES, PART_LIMIT_BYTES = 4096, 255
"""Maximum length of a path and of one of its parts, as in Linux."""
PERMISSIONS = 0o777
"""Bits of a mode that are preserved; set-user-ID and set-group-ID are not."""
MTIME_END_S = 1 << 33
"""First date that is rejected, in the year 2242: tar stores earlier ones as numbers, and all file systems have them."""
BLOCK_BYTES = 512
"""Unit of a tar."""


class EntryKind(StrEnum):
    """A kind of entry in an archive."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, folder or symbolic link of an archive."""

    name: str
    """Relative, without ``.`` and ``..``."""
    kind: EntryKind
    mode: int = 0o644
    """Permissions alone."""
    data: bytes = b""
    """Content of a file."""
    target: str = ""
    """Target of a link, unchanged; it may lead anywhere."""
    mtime_s: int = 0


class ByteBudget:
    """The number of bytes that may still be read from files for one archive."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.left_bytes = limit_bytes

    def take(self, name: str, data: bytes) -> bytes:
        """Count the bytes of a file, and return them. ``ValueError`` if they exceed the budget."""
        if len(data) > self.left_bytes:
            raise too_much(name, self._limit_bytes)
        self.left_bytes -= len(data)
        return data


def read_archive(tar: bytes) -> tuple[Entry, ...]:
    """The entries of an uncompressed tar, in its order; ``ValueError`` unless all can be unpacked.

    A name must be relative and without ``..``, occur once (except for folders), and have only folders above it. Hard
    links, devices, pipes, sparse files, impossible dates and truncated archives are rejected.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            entries = _entries(archive, tar)
    except (tarfile.TarError, EOFError, OSError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a tar: {error}") from error
    return entries


def write_archive(entries: Iterable[Entry], limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
    """Write ``entries`` to an uncompressed tar, only the first of each name. ``ValueError`` beyond ``limit_bytes``."""
    file, names = io.BytesIO(), set[str]()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            if entry.name in names:
                continue
            names.add(entry.name)
            archive.addfile(_header(entry), io.BytesIO(entry.data))
            if file.tell() > limit_bytes:
                raise too_much(entry.name, limit_bytes)
    return file.getvalue()


def plain_name(path: str) -> str:
    """Normalise a relative path (``./a//b/`` is ``a/b``); empty for the folder itself.

    ``ValueError`` for one that does not stay below the folder, or is too long for Linux.
    """
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} does not stay inside the sandbox: use a relative path without '..'")
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if sizes and (max(sizes) > PART_LIMIT_BYTES or sum(sizes) + len(sizes) > NAME_LIMIT_BYTES):
        raise ValueError(f"{path[:60]!r}… is not a path in a sandbox: it has {sum(sizes)} bytes")
    return "/".join(parts)


def too_much(name: str, limit_bytes: int) -> ValueError:
    """The error for an archive that exceeds its limit, naming the entry at which it does."""
    return ValueError(f"more than {limit_bytes} bytes, at {name!r}: ask for fewer files, or raise limit_bytes")


def check_date(member: tarfile.TarInfo) -> None:
    """Raise ``ValueError`` for a date that no file can have: pax headers may contain any number."""
    if not 0 <= member.mtime < MTIME_END_S:  # also true for NaN
        raise ValueError(
            f"{member.name!r} in the archive has the date {member.mtime} s, no file's: "
            f"use one from 0 to {MTIME_END_S - 1} s after 1970"
        )


def _entries(archive: tarfile.TarFile, tar: bytes) -> tuple[Entry, ...]:
    entries: dict[str, Entry] = {}
    end = 0
    for member in archive:
        end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES if member.isreg() else archive.offset
        entry = _entry(member, tar)
        if not entry.name:
            continue  # the folder itself
        earlier = entries.setdefault(entry.name, entry)
        if earlier is not entry and not earlier.kind is entry.kind is EntryKind.FOLDER:
            raise ValueError(f"the archive has {entry.name!r} twice")
        if len(entries) > MAX_ENTRIES:
            raise ValueError(f"the archive has more than {MAX_ENTRIES} entries")
    rest = tar[end:]
    if len(rest) < 2 * BLOCK_BYTES or rest.strip(b"\0"):
        raise ValueError(f"the archive is cut short, or damaged, after {end} bytes")
    for entry in entries.values():
        for parent in map(str, PurePosixPath(entry.name).parents):
            if parent in entries and entries[parent].kind is not EntryKind.FOLDER:
                raise ValueError(f"{entry.name!r} would be written through the {entries[parent].kind} {parent!r}")
    return tuple(entries.values())


def _header(entry: Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.mode, info.mtime = entry.mode & PERMISSIONS, entry.mtime_s
    if entry.kind is EntryKind.FILE:
        info.size = len(entry.data)
    else:
        info.type = tarfile.DIRTYPE if entry.kind is EntryKind.FOLDER else tarfile.SYMTYPE
        info.linkname = entry.target
    return info


def _entry(member: tarfile.TarInfo, tar: bytes) -> Entry:
    name = plain_name(member.name)
    check_date(member)
    mode, mtime_s = member.mode & PERMISSIONS, int(member.mtime)
    if member.isdir():
        return Entry(name=name, kind=EntryKind.FOLDER, mode=mode, mtime_s=mtime_s)
    if not name:
        raise ValueError(f"{member.name!r} in the archive is not a valid file name")
    if member.issym():
        if not member.linkname or "\0" in member.linkname:
            raise ValueError(f"the link {name!r} leads nowhere")
        return Entry(name=name, kind=EntryKind.LINK, target=member.linkname, mtime_s=mtime_s)
    if not member.isreg() or member.issparse():
        raise ValueError(f"{name!r} is not a file, folder or symbolic link (tar type {member.type!r})")
    data = tar[member.offset_data : member.offset_data + member.size]
    if len(data) != member.size:
        raise ValueError(f"the archive is cut short in {name!r}")
    return Entry(name=name, kind=EntryKind.FILE, mode=mode, data=data, mtime_s=mtime_s)
