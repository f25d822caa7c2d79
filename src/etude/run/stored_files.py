"""Sets of files in an object store, each under a number: a manifest, and the files by their digest.

    manifests/00000012.json       {"files": {"model/config.json": {"sha256": "3f9a…", "size_bytes": 812}, …}, …}
    parts/3f9a…c2/00000           a file in parts of 32 MiB, the last one shorter

A manifest is written after all its files, so a reader finds a complete set or none. Its content is not trusted: paths
must be inside the target folder, and each file must have the size and digest of the manifest. With a key, manifests are
signed and unsigned ones are damaged, like weight records (:mod:`etude.weights.log`).

This module owns the format, upload and download. Callers define the sets and when to transfer them.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import final
from uuid import uuid4

from etude.errors import DamagedError, RunFolderError
from etude.fsync import sync
from etude.objects import Objects
from etude.storage import free_bytes

MANIFESTS, PARTS = "manifests", "parts"
"""Folders of a set's objects."""
PART_BYTES = 32 << 20
"""Bytes of a part: small enough that :data:`AT_A_TIME` parts fit into memory, large enough for efficient requests."""
AT_A_TIME = 4
"""Concurrent transfers of parts of a file."""
MOST_BYTES = 1 << 50
"""Maximum size of a file."""
_DIGEST_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The bytes of a file, by digest and size."""

    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an invalid digest or size."""
        digits = self.sha256 if isinstance(self.sha256, str) else ""
        if len(digits) != _DIGEST_DIGITS or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"sha256 = {self.sha256!r} is not a SHA-256")
        if type(self.size_bytes) is not int or not 0 <= self.size_bytes <= MOST_BYTES:
            raise ValueError(f"size_bytes = {self.size_bytes!r} is not a size of a file")

    @property
    def part_sizes(self) -> list[int]:
        """Bytes of each of its parts."""
        return [min(PART_BYTES, self.size_bytes - start) for start in range(0, self.size_bytes, PART_BYTES)]

    def key(self, part: int) -> str:
        """Key of one of its parts."""
        return f"{PARTS}/{self.sha256}/{part:05d}"


FileSet = Mapping[str, StoredFile]
"""Path below the folder, ``/``-separated → the file."""


def stored_file(path: Path) -> StoredFile:
    """Digest and size of a file on disk."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return StoredFile(sha256=digest, size_bytes=path.stat().st_size)


@final
class StoredFiles:
    """The sets of files at one place. ``name`` identifies them and ``key`` signs them.

    Every method raises :class:`~etude.errors.InfrastructureError` when the storage fails.
    """

    def __init__(self, objects: Objects, name: str, key: bytes | None = None) -> None:
        self._objects = objects
        self._name = name
        self._key = key

    def numbers(self) -> list[int]:
        """Numbers of the existing sets, ascending."""
        names = (PurePosixPath(key).name.removesuffix(".json") for key in self._objects.list(MANIFESTS))
        return sorted(int(name) for name in names if name.isdecimal())

    def read(self, number: int) -> FileSet:
        """The files of a set. Raises :class:`~etude.errors.DamagedError` naming the manifest."""
        key = _manifest_key(number)
        where = f"{self._objects.url}/{key}"
        data = self._objects.get(key)
        if data is None:
            raise DamagedError(f"manifest {where} is missing: it was removed while it was read, or is lost; try again")
        try:
            tree = json.loads(data)
            files = {_checked(path): StoredFile(**file) for path, file in tree["files"].items()}
            signature = str(tree.get("signature"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"manifest {where} cannot be read: {error}; restore it from a copy") from error
        if self._key is not None and not hmac.compare_digest(signature.encode(), self._sign(number, files).encode()):
            raise DamagedError(f"manifest {where} is not signed with this key: another key wrote it, or none")
        return files

    def put(self, number: int, files: FileSet) -> bool:
        """Write the manifest of a set after its files; false if the number is taken."""
        ordered = dict(sorted(files.items()))
        tree: dict[str, object] = {"files": {path: asdict(file) for path, file in ordered.items()}}
        if self._key is not None:
            tree["signature"] = self._sign(number, ordered)
        data = json.dumps(tree, indent=1).encode()
        key = _manifest_key(number)
        return self._objects.put_if_absent(key, data) or self._objects.get(key) == data

    def send(self, descriptor: int, file: StoredFile, sent: Callable[[int], None] = lambda part_bytes: None) -> None:
        """Upload an open file, unless it is stored already; ``sent`` is called for each stored part."""

        def send_part(part: int) -> None:
            key = file.key(part)
            size_bytes = file.part_sizes[part]
            if not self._objects.exists(key):
                data = os.pread(descriptor, size_bytes, part * PART_BYTES)
                assert len(data) == size_bytes, "a stored file does not change"
                self._objects.put_if_absent(key, data)
            sent(size_bytes)

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(send_part, range(len(file.part_sizes))))

    def fetch(self, path: str, file: StoredFile, folder: Path) -> None:
        """Download a file into a folder: complete and with its digest, or not at all.

        Raises :class:`~etude.errors.DamagedError` naming the path and the object, and
        :class:`~etude.errors.RunFolderError` if the disk is full.
        """
        target = folder / _checked(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if free_bytes(target.parent) < file.size_bytes:
            raise RunFolderError(f"{target} takes {file.size_bytes:,} bytes, which are not free there: make room")
        partial = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            with partial.open("w+b") as stream:
                self._fetch_parts(path, file, stream.fileno())
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    raise DamagedError(
                        f"{self._objects.url}/{PARTS}/{file.sha256} ({path}) does not match its name, a SHA-256: "
                        f"restore it from a copy"
                    )
            sync(partial)
            partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove sets, and their files that are in no other set."""
        there, chosen = self.numbers(), set(numbers)
        doomed = [file for number in there if number in chosen for file in self.read(number).values()]
        needed = {file.sha256 for number in there if number not in chosen for file in self.read(number).values()}
        self._objects.delete(*(_manifest_key(number) for number in there if number in chosen))
        unused = {file.sha256: file for file in doomed if file.sha256 not in needed}
        self._objects.delete(*(file.key(part) for file in unused.values() for part in range(len(file.part_sizes))))

    def _fetch_parts(self, path: str, file: StoredFile, descriptor: int) -> None:
        sizes = file.part_sizes

        def fetch_part(part: int) -> None:
            where = f"{self._objects.url}/{file.key(part)} ({path})"
            data = self._objects.get(file.key(part))
            if data is None:
                raise DamagedError(f"{where} is missing: restore it from a copy")
            if len(data) != sizes[part]:
                raise DamagedError(f"{where} has {len(data)} bytes, not {sizes[part]}: restore it from a copy")
            os.pwrite(descriptor, data, part * PART_BYTES)

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(fetch_part, range(len(sizes))))

    def _sign(self, number: int, files: FileSet) -> str:
        assert self._key is not None
        rows = [[path, file.sha256, file.size_bytes] for path, file in sorted(files.items())]
        return hmac.new(self._key, json.dumps([self._name, number, rows]).encode(), "sha256").hexdigest()


def _manifest_key(number: int) -> str:
    return f"{MANIFESTS}/{number:08d}.json"


def _checked(path: str) -> str:
    """The path, if it is certainly below the target folder. Raises ``ValueError``."""
    pure = PurePosixPath(path)
    if str(pure) != path or pure.is_absolute() or ".." in pure.parts or path == "." or "\\" in path or "\0" in path:
        raise ValueError(f"the path {path!r} does not lie in the folder")
    return path
