"""``[loss]`` and ``[effort]``: what a choice brings along, and what is refused because it would change nothing."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from etude.config.loading import dump_toml, load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.training import (
    AGGREGATIONS,
    BASELINES,
    LOSS_BOUNDS,
    Aggregation,
    CorrectionKind,
    EffortConfig,
    LossConfig,
    LossKind,
    MaskKind,
    corrections,
)
from etude.errors import ConfigError


def error_of(loss: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        LossConfig.model_validate(loss)
    return str(caught.value)


def test_the_default_is_a_truncated_policy_gradient_around_the_mean() -> None:
    config = LossConfig()
    assert (config.kind, config.correction, config.cap, config.baseline) == ("policy_gradient", "tis", 2.0, "mean")
    assert config.reference_beta == 0
    assert RunConfig().loss == config


def test_every_choice_is_in_the_tables() -> None:
    assert set(BASELINES) == set(AGGREGATIONS) == set(get_args(LossKind))
    assert {one for kind in BASELINES for one in corrections(kind)} == set(get_args(CorrectionKind))
    choices = {*get_args(LossKind), *get_args(Aggregation), *get_args(CorrectionKind), *get_args(MaskKind)}
    assert set(LOSS_BOUNDS) <= choices
    assert {name for bounds in LOSS_BOUNDS.values() for name in bounds} <= set(LossConfig.model_fields)


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_kind_alone_is_a_whole_choice(kind: LossKind) -> None:
    """With the bounds of its paper, and printed so that it reads back as the same."""
    config = LossConfig.model_validate({"kind": kind} | ({"sequence_tokens": 40} if kind == "dr_grpo" else {}))
    assert config.correction == corrections(kind)[0]
    assert (config.baseline, config.aggregation) == (BASELINES[kind], AGGREGATIONS[kind])
    for name, bound in LOSS_BOUNDS.get(kind, {}).items():
        assert getattr(config, name) == (40 if name == "sequence_tokens" else bound)
    assert LossConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_recipe_reads_back_as_it_is_printed(tmp_path: Path) -> None:
    loss = {"kind": "gspo", "clip_high": 5e-4, "sequence_mask": "off_policy", "reference_beta": 0.01}
    config = parse_config({"loss": loss, "effort": {"weight": 0.1, "prices": {"turns": 1.0}}}, source="test")
    (tmp_path / "run.toml").write_text(dump_toml(config), encoding="utf-8")
    assert load_recipe(tmp_path) == config
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.mask_divergence) == (3e-4, 5e-4, 0.1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"kind": "grpo", "correction": "tis"},
            "'tis' does not go with loss.kind = 'grpo' and old_policy = 'engine': expected one of none, dec",
        ),
        ({"correction": "none", "cap": 2.0}, "loss.cap = 2 would have no effect with"),
        ({"floor": 0.5}, "loss.floor = 0.5 would have no effect with"),
        ({"clip_low": 0.2}, "loss.clip_low = 0.2 would have no effect with"),
        ({"mask_cap": 2.0}, "loss.mask_cap = 2 would have no effect with"),
        ({"sequence_tokens": 9}, "loss.sequence_tokens = 9 would have no effect with"),
        ({"cap": 0.9}, "loss.cap = 0.9 is below 1: on-policy tokens would be cut"),
        ({"sequence_mask": "ratio", "mask_cap": 0.5}, "loss.mask_cap = 0.5 is below 1"),
        ({"kind": "dr_grpo"}, "needs loss.sequence_tokens, the longest completion, say"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "needs loss.sequence_tokens"),
        ({"kind": "dr_grpo", "aggregation": "token_mean", "sequence_tokens": 9}, "sequence_tokens = 9 would have no"),
        ({"old_policy": "recomputed"}, "loss.old_policy would have no effect with kind = 'policy_gradient'"),
        ({"kind": "grpo", "old_policy": "recomputed", "correction": "decoupled"}, "does not go with"),
        ({"dual_clip": 3.0}, "loss.dual_clip would have no effect with kind = 'policy_gradient'"),
        ({"kind": "cispo", "dual_clip": 3.0}, "loss.dual_clip would have no effect with kind = 'cispo'"),
        ({"kind": "grpo", "dual_clip": 1.1}, "loss.dual_clip = 1.1 is within the clip, which ends at 1 + clip_high"),
        ({"kl_to": "engine"}, "loss.kl_to would have no effect with kl_coef = 0"),
        ({"kl_estimator": "k2"}, "loss.kl_estimator would have no effect with kl_coef = 0"),
        ({"kl_coef": 0.1, "kl_to": "engine", "reference_version": 3}, "loss.reference_version would have no effect"),
        ({"baseline": "median"}, "Input should be 'mean'"),
        ({"reference_version": 3}, "loss.reference_version would have no effect with loss.reference_beta = 0"),
        ({"kind": "reinforce"}, "Input should be 'policy_gradient'"),
        ({"kind": ["grpo"]}, "Input should be 'policy_gradient'"),
        ({"correction": 7}, "Input should be 'none'"),
        ({"cap": ""}, "Input should be a valid number"),
    ],
)
def test_what_would_change_nothing_is_refused(loss: dict[str, Any], message: str) -> None:
    assert message in error_of(loss)


def test_the_decoupled_form_needs_a_policy_between() -> None:
    tree: dict[str, Any] = {"loss": {"kind": "ppo_clip", "correction": "decoupled"}}
    with pytest.raises(ConfigError, match=r"'decoupled' would have no effect with rollouts\.max_staleness = 1"):
        parse_config(tree | {"rollouts": {"max_staleness": 1}}, source="test")
    assert parse_config(tree | {"rollouts": {"max_staleness": 2}}, source="test").loss.cap == 5.0


@pytest.mark.parametrize(
    ("effort", "message"),
    [
        ({"weight": 0.1}, "set effort.prices, of thinking_tokens, call_tokens"),
        ({"prices": {"turns": 0.1}}, "set effort.weight"),
        ({"weight": 0.1, "prices": {"turn": 0.1}}, "effort.prices has no 'turn': did you mean 'turns'"),
        ({"weight": 0.1, "prices": {"turns": -1.0}}, "effort.prices.turns = -1: expected a number above 0"),
        ({"curvature": 1.0}, "effort.curvature would have no effect with weight = 0"),
        (
            {"weight": 0.1, "prices": {"turns": 1.0}, "curvature": 0.0, "scale": 2.0},
            "effort.scale would have no effect",
        ),
        ({"weight": 0.1, "prices": {"thinking_tokens": 1.0}}, "without effort.thinking_end_id"),
        (
            {"weight": 0.1, "prices": {"turns": 1.0}, "thinking_end_id": 7},
            "effort.thinking_end_id would have no effect",
        ),
    ],
)
def test_effort_is_counted_and_priced_or_neither(effort: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EffortConfig.model_validate(effort)


def test_the_calls_of_an_external_harness_are_not_counted() -> None:
    options = {"command": ["agent", "{prompt}", "{temperature}"], "timeout_s": 20.0}
    harness = {"kind": "command", "options": options}
    with pytest.raises(ConfigError, match=r"effort\.prices\.calls would have no effect"):
        parse_config({"harness": harness, "effort": {"weight": 0.1, "prices": {"calls": 1.0}}}, source="test")


@pytest.mark.parametrize(
    ("loss", "chosen"),
    [
        # DAPO with the deviation, and GRPO by the token mean
        ({"kind": "ppo_clip", "baseline": "mean_std", "clip_high": 0.28}, ("mean_std", "token_mean", "none")),
        ({"kind": "grpo", "aggregation": "token_mean"}, ("mean_std", "token_mean", "none")),
        # a clip around a recomputed π_old, and TIS for the engine
        ({"kind": "grpo", "old_policy": "recomputed"}, ("mean_std", "seq_mean_token_mean", "tis")),
        ({"kind": "rloo", "baseline": "", "aggregation": ""}, ("leave_one_out", "seq_mean_token_sum", "tis")),
    ],
)
def test_baseline_and_average_are_choices_of_their_own(loss: dict[str, Any], chosen: tuple[str, str, str]) -> None:
    config = LossConfig.model_validate(loss)
    assert (config.baseline, config.aggregation, config.correction) == chosen
    assert LossConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_recomputed_policy_needs_tokens_that_an_older_one_sampled() -> None:
    tree: dict[str, Any] = {"loss": {"kind": "ppo_clip", "old_policy": "recomputed"}}
    with pytest.raises(ConfigError, match=r"'recomputed' would have no effect with rollouts\.max_staleness = 0"):
        parse_config(tree | {"rollouts": {"max_staleness": 0}}, source="test")
    assert parse_config(tree | {"rollouts": {"max_staleness": 1}}, source="test").loss.cap == 2.0


def test_a_deviation_of_rewards_says_nothing_of_turns() -> None:
    tree: dict[str, Any] = {"credit": {"kind": "discounted", "discount": 0.9}}
    with pytest.raises(ConfigError, match=r"does not go with loss\.baseline = 'mean_std'"):
        parse_config(tree | {"loss": {"kind": "ppo_clip", "baseline": "mean_std"}}, source="test")
    assert parse_config(tree | {"loss": {"kind": "grpo", "baseline": "mean"}}, source="test").loss.kind == "grpo"
