"""Search for removed code in everything that an agent will be able to read.

    removed text ──▶ RemovedIdentifiers ──search──▶ every file: names, texts, archives, git objects, binaries

A deletion is useful only if the answer is nowhere. There are four kinds of identifiers: three consecutive removed lines
(with any indentation), the digests of the original files, words that only the removed code had (a compiled file keeps
them), and a name that must not remain. Data that cannot be searched, such as a pack of git objects, counts as a leak.
Owns the search; it runs no program and executes nothing that it finds.
"""

import ast
import bz2
import gzip
import hashlib
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath

WINDOW = 3
"""Consecutive lines that do not match by chance."""
WINDOW_CHARACTERS = 40
"""Minimum characters of a window; a shorter one is an idiom, such as ``try:`` or ``return None``."""
LINE_CHARACTERS = 24
"""Minimum characters of a line that is searched for alone, where the removed code is shorter than a window."""
WORD_CHARACTERS = 5
WORDS = 3
"""Words of the removed code in one file that count as a leak; fewer if the code has fewer unique words."""
DEPTH = 3
"""Maximum nesting of archives that are opened."""
UNPACKED_BYTES = 64 << 20
"""Maximum unpacked size of one file."""
MEMBERS = 10_000
"""Maximum members of one archive."""
BYTECODE_SUFFIXES = (".pyc", ".pyo")
PACKS = (".pack", ".idx", ".bundle")
UNSEARCHABLE = (b"7z\xbc\xaf\x27\x1c", b"Rar!", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PACK\x00")
"""First bytes of formats that are not opened: 7z, RAR, zstandard, LZ4, git packs."""
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


class _Unsearchable(Exception):
    """Data that cannot be searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedIdentifiers:
    """Removed texts that must not occur anywhere."""

    windows: tuple[str, ...] = ()
    """Consecutive lines, each stripped."""
    digests: frozenset[str] = frozenset()
    """SHA-256 of the original files."""
    words: frozenset[bytes] = frozenset()
    """Words that only the removed code had."""
    gone: str = ""
    """Name that no file may mention."""
    modules: frozenset[str] = frozenset()
    """Last parts of the names of modules that must have no compiled file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A trace of the removed code."""

    place: str
    """Path in the image; the path inside an archive follows a ``!``."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def removed_identifiers(
    before: Mapping[str, str], after: Mapping[str, str | None], rest: Iterable[str], *, gone: str = ""
) -> RemovedIdentifiers:
    """The texts that the change from ``before`` to ``after`` removes (path → text of the changed files).

    ``rest`` are the other texts of the package: words that also occur there are not identifiers.
    """
    removed = {path: _removed(text, after.get(path) or "") for path, text in before.items() if path.endswith(".py")}
    selected = {
        word for text in (*rest, *(text or "" for text in after.values())) for word in WORD.findall(text.encode())
    }
    words = {word for path, lines in removed.items() for word in _words(before[path], lines)}
    return RemovedIdentifiers(
        windows=tuple(dict.fromkeys(w for path, lines in removed.items() for w in _windows(lines, before[path]))),
        digests=frozenset(
            hashlib.sha256(text.encode()).hexdigest() for text in before.values() if len(text) > WINDOW_CHARACTERS
        ),
        words=frozenset(word for word in words if word not in selected),
        gone=gone,
        modules=frozenset(PurePosixPath(path).stem for path in removed),
    )


def without_repeated(removed_names: RemovedIdentifiers, texts: Iterable[str]) -> RemovedIdentifiers:
    """The same without lines that also occur in ``texts``, which an agent may read: projects repeat their idioms."""
    whole = "".join(map(normalised, texts))
    return replace(removed_names, windows=tuple(window for window in removed_names.windows if window not in whole))


