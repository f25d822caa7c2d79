"""Joined sessions to groups that the trainer claims, through the real ledger."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from etude.config.credit import CreditConfig, ShapedOptions
from etude.config.feedback import FeedbackConfig, PoisoningLimits, SignalPart, SignalReward
from etude.config.live import LiveConfig
from etude.config.recipe import RunConfig
from etude.config.rollouts import RolloutConfig
from etude.errors import ConfigError
from etude.ledger.ledger import LIVE, Ledger
from etude.run.batches import batch_of
from etude.run.live_rewards import LiveRewards
from etude.telemetry.log import EventLog
from etude.types import Finish, JoinedSession, LiveSession, Signal, SignalKind, Turn

PARTS = (
    SignalPart(name="liked", signal="thumbs", weight=1.0, range=(-1, 1)),
    SignalPart(name="undone", signal="reverted", weight=-2.0, range=(0, 1), per="turn", missing=0.0),
)
CONFIG = RunConfig(
    feedback=FeedbackConfig(reward=SignalReward(parts=PARTS), poisoning=PoisoningLimits(largest_share=0.25)),
    live=LiveConfig(groups_per_step=3),
    rollouts=RolloutConfig(max_staleness=1, groups_per_step=4, group_size=2, concurrency=8),
    credit=CreditConfig(kind="shaped", options=ShapedOptions(shaping=1.0)),
)


def turn(versions: list[int]) -> Turn:
    ids = np.arange(len(versions), dtype=np.int32)
    return Turn(prompt_ids=np.arange(3, dtype=np.int32), completion_ids=ids, logprobs=-np.ones(len(ids), np.float32),
                versions=np.array(versions, np.int32), finish=Finish.STOP)  # fmt: skip


def joined(
    name: str, user: str = "", versions: list[int] | None = None, *signals: tuple[SignalKind, float, int | None]
) -> JoinedSession:
    turns = (turn([0] if versions is None else versions), turn([0] if versions is None else versions))
    session = LiveSession(
        session_id=name, owner="key", name="", user=user, template="chat", region="", consent=True, opened_at=86_400.0,
        ended_at=86_460.0, arm="live", first_version=0, last_version=0, turns=2,
    )  # fmt: skip
    heard = tuple(
        Signal(event_id=f"{name}.{number}", session_id=name, kind=kind, value=value, turn=about, span=None, user=user,
               sent_at=0.0, received_at=float(number))
        for number, (kind, value, about) in enumerate(signals)
    )  # fmt: skip
    return JoinedSession(session=session, turns=turns, messages=("", ""), follows=(None, None), signals=heard)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.db") as opened:
        yield opened


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path, "feedback") as log:
        yield log


def test_what_users_said_becomes_advantages_of_the_turns_that_they_said_it_of(ledger: Ledger, events: EventLog) -> None:
    sink = LiveRewards(CONFIG, ledger, events)
    words = sink.take(
        [
            joined("a", "u1", None, (SignalKind.THUMBS, 1, None)),
            joined("b", "u2", None, (SignalKind.THUMBS, -1, None), (SignalKind.REVERTED, 1, 1)),
            joined("c", "u3"),
            joined("empty", "u4", []),
        ]
    )
    assert words == ["ready", "ready", "ready", "empty"]
    groups = ledger.claim_batch(1, 0, 3)
    assert groups is not None
    a, b, c = (group.rollouts[0] for group in groups)
    assert a.reward is not None and b.reward is not None and c.reward is not None
    assert a.reward >= 1 > c.reward > -1 >= b.reward, "an answer stands for silent ones, too"
    assert (b.turn_rewards, c.reward_parts["answered"]) == ((0.0, -2.0), 0.0)
    assert a.observation is not None and (a.observation.day, a.observation.prompt_tokens) == (1, 3)
    batch = batch_of(1, groups, {}, CONFIG)
    by_turn = {one.rollout_id: one.advantages[one.loss_mask] for one in batch.trajectories}
    assert by_turn["a"].min() > 0 > by_turn["b"].max()


def test_handed_on_again_after_a_crash_a_session_is_a_duplicate_and_the_next_process_knows_what_was_learnt(
    ledger: Ledger, events: EventLog
) -> None:
    sessions = [joined(str(number), f"u{number % 7}", None, (SignalKind.THUMBS, 1, None)) for number in range(5)]
    assert set(LiveRewards(CONFIG, ledger, events).take(sessions)) == {"ready"}
    successor = LiveRewards(CONFIG, ledger, events)
    assert set(successor.take(sessions)) == {"duplicate"}
    assert ledger.progress(LIVE).ready == 5
    assert [one.session_id for one in ledger.live.observed(9)] == list("01234")


def test_a_session_that_no_batch_is_early_enough_for_is_stale(ledger: Ledger, events: EventLog) -> None:
    """Two batches of three may be of version 0; version 1 has three places more."""
    sink = LiveRewards(CONFIG, ledger, events)
    words = sink.take([joined(str(number), f"u{number}") for number in range(8)])
    assert words == ["ready"] * 6 + ["stale"] * 2
    assert sink.take([joined("fresh", "x", [1, 1]), joined("begun before", "y", [0, 1])]) == ["ready", "stale"]


def test_a_program_takes_no_place_that_people_might_have(ledger: Ledger, events: EventLog) -> None:
    limits = PoisoningLimits(largest_share=0.25, per_hour=4)
    config = CONFIG.model_copy(update={"feedback": CONFIG.feedback.model_copy(update={"poisoning": limits})})
    sink = LiveRewards(config, ledger, events)
    thumbs = (SignalKind.THUMBS, -1.0, None)
    words = sink.take([joined(f"m{number}", "machine", None, thumbs) for number in range(6)])
    assert set(words) == {"quarantined"}
    assert sink.take([joined(f"o{number}", f"o{number}", None, thumbs) for number in range(6)]) == ["ready"] * 6
    assert sink.take([joined("m again", "machine")]) == ["quarantined"]
    assert ledger.progress(LIVE).dropped == 7


def test_another_formula_in_the_middle_of_a_run_is_refused_by_name(ledger: Ledger, events: EventLog) -> None:
    LiveRewards(CONFIG, ledger, events)
    heavier = (PARTS[0].model_copy(update={"weight": 3.0}), PARTS[1])
    other = CONFIG.model_copy(update={"feedback": FeedbackConfig(reward=SignalReward(parts=heavier))})
    with pytest.raises(ConfigError, match=r"\[feedback.reward\] is .* 'liked' has weight = 3.0 instead of 1.0"):
        LiveRewards(other, ledger, events)


def test_a_capped_user_weighs_less(ledger: Ledger, events: EventLog) -> None:
    sink = LiveRewards(CONFIG, ledger, events)
    sink.take([joined(f"{number}", "one" if number < 4 else f"u{number}") for number in range(6)])
    weights = [group.weight for group in ledger.groups(LIVE)]
    assert weights[0] < 0.5 and weights[5] == pytest.approx(1.0)


def test_what_a_successor_is_given_again_is_learnt_from_once(ledger: Ledger, tmp_path: Path) -> None:
    given = [joined(str(number), f"u{number % 3}", None, (SignalKind.THUMBS, 1, None)) for number in range(5)]
    with EventLog(tmp_path, "feedback") as events:
        LiveRewards(CONFIG, ledger, events).take(given)  # killed before the store knew
        successor = LiveRewards(CONFIG, ledger, events)
        assert set(successor.take(given)) == {"duplicate"}
        assert [one.session_id for one in successor._scorer.sessions] == ["0", "1", "2", "3", "4"]
