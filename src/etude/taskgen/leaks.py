"""Search for removed code in everything that an agent will be able to read.

    removed text ──▶ RemovedIdentifiers ──search──▶ every file: names, texts, archives, git objects, binaries

A deletion is only worth something if the answer is nowhere. Four kinds of identifiers: three lines in a row of what was
removed (however they are indented), the digest of the files as they were, words that only the removed code had (a
compiled file keeps them, whatever else it changes), and a name that must be gone altogether. What cannot be searched,
such as a pack of git objects, is a leak. Owns the search; it runs no program and executes nothing that it finds.
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
"""Lines in a row that do not agree by chance."""
WINDOW_CHARACTERS = 40
"""A window with less is idiom rather than answer: ``try:``, ``return None``."""
LINE_CHARACTERS = 24
"""Length for a body that is shorter than a window: the least that one line must have to be searched for by itself."""
WORD_CHARACTERS = 5
WORDS = 3
"""Words of the removed code that must meet in one file to be its trace; fewer if it has no more of its own."""
DEPTH = 3
"""Archives in archives that are opened."""
UNPACKED_BYTES = 64 << 20
"""The most that one file may hold, unpacked."""
MEMBERS = 10_000
"""The most that one archive may hold."""
BYTECODE_SUFFIXES = (".pyc", ".pyo")
PACKS = (".pack", ".idx", ".bundle")
UNSEARCHABLE = (b"7z\xbc\xaf\x27\x1c", b"Rar!", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PACK\x00")
"""First bytes of formats that are not opened here: 7z, RAR, zstandard, LZ4, packs of git."""
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


class _Unsearchable(Exception):
    """Something cannot be looked into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedIdentifiers:
    """Removed texts that must not be found anywhere."""

    windows: tuple[str, ...] = ()
    """Lines in a row, each stripped."""
    digests: frozenset[str] = frozenset()
    """SHA-256 of files as they were."""
    words: frozenset[bytes] = frozenset()
    """Words that only the removed code had."""
    gone: str = ""
    """A name that nothing may mention."""
    modules: frozenset[str] = frozenset()
    """Modules no compiled form of which may be there, by the last part of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A trace of what was removed."""

    place: str
    """Path in the image; what lies in an archive follows a ``!``."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def removed_identifiers(
    before: Mapping[str, str], after: Mapping[str, str | None], rest: Iterable[str], *, gone: str = ""
) -> RemovedIdentifiers:
    """The texts that were removed from ``before`` to ``after`` (path → text of the changed files).

    ``rest`` are the other texts of the package: words that they have, too, tell nothing.
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
    """The same without lines that stand in ``texts``, which an agent may read: idioms of a project come again."""
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
        folders.sort(key=lambda name: (name == ".git", name))  # a place in a file says more than one in an object
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
    """Search one piece of data that nothing needs unpacking of any more."""
    if hashlib.sha256(data).hexdigest() in removed_names.digests:
        yield Leak(place=place, what="a file as it was before")
        return
    if gone is not None and gone.search(data):
        yield Leak(place=place, what=f"mentions {removed_names.gone}")
    if b"\0" in data:  # between words of compiled code stands anything, letters too
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
    """The lines of a text for comparison: stripped, without empty ones, with a start and an end mark."""
    return "\n" + "".join(f"{line}\n" for line in map(str.strip, text.splitlines()) if line)


def _contents(data: bytes, place: str, depth: int, left: list[int]) -> Iterator[tuple[str, bytes]]:
    """The data itself, and all that is in it if it is packed. ``left`` is how much may be unpacked."""
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
    """The contents of one layer of packing."""
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
        return  # it only begins like that; its bytes were searched as they are


def _deflated(data: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    """Loose git objects are packed so, without any other head."""
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
    """Lines of ``before``, with their numbers from 0, that are neither in the head nor in the tail of both texts."""
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
    """Every three lines in a row around or in what was removed; of a shorter text its longest line, if it says much."""
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
    """Names and texts in the removed lines that a compiled file would hold: not those of comments."""
    text = "\n".join(line for _, line in removed)
    numbers = {number + 1 for number, _ in removed}
    code: set[str] = set()
    for node in ast.walk(ast.parse(before)):
        if getattr(node, "lineno", 0) in numbers:
            code |= {getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "arg", "") or ""}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                code |= {word.decode() for word in WORD.findall(node.value.encode())}
    return {word.encode() for word in code if len(word) >= WORD_CHARACTERS and word in text and word.isascii()}