def search(tree: Path, removed_names: RemovedIdentifiers, *, prefix: str = "") -> Iterator[Leak]:
    """Find every leak below ``tree``; ``prefix`` is the tree's name in the results."""
    gone = (
        re.compile(rb"(?<![A-Za-z0-9_])" + re.escape(removed_names.gone.encode()) + rb"(?![A-Za-z0-9_])")
        if removed_names.gone
        else None
    )
    for folder, folders, files in os.walk(tree):
        folders.sort(
            key=lambda name: (name == ".git", name)
        )  # a path of a file is more useful than one of a git object
        for name in sorted((*folders, *files)):
            path = Path(folder) / name
            place = prefix + str(path.relative_to(tree))
            if gone is not None and gone.search(os.fsencode(name)):
                yield Leak(place=place, what=f"is called {removed_names.gone}")
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                continue
            if stat.S_ISREG(status.st_mode):
                yield from _search_file(path.read_bytes(), place, removed_names, gone)


def _search_file(
    data: bytes, place: str, removed_names: RemovedIdentifiers, gone: "re.Pattern[bytes] | None"
) -> Iterator[Leak]:
    suffix = PurePosixPath(place).suffix
    if suffix in PACKS and "/objects/" in place:
        yield Leak(place=place, what="packed git objects, which are not searched: leave them loose")
        return
    if suffix in BYTECODE_SUFFIXES and PurePosixPath(place).name.partition(".")[0] in removed_names.modules:
        yield Leak(place=place, what="a compiled form of a module that was changed")
    try:
        for inner, content in _contents(data, place, DEPTH, [UNPACKED_BYTES]):
            yield from _search_data(content, inner, removed_names, gone)
    except _Unsearchable as error:
        yield Leak(place=place, what=str(error))


def _search_data(
    data: bytes, place: str, removed_names: RemovedIdentifiers, gone: "re.Pattern[bytes] | None"
) -> Iterator[Leak]:
    """Search data that is already unpacked."""
    if hashlib.sha256(data).hexdigest() in removed_names.digests:
        yield Leak(place=place, what="a file as it was before")
        return
    if gone is not None and gone.search(data):
        yield Leak(place=place, what=f"mentions {removed_names.gone}")
    if b"\0" in data:  # compiled code may have letters beside a word
        words = {word for word in removed_names.words if word in data}
    else:
        words = set(WORD.findall(data)) & removed_names.words
    if removed_names.words and len(words) >= min(WORDS, len(removed_names.words)):
        yield Leak(place=place, what=f"has words of the removed code: {sorted(words)[:WORDS]}")
    if removed_names.windows:
        text = normalised(data.decode("utf-8", "replace"))
        for window in removed_names.windows:
            if window in text:
                yield Leak(place=place, what=f"has lines of the removed code: {window[:80]!r}")
                return


def normalised(text: str) -> str:
    """The lines of a text for comparison: stripped, without empty lines, between line breaks."""
    return "\n" + "".join(f"{line}\n" for line in map(str.strip, text.splitlines()) if line)


def _contents(data: bytes, place: str, depth: int, left: list[int]) -> Iterator[tuple[str, bytes]]:
    """The data itself and, if it is packed, its contents. ``left`` holds the bytes that may still be unpacked."""
    left[0] -= len(data)
    if left[0] < 0:
        raise _Unsearchable(f"holds more than {UNPACKED_BYTES >> 20} MiB, unpacked: too much to search")
    yield place, data
    inner = list(_unpacked(data, place, left[0]))
    if inner and depth == 0:
        raise _Unsearchable(f"archives in archives, more than {DEPTH} deep")
    for name, content in inner:
        yield from _contents(content, f"{place}!{name}", depth - 1, left)


