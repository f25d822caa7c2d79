"""Text files as documents: chunks of bounded size, read from disk on demand.

Owns the tokenisation of plain text, the hold-out of whole files, and the order of chunks. Only sizes are kept in
memory, so a folder may be larger than memory.
"""

import codecs
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np

from etude.errors import ConfigError
from etude.tasks.corpora.mixture import Side, shuffled
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatFormat
from etude.types import Document, Ids, Split

MAX_TAIL_BYTES = 3
"""Largest number of bytes after the first byte of a UTF-8 character."""
CHECKED_BYTES = 16 * 2**20
"""Bytes at the beginning of each file that are checked before a run starts: what is no text shows it there."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Plain text in a chat format's tokens."""

    chat: ChatFormat

    @property
    def opening(self) -> tuple[int, ...]:
        """Ids at the beginning of a text: the document token, if the tokenizer has one."""
        return (self.chat.document_id,) if isinstance(self.chat, ChatTemplate) else ()

    def ids(self, text: str) -> Ids:
        """[L] token ids of a whole text."""
        return np.array([*self.opening, *self.chat.encode(text)], np.int32)


@final
class TextFiles:
    """The chunks of a text file, or of all files below a folder, reshuffled every epoch.

    Hidden files and folders, whose names begin with a dot, are left out.
    """

    def __init__(self, path: Path, text: PlainText, side: Side, *, chunk_bytes: int) -> None:
        """Files are held out whole, by the hashes of their names; a single file is not held out.

        Raises :class:`~etude.errors.ConfigError` if there is no text to train on.
        """
        chosen = [file for file in _files(path) if _is_on_side(file, path, side)]
        if not chosen and side.split is Split.TRAIN:
            raise ConfigError(f"text:{path}: there is no text file to train on")
        sizes = [file.stat().st_size for file in chosen]
        self._files = chosen
        self._text = text
        self._chunk_bytes = chunk_bytes
        self._ends = list(accumulate(-(-size // chunk_bytes) for size in sizes))
        named = "\n".join(f"{file.relative_to(path)} {size}" for file, size in zip(chosen, sizes, strict=True))
        digest = hashlib.sha256(named.encode()).hexdigest()[:16]
        self.identity = f"text|{side.split}|{side.seed}|{chunk_bytes}|{digest}"
        """Depends on names and sizes, not on contents, so that opening a corpus does not read it."""

    @property
    def size(self) -> int:
        """Number of chunks of all files."""
        return self._ends[-1] if self._ends else 0

    def document(self, index: int) -> Document:
        """One chunk; only the first chunk of a file begins with the opening ids.

        Raises :class:`~etude.errors.ConfigError` if it is not UTF-8.
        """
        chunk = shuffled(self.identity, index, self.size)
        file = bisect_right(self._ends, chunk)
        number = chunk - (self._ends[file - 1] if file else 0)
        ids = self._text.ids(self._read(self._files[file], number))
        return whole(ids if number == 0 else ids[len(self._text.opening) :])

    def _read(self, file: Path, number: int) -> str:
        """A chunk of a file. A character across a boundary belongs to the chunk in which it begins."""
        with file.open("rb") as stream:
            stream.seek(number * self._chunk_bytes)
            read = stream.read(self._chunk_bytes + MAX_TAIL_BYTES)
        start = _tail(read) if number else 0
        try:
            return read[start : self._chunk_bytes + _tail(read[self._chunk_bytes :])].decode()
        except UnicodeDecodeError as error:
            raise _not_text(file, number * self._chunk_bytes + start + error.start) from error


def check_text(path: Path) -> None:
    """Check that a text file, or all files below a folder, begin with UTF-8: :data:`CHECKED_BYTES` of each.

    Raises :class:`~etude.errors.ConfigError` with the file and the offset.
    """
    for file in _files(path):
        with file.open("rb") as stream:
            read = stream.read(CHECKED_BYTES)
        try:
            codecs.getincrementaldecoder("utf-8")().decode(read, final=len(read) < CHECKED_BYTES)
        except UnicodeDecodeError as error:
            raise _not_text(file, error.start) from error


def _not_text(file: Path, offset: int) -> ConfigError:
    return ConfigError(
        f"{file} is not text in UTF-8, from byte {offset} on: convert it, move it out of the folder, or let its name "
        f"begin with a dot, which leaves it out"
    )


def _tail(read: bytes) -> int:
    """Number of bytes at the beginning that belong to an earlier character."""
    return next((index for index, byte in enumerate(read[:MAX_TAIL_BYTES]) if byte & 0xC0 != 0x80), MAX_TAIL_BYTES)


def _files(path: Path) -> Sequence[Path]:
    if not path.exists():
        raise ConfigError(f"text:{path}: there is no such file or folder in {Path.cwd()}")
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _is_on_side(file: Path, path: Path, side: Side) -> bool:
    return side.split is Split.TRAIN if file == path else side.has(str(file.relative_to(path)).encode())


def whole(ids: Ids) -> Document:
    """A document in which every token has loss weight 1."""
    return Document(token_ids=ids, weights=np.ones(len(ids), np.float32))
