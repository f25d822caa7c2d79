"""Text of a model's token ids.

Wiring only: chat formats are :mod:`etude.tokens`'s, what a turn in words is :mod:`etude.rewards.transcript`'s.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from etude.rewards.transcript import SpokenTurn, read_turns
from etude.tokens.message_frames import Frames
from etude.tokens.messages import ChatFormat
from etude.types import Ids, Turn

TurnReader: TypeAlias = Callable[[Sequence[Turn]], Sequence[SpokenTurn]]
"""Puts the turns of a rollout into words."""


def decoder(chat: ChatFormat) -> Callable[[Ids], str]:
    """The function from a model's token ids to text."""
    return lambda token_ids: chat.decode(token_ids.tolist())


def turn_reader(chat: ChatFormat) -> TurnReader:
    """The function from a model's turns to readable turns, for its chat format."""
    decode, frames = decoder(chat), Frames(chat)
    return lambda turns: read_turns(turns, decode, frames.content)
