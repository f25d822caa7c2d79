"""Text of a model's token ids.

Wiring only: :mod:`etude.tokens` has chat formats, :mod:`etude.rewards.transcript` the text form of a turn.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from etude.harnesses.actions import read_calls
from etude.rewards.transcript import SpokenTurn, read_turns
from etude.tokens.message_frames import Frames
from etude.tokens.messages import ChatFormat
from etude.types import Ids, Turn, TurnKind

TurnReader: TypeAlias = Callable[[Sequence[Turn]], Sequence[SpokenTurn]]
"""Converts the turns of a rollout to text."""
ToolReader: TypeAlias = Callable[[Sequence[Turn]], Sequence[str]]
"""Names the tool that each turn of a rollout called first; ``""`` for a turn without calls."""


def decoder(chat: ChatFormat) -> Callable[[Ids], str]:
    """The function from a model's token ids to text."""
    return lambda token_ids: chat.decode(token_ids.tolist())


def turn_reader(chat: ChatFormat) -> TurnReader:
    """The function from a model's turns to readable turns, for its chat format."""
    decode, frames = decoder(chat), Frames(chat)
    return lambda turns: read_turns(turns, decode, frames.content)


def tool_reader(chat: ChatFormat, *, bare_shell: bool) -> ToolReader:
    """The function from a model's turns to tools; ``bare_shell`` as in :func:`~etude.harnesses.actions.read_calls`.
    Turns in which the model wrote a summary are excluded.
    """
    decode = decoder(chat)

    def read(turns: Sequence[Turn]) -> list[str]:
        acting = (turn for turn in turns if turn.kind is TurnKind.ACT)
        calls = (read_calls(decode(turn.completion_ids), bare_shell=bare_shell) for turn in acting)
        return [made[0][0] if made else "" for made in calls]

    return read
