"""``[loss]`` and ``[effort]``: the defaults that a choice implies; options without effect are refused."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from etude.config.loading import dump_toml, load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.training import (
    AGGREGATION_OPTIONS,
    AGGREGATIONS,
    BASELINES,
    CORRECTION_OPTIONS,
    LOSS_OPTIONS,
    MASK_OPTIONS,
    UNCLIPPED,
    Aggregation,
    CorrectionKind,
    EffortConfig,
    GspoOptions,
    LossConfig,
    LossKind,
    MaskKind,
    OffPolicyMaskOptions,
    corrections,
)
from etude.errors import ConfigError


def error_of(loss: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        LossConfig.model_validate(loss)
    return str(caught.value)


def test_the_default_is_a_truncated_policy_gradient_around_the_mean() -> None:
    config = LossConfig()
    assert (config.kind, config.correction, config.baseline) == ("policy_gradient", "tis", "mean")
    assert config.correction_options.model_dump() == {"cap": 2.0}
    assert config.reference_beta == 0
    assert RunConfig().loss == config


def test_every_choice_is_in_the_tables() -> None:
    assert set(BASELINES) == set(AGGREGATIONS) == set(get_args(LossKind))
    assert {one for kind in BASELINES for one in corrections(kind)} == set(get_args(CorrectionKind))
    assert set(LOSS_OPTIONS.classes) == set(BASELINES) - set(UNCLIPPED)
    assert set(AGGREGATION_OPTIONS.classes) <= set(get_args(Aggregation))
    assert set(CORRECTION_OPTIONS.classes) == set(get_args(CorrectionKind)) - {"none"}
    assert set(MASK_OPTIONS.classes) == set(get_args(MaskKind)) - {"none"}


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_kind_alone_is_a_whole_choice(kind: LossKind) -> None:
    """A kind alone selects the bounds of its paper; the printed config can be read back and is equal."""
    of_sums = {"aggregation_options": {"sequence_tokens": 40}} if kind == "dr_grpo" else {}
    config = LossConfig.model_validate({"kind": kind, **of_sums})
    assert config.correction == corrections(kind)[0]
    assert (config.baseline, config.aggregation) == (BASELINES[kind], AGGREGATIONS[kind])
    assert LossConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_recipe_reads_back_as_it_is_printed(tmp_path: Path) -> None:
    loss = {"kind": "gspo", "options": {"clip_high": 5e-4}, "sequence_mask": "off_policy", "reference_beta": 0.01}
    config = parse_config({"loss": loss, "effort": {"weight": 0.1, "prices": {"turns": 1.0}}}, source="test")
    (tmp_path / "run.toml").write_text(dump_toml(config), encoding="utf-8")
    assert load_recipe(tmp_path) == config
    assert config.loss.options == GspoOptions(clip_low=3e-4, clip_high=5e-4)
    assert config.loss.mask_options == OffPolicyMaskOptions(divergence=0.1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"kind": "grpo", "correction": "tis"},
            "'tis' does not go with loss.kind = 'grpo' and old_policy = 'engine': expected one of none, dec",
        ),
        ({"correction": "none", "correction_options": {"cap": 2.0}}, "no effect with loss.correction = 'none'"),
        ({"correction_options": {"floor": 0.5}}, "no effect with loss.correction = 'tis', it goes with 'icepop'"),
        ({"options": {"clip_low": 0.2}}, "no effect with loss.kind = 'policy_gradient'"),
        ({"mask_options": {"cap": 2.0}}, "no effect with loss.sequence_mask = 'none', it goes with 'ratio'"),
        ({"aggregation_options": {"sequence_tokens": 9}}, "no effect with loss.aggregation = 'token_mean'"),
        ({"correction_options": {"cap": 0.9}}, "greater than or equal to 1"),
        ({"sequence_mask": "ratio", "mask_options": {"cap": 0.5}}, "greater than or equal to 1"),
        ({"kind": "dr_grpo"}, "aggregation_options.sequence_tokens"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "aggregation_options.sequence_tokens"),
        (
            {"kind": "dr_grpo", "aggregation": "token_mean", "aggregation_options": {"sequence_tokens": 9}},
            "no effect with loss.aggregation = 'token_mean'",
        ),
        ({"options": {"old_policy": "recomputed"}}, "no effect with loss.kind = 'policy_gradient'"),
        ({"kind": "grpo", "options": {"old_policy": "recomputed"}, "correction": "decoupled"}, "does not go with"),
        ({"options": {"dual_clip": 3.0}}, "no effect with loss.kind = 'policy_gradient', it goes with 'grpo'"),
        ({"kind": "cispo", "options": {"dual_clip": 3.0}}, "no effect with loss.kind = 'cispo', it goes with 'grpo'"),
        ({"kind": "grpo", "options": {"dual_clip": 1.1}}, "dual_clip = 1.1 is within the clip, which ends at 1 + clip"),
        ({"kl_to": "engine"}, "loss.kl_to would have no effect with kl_coef = 0"),
        ({"kl_estimator": "k2"}, "loss.kl_estimator would have no effect with kl_coef = 0"),
        ({"kl_coef": 0.1, "kl_to": "engine", "reference_version": 3}, "loss.reference_version would have no effect"),
        ({"baseline": "median"}, "loss.baseline = 'median' is no baseline"),
        ({"reference_version": 3}, "loss.reference_version would have no effect with loss.reference_beta = 0"),
        ({"kind": "reinforce"}, "loss.kind = 'reinforce' is no loss"),
        ({"kind": ["grpo"]}, "Input should be a valid string"),
        ({"correction": 7}, "Input should be 'none'"),
        ({"correction_options": {"cap": ""}}, "Input should be a valid number"),
    ],
)
def test_what_would_change_nothing_is_refused(loss: dict[str, Any], message: str) -> None:
    assert message in error_of(loss)


def test_the_decoupled_form_needs_a_policy_between() -> None:
    tree: dict[str, Any] = {"loss": {"kind": "ppo_clip", "correction": "decoupled"}}
    with pytest.raises(ConfigError, match=r"'decoupled' would have no effect with rollouts\.max_staleness = 1"):
        parse_config(tree | {"rollouts": {"max_staleness": 1}}, source="test")
    assert parse_config(tree | {"rollouts": {"max_staleness": 2}}, source="test").loss.correction == "decoupled"


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
        (
            {"kind": "ppo_clip", "baseline": "mean_std", "options": {"clip_high": 0.28}},
            ("mean_std", "token_mean", "none"),
        ),
        ({"kind": "grpo", "aggregation": "token_mean"}, ("mean_std", "token_mean", "none")),
        # a clip around a recomputed π_old, and TIS for the engine
        ({"kind": "grpo", "options": {"old_policy": "recomputed"}}, ("mean_std", "seq_mean_token_mean", "tis")),
        ({"kind": "rloo", "baseline": "", "aggregation": ""}, ("leave_one_out", "seq_mean_token_sum", "tis")),
    ],
)
def test_baseline_and_average_are_choices_of_their_own(loss: dict[str, Any], chosen: tuple[str, str, str]) -> None:
    config = LossConfig.model_validate(loss)
    assert (config.baseline, config.aggregation, config.correction) == chosen
    assert LossConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_recomputed_policy_needs_tokens_that_an_older_one_sampled() -> None:
    tree: dict[str, Any] = {"loss": {"kind": "ppo_clip", "options": {"old_policy": "recomputed"}}}
    with pytest.raises(ConfigError, match=r"'recomputed' would have no effect with rollouts\.max_staleness = 0"):
        parse_config(tree | {"rollouts": {"max_staleness": 0}}, source="test")
    assert parse_config(tree | {"rollouts": {"max_staleness": 1}}, source="test").loss.correction == "tis"


def test_a_deviation_of_rewards_says_nothing_of_turns() -> None:
    tree: dict[str, Any] = {"credit": {"kind": "discounted", "options": {"discount": 0.9}}}
    with pytest.raises(ConfigError, match=r"does not go with loss\.baseline = 'mean_std'"):
        parse_config(tree | {"loss": {"kind": "ppo_clip", "baseline": "mean_std"}}, source="test")
    assert parse_config(tree | {"loss": {"kind": "grpo", "baseline": "mean"}}, source="test").loss.kind == "grpo"


def test_groups_that_a_reference_teaches_from_are_not_dropped() -> None:
    """Rollouts with equal rewards are at different distances from the reference: such a group has a gradient."""
    tree = {"rollouts": {"max_resamples": 4}, "loss": {"reference_beta": 0.01}}
    with pytest.raises(ConfigError, match=r"max_resamples = 4 .*loss\.reference_beta teaches from these, too"):
        parse_config(tree, source="test")
    in_the_loss = {"rollouts": {"max_resamples": 4}, "loss": {"kl_coef": 0.01}}
    assert parse_config(in_the_loss, source="test").rollouts.max_resamples == 4
