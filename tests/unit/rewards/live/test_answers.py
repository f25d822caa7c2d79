"""Answers of a session: the newest for each turn and span, and none where the user gave none."""

from random import Random

from etude.config.feedback import SignalPart
from etude.rewards.live.answers import answers
from etude.types import Signal, SignalKind

PARTS = (
    SignalPart(name="liked", signal="thumbs", weight=1.0, range=(-1, 1)),
    SignalPart(name="stayed", signal="kept", weight=1.0, range=(0, 1), per="turn"),
    SignalPart(name="stayed_overall", signal="kept", weight=1.0, range=(0, 1)),
    SignalPart(name="slow", signal="latency", weight=-0.1, range=(0, 60)),
)


def signal(
    kind: SignalKind, value: float, at: float, turn: int | None = None, span: tuple[int, int] | None = None
) -> Signal:
    return Signal(event_id=f"{kind}{at}", session_id="s", kind=kind, value=value, turn=turn, span=span, user="u",
                  sent_at=-at, received_at=at)  # fmt: skip


def test_the_newest_signal_about_a_turn_and_span_counts_and_a_missing_one_is_not_zero() -> None:
    signals = [
        signal(SignalKind.THUMBS, -1, 1),
        signal(SignalKind.THUMBS, 1, 2),  # thought better of it
        signal(SignalKind.KEPT, 0.0, 3, turn=0, span=(0, 9)),
        signal(SignalKind.KEPT, 1.0, 4, turn=0, span=(0, 9)),
        signal(SignalKind.KEPT, 0.5, 5, turn=0, span=(10, 19)),
        signal(SignalKind.KEPT, 0.25, 6, turn=2),
    ]
    Random(1).shuffle(signals)
    assert answers(signals, PARTS, 3) == {
        "liked": (1.0,),
        "stayed": (0.75, None, 0.25),
        "stayed_overall": ((1.0 + 0.5 + 0.25) / 3,),
        "slow": (None,),
    }
