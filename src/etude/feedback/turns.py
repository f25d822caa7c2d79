"""Storage format of a live session's turns: one record each, with only its new tokens.

    turn 0   prompt ▒▒▒▒▒▒  sampled ███                  record: follows nothing, ▒▒▒▒▒▒ and ███
    turn 1   prompt ▒▒▒▒▒▒███▒▒▒▒  sampled ████          record: follows turn 0, ▒▒▒▒ and ████

Each turn is written separately after it is sampled, and its prompt repeats earlier turns; so a record has only the rest
of its prompt. When decoded, the prompts of one branch are views of one array, like a session's in the gateway.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from etude.errors import DamagedError
from etude.ledger.turns import decode_turns, encode_turns
from etude.types import Ids, Turn


class DamagedSession(DamagedError):
    """The stored turns of a live session cannot be read."""

    def __init__(self, session_id: str, why: str) -> None:
        super().__init__(f"the turns of live session {session_id} cannot be read: {why}; delete it")
        self.session_id = session_id


def encode_turn(turn: Turn, earlier: Turn | None) -> tuple[bytes, int]:
    """The record of a turn, and the number of omitted tokens: those of ``earlier`` if the turn continues it, else 0."""
    shared = earlier.length if earlier is not None and turn.continues(earlier) else 0
    return encode_turns([replace(turn, prompt_ids=turn.prompt_ids[shared:])]), shared


def decode_records(records: Sequence[tuple[bytes, int | None, int]], name: str) -> tuple[Turn, ...]:
    """The turns of a session from all its records, in order: bytes, index of the continued turn, shared tokens.

    Raises :class:`DamagedSession`, which names the session ``name``.
    """
    try:
        turns = [decode_turns(record)[0] for record, _, _ in records]
        links = [follows if shared else None for _, follows, shared in records]
        prompts = _prompts(turns, links)
        for index, (_, _, shared) in enumerate(records):
            if len(prompts[index]) != shared + len(turns[index].prompt_ids):
                raise ValueError(f"turn {index} continues {shared} tokens, and there are others")
    except (ValueError, IndexError) as error:
        raise DamagedSession(name, str(error)) from error
    return tuple(replace(turn, prompt_ids=prompt) for turn, prompt in zip(turns, prompts, strict=True))


def _prompts(turns: Sequence[Turn], links: Sequence[int | None]) -> list[Ids]:
    """The whole prompt of each turn. The newest turn of a branch owns the array; earlier turns get views of it."""
    whole: list[Ids | None] = [None] * len(turns)
    for newest in reversed(range(len(turns))):
        if whole[newest] is not None:
            continue
        way = [newest]
        while (earlier := links[way[-1]]) is not None:
            if not 0 <= earlier < way[-1]:
                raise ValueError(f"turn {way[-1]} continues turn {earlier}")
            way.append(earlier)
        parts: list[Ids] = []
        ends: list[int] = []
        length = 0
        for index in reversed(way):
            parts += [turns[index].prompt_ids, turns[index].completion_ids]
            ends.append(length + len(turns[index].prompt_ids))
            length += turns[index].length
        branch = np.concatenate(parts[:-1]).astype(np.int32, copy=False)
        branch.flags.writeable = False
        for index, end in zip(reversed(way), ends, strict=True):
            if whole[index] is None:
                whole[index] = branch[:end]
    return [prompt for prompt in whole if prompt is not None]
