"""Reminders: one more message in a context of tokens, right before the reply.

    … ⟨user⟩ run the tests ⟨end⟩ ┊                          ⟨assistant⟩     what a turn was sampled from
    … ⟨user⟩ run the tests ⟨end⟩ ┊ ⟨user⟩ the hint ⟨end⟩ ┊ ⟨assistant⟩     the same, reminded

Owns where the message goes and how it is spelt, for any chat format. Both are found out by rendering conversations with
and without a last message more: what the longer one has in between is the message, and what stands behind it in both is
the opening of the reply. Nothing before the message changes, whatever a template would make of older messages of a
longer conversation, and nothing behind it: a reply's ids are the same in both contexts. Does not know what is worth a
reminder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from etude.tokens.messages import ChatFormat, ChatMessage, Role, ToolCall
from etude.types import Ids

ROLES: tuple[Role, ...] = ("user", "system")
"""Roles of a reminder, in order: the first that a format accepts there."""
_QUESTION = ChatMessage(role="user", content=".")
_REPLY = ChatMessage(role="assistant", content=".")
_CALL = ToolCall(call_id="abcdefghi", name="probe", arguments="{}")
_CALLED = ChatMessage(role="assistant", content="", tool_calls=(_CALL,))
_ANSWERED = ChatMessage(role="tool", content=".", tool_call_id=_CALL.call_id)
ENDINGS: tuple[tuple[ChatMessage, ...], ...] = (
    (_QUESTION,),
    (_QUESTION, _REPLY, _QUESTION),
    (ChatMessage(role="system", content="."), _QUESTION),
    (_QUESTION, _CALLED, _ANSWERED),
)
"""Conversations before a reply; a format that knows no tools or no system message is not asked about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seam:
    """One way in which a format goes on to a reply, and where a message fits in."""

    ending: tuple[ChatMessage, ...]
    """The conversation that showed it."""
    opening: tuple[int, ...]
    """Text between the last message and the reply."""
    last: int
    """The token before that: by it a context is known where nothing opens a reply."""

    def fits(self, prompt_ids: Ids) -> bool:
        """Report whether a context goes on like this."""
        place = len(prompt_ids) - len(self.opening)
        if place < 1 or tuple(prompt_ids[place:].tolist()) != self.opening:
            return False
        return bool(self.opening) or int(prompt_ids[-1]) == self.last


@final
class Reminders:
    """Inserts reminders into contexts of one chat format.

    Raises ``ValueError`` for a format that takes no message there, or changes what is around it, with its words.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._role, self._seams = _find_seams(chat)

    def fits(self, prompt_ids: Ids) -> bool:
        """Report whether a reminder can be put into a context [P]: not into one that ends in the middle of a reply."""
        return self._seam(prompt_ids) is not None

    def place(self, prompt_ids: Ids) -> int:
        """Before which token of a context a reminder goes: those before it are the same in both. Raises like
        :meth:`insert`.
        """
        seam = self._seam(prompt_ids)
        if seam is None:
            openings = [list(seam.opening) for seam in self._seams]
            raise ValueError(
                f"a context of {len(prompt_ids)} tokens ends with {prompt_ids[-8:].tolist()}, none of the openings of "
                f"a reply {openings}: no reminder can be put before it"
            )
        return len(prompt_ids) - len(seam.opening)

    def insert(self, prompt_ids: Ids, text: str) -> Ids:
        """The context [P] with ``text`` in it; without a text, the context itself.

        Raises ``ValueError`` for a context that it does not fit into.
        """
        if not text:
            return prompt_ids
        place, seam = self.place(prompt_ids), self._seam(prompt_ids)
        assert seam is not None
        message = _written(self._chat, seam, ChatMessage(role=self._role, content=text))
        return np.concatenate((prompt_ids[:place], np.asarray(message, prompt_ids.dtype), prompt_ids[place:]))

    def _seam(self, prompt_ids: Ids) -> _Seam | None:
        """The one with the longest opening that fits."""
        return next((seam for seam in self._seams if seam.fits(prompt_ids)), None)


def _find_seams(chat: ChatFormat) -> tuple[Role, tuple[_Seam, ...]]:
    errors: list[str] = []
    for role in ROLES:
        try:
            return role, _seams_of(chat, role)
        except ValueError as error:
            errors.append(f"as {role}: {error}")
    raise ValueError(f"its chat template takes no message between the last one and a reply ({'; '.join(errors)})")


def _seams_of(chat: ChatFormat, role: Role) -> tuple[_Seam, ...]:
    """Every way there is for messages of ``role``, longest opening first. Raises ``ValueError`` where that is none."""
    reminder = ChatMessage(role=role, content=".")
    seams_by_opening: dict[tuple[object, ...], tuple[_Seam, list[int]]] = {}
    for ending in ENDINGS:
        plain = _opened(chat, ending)
        if plain is None:
            continue
        opening = _behind(plain, chat.open([*ending, reminder]))
        if len(opening) == len(plain):
            raise ValueError(f"a message behind {ending[-1].role!r} changes the whole conversation")
        seam = _Seam(ending=ending, opening=opening, last=plain[-1 - len(opening)])
        written = _written(chat, seam, reminder)
        first, before = seams_by_opening.setdefault((opening, None if opening else seam.last), (seam, written))
        if written != before:
            places = f"behind {first.ending[-1].role!r} and behind {ending[-1].role!r}"
            raise ValueError(f"a message is written differently {places}: {before} and {written}")
    seams = (seam for seam, _ in seams_by_opening.values())
    return tuple(sorted(seams, key=lambda seam: len(seam.opening), reverse=True))


def _written(chat: ChatFormat, seam: _Seam, message: ChatMessage) -> list[int]:
    """The ids of a message at a seam. Raises ``ValueError`` if they are mixed up with others."""
    plain, longer = chat.open(seam.ending), chat.open([*seam.ending, message])
    start, end = len(plain) - len(seam.opening), len(longer) - len(seam.opening)
    if longer[:start] != plain[:start] or longer[end:] != list(seam.opening):
        raise ValueError(f"a message behind {seam.ending[-1].role!r} changes what is written around it")
    return longer[start:end]


def _opened(chat: ChatFormat, messages: Sequence[ChatMessage]) -> list[int] | None:
    """The ids of a conversation; ``None`` for one that the format does not take."""
    try:
        return chat.open(messages)
    except ValueError:
        return None


def _behind(plain: Sequence[int], longer: Sequence[int]) -> tuple[int, ...]:
    """The rest of a conversation once it differs from a longer one."""
    differs = (index for index, (a, b) in enumerate(zip(plain, longer, strict=False)) if a != b)
    return tuple(plain[next(differs, len(plain)) :])
