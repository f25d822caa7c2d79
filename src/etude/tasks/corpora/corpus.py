"""Corpora of mid-training made by étude: the standard library, clean domain code and imperfect sessions.

Each kind is an endless :class:`~etude.tasks.corpora.mixture.Source` that is determined by the seed: document *n* has a
random generator of its own, so a stream can resume anywhere. Code and sessions come from a task family: its
:class:`Demonstrations`. A source has documents of one side of the hold-out; modules of the standard library are held
out whole.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol, final, runtime_checkable

import numpy as np

from etude.tasks.corpora.conversations import conversation
from etude.tasks.corpora.mixture import Side, Source
from etude.tasks.corpora.texts import PlainText, whole
from etude.tasks.corpora.transcripts import Message
from etude.tokens.messages import ChatFormat, ChatMessage
from etude.types import Document, Split

WINDOW_TOKENS = 256
"""Length of a standard-library document."""
CODE_TOKENS = 170
"""Functions are added to a document of domain code until it has this many tokens."""
STDLIB_FILES, STDLIB_CHARACTERS = 60, 30_000
"""Number of standard-library modules that are read, and of characters of each."""
TOKENIZER_SESSIONS = 1_500
"""Number of sessions that a tokenizer is trained on."""
TOKENIZER_EVERY, TOKENIZER_CHARACTERS = 4, 8_000
"""Library text that a tokenizer is trained on: every fourth module, and characters of each."""


class Demonstrations(Protocol):
    """Protocol of a task family's demonstrations, on one side of the held-out split."""

    def code(self, rng: Random) -> str | Sequence[Message]:
        """Right code, plain or as an agent sees it; or an exercise that the agent solves, as messages."""
        ...

    def session(self, rng: Random) -> Sequence[Message]:
        """A session of an imperfect agent."""
        ...


@runtime_checkable
class DemonstratedFamily(Protocol):
    """Protocol of a task family with demonstrations. Those of built-in families also need options of the family or the
    harness, so :mod:`etude.run.task_families` opens them.
    """

    def demonstrations(self, split: Split) -> Demonstrations:
        """The demonstrations of one side of the hold-out."""
        ...


def demonstration_sources(
    demonstrations: Demonstrations, text: PlainText, side: Side, *, context_weight: float
) -> dict[str, Source]:
    """The three sources by name in a mixture."""
    return {
        "stdlib": Library(text, side),
        "code": Code(demonstrations, text, side, context_weight=context_weight),
        "sessions": SessionSource(demonstrations, text.chat, side, context_weight=context_weight),
    }


@final
class Library:
    """Random windows of the standard library's source."""

    size = None

    def __init__(self, text: PlainText, side: Side) -> None:
        self._ids = np.concatenate([text.ids(module) for module in stdlib_texts(side)])
        self._stem = f"stdlib|{side.split}|{side.seed}"
        self.identity = f"{self._stem}|{len(self._ids)} tokens"

    def document(self, index: int) -> Document:
        """A window of ``WINDOW_TOKENS``."""
        start = Random(f"{self._stem}|{index}").randrange(len(self._ids) - WINDOW_TOKENS)
        return whole(self._ids[start : start + WINDOW_TOKENS])


@final
class Code:
    """Documents of several right programs, or of one exercise."""

    size = None

    def __init__(self, demonstrations: Demonstrations, text: PlainText, side: Side, *, context_weight: float) -> None:
        self._demonstrations = demonstrations
        self._text = text
        self._context_weight = context_weight
        self.identity = f"code|{side.split}|{side.seed}"

    def document(self, index: int) -> Document:
        """One exercise, or programs until there are ``CODE_TOKENS``."""
        rng, chat = Random(f"{self.identity}|{index}"), self._text.chat
        ids = [*self._text.opening]
        while len(ids) < CODE_TOKENS:
            chunk = self._demonstrations.code(rng)
            if not isinstance(chunk, str):
                return conversation(chat, spoken(chunk), context_weight=self._context_weight)
            ids += [*chat.encode(chunk), chat.stop_ids[0]]
        return whole(np.array(ids, np.int32))


@final
class SessionSource:
    """Sessions of the imperfect agent, one per document."""

    size = None

    def __init__(self, demonstrations: Demonstrations, chat: ChatFormat, side: Side, *, context_weight: float) -> None:
        self._demonstrations = demonstrations
        self._chat = chat
        self._context_weight = context_weight
        self.identity = f"sessions|{side.split}|{side.seed}"

    def document(self, index: int) -> Document:
        """One session."""
        output = self._demonstrations.session(Random(f"{self.identity}|{index}"))
        return conversation(self._chat, spoken(output), context_weight=self._context_weight)


def spoken(output: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Convert a transcript to chat messages. Raises ``ValueError`` for an unknown role."""
    return tuple(_message(message) for message in output)


def _message(output: Message) -> ChatMessage:
    match output.role:
        case "system" | "user" | "assistant" | "tool":
            return ChatMessage(role=output.role, content=output.content)
        case _:
            raise ValueError(f"there is no speaker {output.role!r}")


def tokenizer_texts(demonstrations: Demonstrations, seed: int) -> Iterator[str]:
    """Text to train a tokenizer on: sessions of the demonstrations' side, and the beginnings of library modules, even
    held-out ones: a tokenizer learns which letters occur together, but no lines.
    """
    rng = Random(f"tokenizer|{seed}")
    for _ in range(TOKENIZER_SESSIONS):
        yield from (message.content for message in demonstrations.session(rng))
    yield from (text[:TOKENIZER_CHARACTERS] for text in _library()[::TOKENIZER_EVERY])


def stdlib_texts(side: Side) -> list[str]:
    """The beginnings of the standard-library modules on one side of the hold-out, in order of their names."""
    return [text for text in _library() if side.has(text.encode())]


def _library() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:STDLIB_FILES]
    return [file.read_text(encoding="utf-8", errors="replace")[:STDLIB_CHARACTERS] for file in files]
