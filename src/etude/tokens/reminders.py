"""Reminders: an additional message in a context of tokens, directly before the reply.

    … ⟨user⟩ run the tests ⟨end⟩ ┊                          ⟨assistant⟩     the context of a sampled turn
    … ⟨user⟩ run the tests ⟨end⟩ ┊ ⟨user⟩ the hint ⟨end⟩ ┊ ⟨assistant⟩     the same with a reminder

Owns the position and the ids of the message, for any chat format. Both result from rendering conversations with and
without an additional last message: the inserted part is the message, and the common part after it is the opening of the
reply. Nothing before the message changes, even if the template would render older messages of a longer conversation
differently, and nothing after it: a reply has the same ids in both contexts. Does not choose the reminders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from etude.tokens.messages import ChatFormat, ChatMessage, Role, ToolCall
from etude.types import Ids

ROLES: tuple[Role, ...] = ("user", "system")
"""Roles of a reminder, in order of preference: the first that a format accepts there is used."""
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
"""Conversations before a reply; those that a format rejects, such as tools or system messages, are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seam:
    """One form of the end of a context, and the position of a message in it."""

    ending: tuple[ChatMessage, ...]
    """The rendered conversation that showed it."""
    opening: tuple[int, ...]
    """Ids between the last message and the reply."""
    last: int
    """The id before the opening; identifies a context if the opening is empty."""

    def fits(self, prompt_ids: Ids) -> bool:
        """True if a context ends in this form."""
        place = len(prompt_ids) - len(self.opening)
        if place < 1 or tuple(prompt_ids[place:].tolist()) != self.opening:
            return False
        return bool(self.opening) or int(prompt_ids[-1]) == self.last


@final
class Reminders:
    """Inserts reminders into contexts of one chat format.

    Raises ``ValueError`` with the format's message if the format rejects a message there, or changes its surroundings.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._role, self._seams = _find_seams(chat)

    def fits(self, prompt_ids: Ids) -> bool:
        """True if a reminder fits into a context [P]; false if the context ends in the middle of a reply."""
        return self._seam(prompt_ids) is not None

    def place(self, prompt_ids: Ids) -> int:
        """Index of the token before which a reminder is inserted; earlier tokens do not change. Raises like
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
        """The context [P] with ``text`` inserted; for an empty text, the context itself.

        Raises ``ValueError`` for a context into which a reminder does not fit.
        """
        if not text:
            return prompt_ids
        place, seam = self.place(prompt_ids), self._seam(prompt_ids)
        assert seam is not None
        message = _written(self._chat, seam, ChatMessage(role=self._role, content=text))
        return np.concatenate((prompt_ids[:place], np.asarray(message, prompt_ids.dtype), prompt_ids[place:]))

    def _seam(self, prompt_ids: Ids) -> _Seam | None:
        """The fitting seam with the longest opening."""
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
    """Every seam for messages of ``role``, longest opening first. Raises ``ValueError`` if a message does not fit."""
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
    """The ids of a message at a seam. Raises ``ValueError`` if the message changes the ids around it."""
    plain, longer = chat.open(seam.ending), chat.open([*seam.ending, message])
    start, end = len(plain) - len(seam.opening), len(longer) - len(seam.opening)
    if longer[:start] != plain[:start] or longer[end:] != list(seam.opening):
        raise ValueError(f"a message behind {seam.ending[-1].role!r} changes what is written around it")
    return longer[start:end]


def _opened(chat: ChatFormat, messages: Sequence[ChatMessage]) -> list[int] | None:
    """The ids of a conversation; ``None`` if the format rejects it."""
    try:
        return chat.open(messages)
    except ValueError:
        return None


def _behind(plain: Sequence[int], longer: Sequence[int]) -> tuple[int, ...]:
    """The ids of a conversation from the first difference to a longer one."""
    differs = (index for index, (a, b) in enumerate(zip(plain, longer, strict=False)) if a != b)
    return tuple(plain[next(differs, len(plain)) :])