def _unpacked(data: bytes, place: str, limit: int) -> Iterator[tuple[str, bytes]]:
    """The contents of data, one level unpacked."""
    if data.startswith(UNSEARCHABLE):
        raise _Unsearchable("is packed in a way that cannot be searched")
    try:
        if data[:2] == b"PK" and zipfile.is_zipfile(io.BytesIO(data)):
            yield from _zip_members(data, limit)
        elif data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                yield "gzip", _bounded(packed, limit)
        elif data[:3] == b"BZh":
            with bz2.BZ2File(io.BytesIO(data)) as packed:
                yield "bzip2", _bounded(packed, limit)
        elif data[:6] == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(io.BytesIO(data)) as packed:
                yield "xz", _bounded(packed, limit)
        elif data[:1] == b"\x78" and len(data) > 2 and int.from_bytes(data[:2], "big") % 31 == 0:
            yield from _deflated(data, limit)
        elif data[257:262] == b"ustar":
            yield from _tar_members(data, limit)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, RuntimeError) as error:
        if "/.git/objects/" in place and "!" not in place:
            raise _Unsearchable(f"an object that cannot be read: {error}") from error
        return  # only the first bytes match the format; the raw bytes were searched


def _deflated(data: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    """The content of zlib data, the format of loose git objects."""
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(data, limit)
    if unpacker.unconsumed_tail:
        raise _Unsearchable(f"holds more than {UNPACKED_BYTES >> 20} MiB, unpacked: too much to search")
    if content:
        head, _, body = content.partition(b"\0")
        yield "deflated", body if re.fullmatch(rb"(blob|tree|commit|tag) \d+", head) else content


def _bounded(file: "gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile", limit: int) -> bytes:
    content = file.read(limit + 1)
    if len(content) > limit:
        raise _Unsearchable(f"holds more than {UNPACKED_BYTES >> 20} MiB, unpacked: too much to search")
    return content


def _zip_members(data: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) > MEMBERS or sum(member.file_size for member in members) > limit:
            raise _Unsearchable("an archive that is too large to search")
        for member in members:
            if member.flag_bits & 1:
                raise _Unsearchable("an archive with a password")
            yield member.filename, archive.read(member)


def _tar_members(data: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in islice(archive, MEMBERS):
            file = archive.extractfile(member) if member.isfile() and member.size <= limit else None
            if file is not None:
                yield member.name, file.read()


def _removed(before: str, after: str) -> list[tuple[int, str]]:
    """The removed lines, numbered from 0: those outside the common head and tail that the rest of ``after`` lacks."""
    old, new = before.splitlines(), after.splitlines()
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    inner_new = set(new[head : len(new) - tail])
    return [(number, old[number]) for number in range(head, len(old) - tail) if old[number] not in inner_new]


def _windows(removed: list[tuple[int, str]], before: str) -> Iterator[str]:
    """Every three consecutive lines in or around the removed ones; without any, the longest line if long enough."""
    lines = [(number, line.strip()) for number, line in enumerate(before.splitlines()) if line.strip()]
    numbers = {number for number, line in removed if line.strip()}
    window_count = 0
    for start in range(len(lines) - WINDOW + 1):
        window = lines[start : start + WINDOW]
        text = "\n".join(line for _, line in window)
        inside = sum(number in numbers for number, _ in window)
        if inside >= min(WINDOW, len(numbers)) and inside and len(text) >= WINDOW_CHARACTERS:
            window_count += 1
            yield f"\n{text}\n"
    longest = max((line.strip() for _, line in removed), key=len, default="")
    if not window_count and len(longest) >= LINE_CHARACTERS:
        yield f"\n{longest}\n"


def _words(before: str, removed: list[tuple[int, str]]) -> set[bytes]:
    """Names and words of strings in the removed lines that a compiled file would contain: no comments."""
    text = "\n".join(line for _, line in removed)
    numbers = {number + 1 for number, _ in removed}
    code: set[str] = set()
    for node in ast.walk(ast.parse(before)):
        if getattr(node, "lineno", 0) in numbers:
            code |= {getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "arg", "") or ""}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                code |= {word.decode() for word in WORD.findall(node.value.encode())}
    return {word.encode() for word in code if len(word) >= WORD_CHARACTERS and word in text and word.isascii()}
