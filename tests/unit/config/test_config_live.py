"""``[live]`` and ``[feedback.reward]``: options that would have no effect, or could not work, are refused."""

from typing import Any

import pytest

from etude.config.loading import parse_config
from etude.config.rollouts import RolloutConfig
from etude.errors import ConfigError
from etude.ledger.changes import LIVE, TRAIN
from etude.rollouts.admission import Admission

LIKED: dict[str, Any] = {"name": "liked", "signal": "thumbs", "weight": 1.0, "range": [-1.0, 1.0]}
RECIPE: dict[str, Any] = {"feedback": {"reward": {"parts": [LIKED]}}, "live": {"groups_per_step": 8}}


def refused(change: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**RECIPE, **change}, source="live.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss": {"baseline": "mean_std"}}, "loss.baseline = 'mean_std'"),
        ({"loss": {"kind": "grpo"}}, "loss.baseline = 'mean_std'"),
        ({"rollouts": {"max_resamples": 4}}, "rollouts.max_resamples"),
        ({"credit": {"kind": "shared_prefix", "options": {"branches": 2}}}, "credit.kind = 'shared_prefix'"),
        ({"reward": {"shuffled": True}}, "reward.shuffled"),
    ],
)
def test_what_needs_other_rollouts_of_a_group_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    message = refused(change)
    assert named in message and "group of one" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"feedback": {}}, "live.groups_per_step = 8 has nothing to learn from"),
        ({"live": {"baseline": "value_model"}}, "live.baseline would have no effect"),
        ({"live": {"groups_per_step": 8, "after_steps": 100}}, "live.after_steps = 100 leaves no step"),
        ({"release": {"every_steps": 5}, "rollouts": {"max_staleness": 3}}, "release.every_steps = 5 is above"),
        ({"live": {"groups_per_step": 8, "baseline": "means"}}, "live.baseline = 'means' is no baseline"),
        ({"loss": {"kind": "ppo_clip", "options": {"old_policy": "recomputed"}}}, "after a rollback"),
        ({"feedback": {"reward": {"parts": [{**LIKED, "per": "turn"}]}}}, "set credit.kind = 'shaped'"),
        ({"feedback": {"reward": {"parts": [LIKED, LIKED]}}}, "two are called 'liked'"),
        ({"feedback": {"reward": {"parts": [{**LIKED, "signal": "reverted"}]}}}, "set missing = 0.0"),
        ({"feedback": {"reward": {"parts": [{**LIKED, "missing": 7.0}]}}}, "missing = 7 is outside"),
    ],
)
def test_the_message_names_the_key_and_the_fix(change: dict[str, Any], named: str) -> None:
    assert named in refused(change)


def test_turns_may_be_rewarded_by_signals_whatever_the_harness() -> None:
    by_turn = {"feedback": {"reward": {"parts": [{**LIKED, "per": "turn"}]}}}
    credit = {"credit": {"kind": "shaped", "options": {"shaping": 1.0}}}
    harness = {"harness": {"kind": "single_turn"}, "tasks": {"family": "nextedit"}}
    config = parse_config({**RECIPE, **by_turn, **credit, **harness}, source="live.toml")
    assert config.feedback.reward.is_by_turn


def test_batches_are_simulated_first_and_then_what_live_says() -> None:
    live = {"groups_per_step": 8, "simulated_groups_per_step": 2, "after_steps": 3}
    config = parse_config({**RECIPE, "live": live}, source="live.toml")
    rollouts = RolloutConfig(groups_per_step=4, group_size=2, max_staleness=1, concurrency=8)
    admission = Admission(rollouts, steps=10, live=config.live)
    assert [admission.plan.groups(TRAIN, batch) for batch in range(5)] == [4, 4, 4, 2, 2]
    assert [admission.plan.groups(LIVE, batch) for batch in range(5)] == [0, 0, 0, 8, 8]
    assert [admission.window(version) for version in range(4)] == [8, 12, 14, 16]
    assert [admission.window(version, 0, LIVE) for version in range(4)] == [0, 0, 8, 16]
    assert admission.window(5, 2) == admission.window(3)
    assert (admission.groups_needed(), admission.groups_needed(1, LIVE)) == (26, 48)
