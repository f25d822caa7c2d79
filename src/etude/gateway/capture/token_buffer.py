"""The turns of one session, each branch of token ids kept once.

    tape    ▒▒▒▒▒▒███▒▒▒▒▒███▒▒▒▒▒▒▒▒▒▒ … room to grow        prompt of turn 0  ▒▒▒▒▒▒
    turn 0  ──────┤  ├ what it sampled                       prompt of turn 1  ▒▒▒▒▒▒███▒▒▒▒▒
    turn 1  ──────────────┤  ├                               prompt of turn 2  ▒▒▒▒▒▒███▒▒▒▒▒███▒▒▒▒▒▒▒▒▒▒
    turn 2  ───────────────────────────┤

Every turn of a conversation reads again what the turns before it read, so whole prompts would take memory with the
square of its length. All prompts of a branch are beginnings of one *tape*: a token that was read takes at most 6 bytes
however many turns read it, one that was sampled 12 more. Owns turns and their bounds. Which turn a prompt continues is
decided elsewhere (:mod:`etude.gateway.capture.conversations`); to be wrong about it costs memory, never a token. Pure.

Array legend: P prompt tokens of a turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from etude.types import Ids, Turn

MAX_TURNS = 4096
"""Model calls of one session: days of work, and some 4 KB each beside their tokens."""
MAX_TOKENS = 2**24
"""Tokens that one session holds: eighty windows of 200k."""
FIRST_BLOCK = 256
"""Ids that are compared at once to begin with: prompts of two branches mostly part early."""
NO_IDS: Ids = np.empty(0, np.int32)
"""The prompt of a turn that lies on a tape."""


class SessionFull(ValueError):
    """The session has all the turns or tokens that it may have; the message is for its caller."""


class Tape:
    """The token ids of one branch, as far as its turns have read it.

    What is on it never changes: ids are only written behind the last one, and only those of recorded prompts.
    """

    def __init__(self) -> None:
        self._ids = NO_IDS
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def beginning(self, tokens: int) -> Ids:
        """The first ``tokens`` ids, read-only and not copied."""
        ids = self._ids[:tokens]
        ids.flags.writeable = False
        return ids

    def agreement(self, ids: Ids) -> int:
        """How many ids, from the first, the tape and ``ids`` share. It takes as long as these are many."""
        shared, block, most = 0, FIRST_BLOCK, min(self._length, len(ids))
        while shared < most:
            end = min(shared + block, most)
            differs = self._ids[shared:end] != ids[shared:end]
            if differs.any():
                return shared + int(differs.argmax())
            shared, block = end, 2 * block
        return most

    def takes(self, ids: Ids) -> bool:
        """Whether ``ids`` are a beginning of the tape, or it is one of them."""
        return self.agreement(ids) == min(self._length, len(ids))

    def lay(self, ids: Ids) -> None:
        """Make ``ids``, which the tape takes, a beginning of it."""
        if len(ids) <= self._length:
            return
        if len(ids) > len(self._ids):
            longer = np.empty(len(ids) + len(ids) // 2, np.int32)
            longer[: self._length] = self._ids[: self._length]
            self._ids = longer
        self._ids[self._length : len(ids)] = ids[self._length :]
        self._length = len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TapedTurn:
    """A turn whose prompt lies on the tape of its branch."""

    tape: Tape
    prompt_tokens: int
    said: Turn
    """The turn without its prompt."""

    @property
    def prompt_ids(self) -> Ids:
        """[P] a view of the tape."""
        return self.tape.beginning(self.prompt_tokens)

    @property
    def tokens(self) -> int:
        """Of prompt and completion."""
        return self.prompt_tokens + len(self.said.completion_ids)

    def whole(self) -> Turn:
        """The turn as it was recorded."""
        return replace(self.said, prompt_ids=self.prompt_ids)


class Tapes:
    """All turns of one session, in the order in which they were recorded."""

    def __init__(self, *, max_turns: int = MAX_TURNS, max_tokens: int = MAX_TOKENS) -> None:
        self.tokens = 0
        """How many are held: those of every branch, and sampled ones once more."""
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._turns: list[TapedTurn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, turn: int) -> TapedTurn:
        return self._turns[turn]

    def whole(self) -> list[Turn]:
        """The turns as they were recorded; prompts of one branch are views of one array."""
        return [turn.whole() for turn in self._turns]

    def check_room(self, turns: int) -> None:
        """Raise :class:`SessionFull` unless ``turns`` more may be recorded.

        The last calls may go beyond the bound of tokens, by a context each: what they sample is not known before.
        """
        if len(self) + turns > self._max_turns:
            raise SessionFull(
                f"the session has had {len(self)} of its {self._max_turns} turns, {turns} more are wanted: "
                "raise gateway.max_session_turns, or open a new one"
            )
        if self.tokens >= self._max_tokens:
            raise SessionFull(
                f"the session holds {self.tokens} tokens, {self._max_tokens} is the most: "
                "raise gateway.max_session_tokens, or open a new one"
            )

    def record(self, turns: Sequence[Turn], continued: int | None) -> None:
        """Keep ``turns``, which have one prompt, as one that continues turn ``continued``, or none.

        Should it be none of that turn's branch, it gets a tape of its own.
        """
        prompt_ids = turns[0].prompt_ids
        tape = Tape() if continued is None else self._turns[continued].tape
        tape = tape if tape.takes(prompt_ids) else Tape()
        before = len(tape)
        tape.lay(prompt_ids)
        self.tokens += len(tape) - before + sum(len(turn.completion_ids) for turn in turns)
        for turn in turns:
            said = replace(turn, prompt_ids=NO_IDS)
            self._turns.append(TapedTurn(tape=tape, prompt_tokens=len(prompt_ids), said=said))

    def longest_beginning(self, ids: Ids) -> int | None:
        """The turn with the most tokens, prompt and completion, that ``ids`` begin with; the newest of equal ones."""
        best, most = None, 0
        agreements: dict[Tape, int] = {}
        for index, turn in enumerate(self._turns):
            if not most <= turn.tokens <= len(ids):
                continue
            if turn.tape not in agreements:
                agreements[turn.tape] = turn.tape.agreement(ids)
            behind = ids[turn.prompt_tokens : turn.tokens]
            if turn.prompt_tokens <= agreements[turn.tape] and np.array_equal(behind, turn.said.completion_ids):
                best, most = index, turn.tokens
        return best

    def copy(self) -> Self:
        """The same turns so far. Tapes are shared: whoever goes on first has them, the other one copies."""
        copied = type(self)(max_turns=self._max_turns, max_tokens=self._max_tokens)
        copied.tokens = self.tokens
        copied._turns = list(self._turns)
        return copied
