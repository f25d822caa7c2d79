"""The feedback of a live session's user, by part of the reward: signals in, a value or ``None`` for each part. Pure.

    signals about one session ──▶ newest of each turn and span ──▶ mean ──▶ part → value, or ``None`` without feedback

:mod:`etude.rewards.live.propensity` owns the treatment of missing feedback, and :mod:`etude.rewards.live.formula` the
weight of a value.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import fsum

from etude.config.feedback import SignalPart, SignalReward
from etude.types import JoinedSession, Observation, ObservedSession, Signal, SignalKind

DAY_S = 24 * 3600.0


def observed_session(joined: JoinedSession, config: SignalReward) -> ObservedSession:
    """The session as input for the models, after its window has closed; its reward is not yet set."""
    session = joined.session
    observation = Observation(
        user=session.user or session.session_id,  # a session without a user shares its history with no other
        day=int(session.opened_at // DAY_S),
        template=session.template,
        arm=session.arm,
        prompt_tokens=len(joined.turns[0].prompt_ids) if joined.turns else 0,
    )
    return ObservedSession(
        session_id=session.session_id,
        observation=observation,
        ended_at=session.opened_at if session.ended_at is None else session.ended_at,
        sampled_tokens=tuple(len(turn.completion_ids) for turn in joined.turns),
        answers=answers(joined.signals, config.parts, len(joined.turns)),
    )


def answers(signals: Iterable[Signal], parts: Sequence[SignalPart], turns: int) -> dict[str, tuple[float | None, ...]]:
    """Part → values, one for the session or one for each of ``turns``; ``None`` without feedback.

    If several signals have the same turn and span, the one that was received last counts, since users may change their
    minds. A value is the mean over turns and spans; a part by turn ignores signals about the whole session.
    """
    newest: dict[tuple[SignalKind, int | None, tuple[int, int] | None], Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.received_at, one.event_id)):
        newest[signal.kind, signal.turn, signal.span] = signal
    values_of: defaultdict[tuple[SignalKind, int | None], list[float]] = defaultdict(list)
    for (kind, turn, _), signal in newest.items():
        values_of[kind, turn].append(signal.value)
    of_session: defaultdict[SignalKind, list[float]] = defaultdict(list)
    for (kind, _), values in values_of.items():
        of_session[kind] += values
    return {
        part.name: tuple(_mean(values_of.get((part.kind, turn))) for turn in range(turns))
        if part.per == "turn"
        else (_mean(of_session.get(part.kind)),)
        for part in parts
    }


def _mean(values: Sequence[float] | None) -> float | None:
    return fsum(values) / len(values) if values else None
