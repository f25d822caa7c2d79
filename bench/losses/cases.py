"""The cases of `bench losses`: a recipe's ``[loss]``, and what TRL or verl calls the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEQUENCE_TOKENS = 12
"""Divisor of ``seq_mean_token_sum_norm``, here and there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss under two names."""

    contestant: str
    name: str
    loss: Mapping[str, Any]
    """``[loss]``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings by the other system's names, and ``old``, ``weights`` for its inputs."""
    has_value: bool = True
    """True if the losses are the same numbers, too."""


def _trl(name: str, loss: Mapping[str, Any], *, has_value: bool = True, **settings: Any) -> Case:
    return Case(contestant="trl", name=name, loss=loss, settings=settings, has_value=has_value)


def _verl(name: str, loss: Mapping[str, Any], *, has_value: bool = True, **settings: Any) -> Case:
    bounds = {"mode": "vanilla", "low": 0.2, "high": 0.2}
    return Case(contestant="verl", name=name, loss=loss, settings=bounds | settings, has_value=has_value)


def _weights(mode: str, low: float, high: float) -> dict[str, Any]:
    return {"mode": mode, "low": low, "high": high}


TIS2 = _weights("token_truncate", 0.0, 2.0)
GRPO = {"kind": "grpo"}
DR_GRPO = {"kind": "dr_grpo", "aggregation_options": {"sequence_tokens": SEQUENCE_TOKENS}}
GSPO = {"kind": "gspo", "options": {"clip_low": 0.05, "clip_high": 0.05}}
RECOMPUTED = {"options": {"old_policy": "recomputed"}}
CASES: tuple[Case, ...] = (
    # log-probabilities as they are trained, weighted: the ratio to itself there
    *(
        _trl(f"dapo, {mode} {low:g} to {high:g}", {"correction": correction}, weights=_weights(mode, low, high),
             has_value=False)
        for mode, low, high, correction in (
            ("token_truncate", 0.0, 2.0, "tis"),
            ("token_mask", 0.0, 2.0, "mis"),
            ("token_mask", 0.5, 5.0, "icepop"),
            ("sequence_truncate", 0.0, 2.0, "sequence_tis"),
            ("sequence_mask", 0.0, 2.0, "sequence_mis"),
        )
    ),
    # a ratio to the engine
    _trl("grpo", GRPO, loss_type="grpo", old="engine"),
    _trl("dr_grpo", DR_GRPO, loss_type="dr_grpo", old="engine",
         max_completion_length=SEQUENCE_TOKENS),
    _trl("dapo, ε 0.2 and 0.28", {"kind": "ppo_clip", "options": {"clip_high": 0.28}}, epsilon_high=0.28, old="engine"),
    _trl("bnpo", {"kind": "ppo_clip"}, loss_type="bnpo", old="engine"),
    _trl("cispo, at most 5", {"kind": "cispo"}, loss_type="cispo", epsilon_high=5.0, old="engine"),
    _trl("grpo by sequence (GSPO)", GSPO, loss_type="grpo",
         importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.05, old="engine"),
    # a ratio to a recomputed policy, and a weight for the engine: TRL's default with vLLM
    *(
        _trl(f"{name}, old recomputed, {mode}", {**loss, **RECOMPUTED, "correction": correction},
             loss_type=name, old="recomputed", weights=_weights(mode, low, 2.0))
        for name, loss in (("grpo", GRPO), ("dapo", {"kind": "ppo_clip"}))
        for mode, low, correction in (("token_truncate", 0.0, "tis"), ("sequence_mask", 0.0, "sequence_mis"))
    ),
    # options
    _trl("grpo, delta 3", GRPO | {"options": {"dual_clip": 3.0}}, loss_type="grpo", delta=3.0, old="engine"),
    _trl("grpo, delta 1.3", GRPO | {"options": {"dual_clip": 1.3}}, loss_type="grpo", delta=1.3, old="engine"),
    _trl("grpo, beta 0.1 (k3)", GRPO | {"kl_coef": 0.1}, loss_type="grpo", beta=0.1, old="engine"),
    _trl("dapo, entropy 0.1", {"kind": "ppo_clip", "entropy_coef": 0.1}, entropy_coef=0.1, old="engine"),
    _trl("dapo, off-policy mask 0.1", {"kind": "ppo_clip", "sequence_mask": "off_policy"}, old="engine",
         off_policy_mask_threshold=0.1),
    _trl("dapo, old recomputed, off-policy mask 0.1",
         {"kind": "ppo_clip", "sequence_mask": "off_policy", **RECOMPUTED}, old="recomputed",
         weights=TIS2, off_policy_mask_threshold=0.1),
    # verl
    _verl("vanilla, token-mean", {"kind": "ppo_clip"}),
    _verl("vanilla, seq-mean-token-mean", GRPO, average="seq-mean-token-mean"),
    _verl("vanilla, seq-mean-token-sum", {"kind": "ppo_clip", "aggregation": "seq_mean_token_sum"},
          average="seq-mean-token-sum"),
    _verl("vanilla, seq-mean-token-sum-norm", DR_GRPO,
          average="seq-mean-token-sum-norm", scale=SEQUENCE_TOKENS),
    _verl("vanilla, dual clip 3", {"kind": "ppo_clip", "options": {"dual_clip": 3.0}}, dual=3.0),
    _verl("vanilla, dual clip 1.3", {"kind": "ppo_clip", "options": {"dual_clip": 1.3}}, dual=1.3),
    _verl("vanilla, old recomputed, dual clip 3, TIS 2",
          {"kind": "ppo_clip", "options": {"old_policy": "recomputed", "dual_clip": 3.0}}, dual=3.0, old="recomputed",
          cap=2.0),
    _verl("gspo", GSPO, mode="gspo", low=0.05, high=0.05,
          average="seq-mean-token-mean"),
    _verl("cispo, 0 to 5", {"kind": "cispo"}, mode="cispo", low=1.0, high=4.0),
    _verl("dppo_tv", {"kind": "dppo"}, mode="dppo_tv", has_value=False),
    *(
        _verl(f"vanilla, {one} 0.1", {"kind": "ppo_clip", "kl_coef": 0.1, "kl_estimator": one}, kl=one, kl_coef=0.1)
        for one in ("k1", "k2", "k3")
    ),
    *(
        _verl(f"vanilla, entropy 0.1, {average}", {"kind": "ppo_clip", "entropy_coef": 0.1, "aggregation": own},
              entropy=0.1, average=average)
        for average, own in (("token-mean", "token_mean"), ("seq-mean-token-mean", "seq_mean_token_mean"))
    ),
)  # fmt: skip
