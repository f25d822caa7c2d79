"""Live sessions for tests: turns of a few tokens, and events about them."""

from collections.abc import Sequence

import numpy as np

from etude.feedback.signals import Event
from etude.types import Finish, LiveAnswer, LiveSession, SignalKind, Turn

OWNER = "product"
"""Id of the production key of all sessions here."""


def live_turn(prompt: Sequence[int], sampled: Sequence[int], version: int = 1) -> Turn:
    """A turn of these tokens."""
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(sampled, np.int32),
        logprobs=np.full(len(sampled), -0.5, np.float32),
        versions=np.full(len(sampled), version, np.int32),
        finish=Finish.STOP,
    )


def live_session(session_id: str, name: str = "", *, opened_at: float = 0.0, owner: str = OWNER) -> LiveSession:
    """A session that has just been opened."""
    return LiveSession(
        session_id=session_id,
        owner=owner,
        name=name,
        user="someone",
        template="chat",
        region="eu",
        consent=True,
        opened_at=opened_at,
        ended_at=None,
        arm="live",
        first_version=None,
        last_version=None,
        turns=0,
    )


def answer(session: LiveSession, first: int = 0, *, earlier: Turn | None = None, message: str = "go") -> LiveAnswer:
    """The answer to one call, ``completion`` c0, c1, … by its turn; it continues ``earlier``, the turn before."""
    prompt = [1, 2, first] if earlier is None else [*earlier.prompt_ids, *earlier.completion_ids, 9, first]
    return LiveAnswer(
        session=session,
        first=first,
        turns=(live_turn(prompt, [3, 4], version=first + 1),),
        completion=f"{session.session_id}c{first}",
        follows=None if earlier is None else first - 1,
        earlier=earlier,
        message=message,
    )


def event(
    event_id: str, session: str = "", *, turn: int | None = None, completion: str = "", value: float = 1
) -> Event:
    """A thumb up or down."""
    return Event(
        event_id=event_id, kind=SignalKind.THUMBS, value=value, session=session, turn=turn, completion=completion
    )
