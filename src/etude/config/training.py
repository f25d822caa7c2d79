"""``[model]``, ``[trainer]``, ``[loss]`` and their kin: what is trained and how."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section


class ModelShape(Section):
    """The shape of a Qwen3-MoE to train from random weights (``Qwen3MoeConfig``); a checkpoint has its own."""

    vocab_size: int = Field(default=576, ge=300)
    """Entries of the byte-level BPE, special tokens included."""
    hidden_size: int = Field(default=96, ge=16)
    """Width of the residual stream."""
    layers: int = Field(default=3, ge=1)
    """Transformer blocks."""
    heads: int = Field(default=3, ge=1)
    """Query heads per layer."""
    kv_heads: int = Field(default=3, ge=1)
    """Key/value heads per layer; must divide ``heads``."""
    head_dim: int = Field(default=32, ge=8)
    """Width of one head; must be even for rotary positions."""
    experts: int = Field(default=8, ge=2)
    """Experts per layer."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that each token is routed to."""
    expert_size: int = Field(default=64, ge=8)
    """Inner width of one expert."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        return self


class ModelConfig(Section):
    """``[model]``: the weights to start from."""

    checkpoint: str = ""
    """Folder of a Hugging Face checkpoint to start from, tokenizer included; empty starts from random weights."""
    impl: Literal["native", "hf"] = "native"
    """The trainer's implementation of the model: étude's own decoder, or transformers, for families without one in
    étude (``docs/models.md``). ``hf`` needs a vLLM or SGLang engine.
    """
    shape: Annotated[
        SerializeAsAny[ModelShape | Section],
        PlainValidator(OptionsOf("model", "checkpoint", {"": ModelShape}, "shape")),
    ] = Field(default_factory=Section, validate_default=True)
    """``[model.shape]``: the shape of random weights; a checkpoint has none of these keys."""


LossKind: TypeAlias = Literal["policy_gradient", "rloo", "grpo", "dr_grpo", "ppo_clip", "cispo", "gspo", "dppo"]
"""Names of losses; :mod:`etude.trainer.losses` has their equations."""


CorrectionKind: TypeAlias = Literal["none", "tis", "sequence_tis", "mis", "icepop", "sequence_mis", "decoupled"]
"""Corrections for tokens that another policy sampled; :mod:`etude.trainer.corrections` has their equations."""


MaskKind: TypeAlias = Literal["none", "ratio", "geometric", "off_policy"]
"""Masks of whole trajectories."""


ADVANTAGES = Registry(
    "loss.baseline",
    "baseline",
    {
        "mean": "etude.trainer.batching.advantage:around_mean",
        "mean_std": "etude.trainer.batching.advantage:standardised",
        "leave_one_out": "etude.trainer.batching.advantage:leave_one_out",
    },
)
"""Baselines of a reward by name: each is a function of a group's rewards and penalties that gives its advantages."""
Baseline: TypeAlias = str
"""A name of one."""
BASELINES: Mapping[str, Baseline] = {
    "policy_gradient": "mean",
    "rloo": "leave_one_out",
    "grpo": "mean_std",
    "dr_grpo": "mean",
    "ppo_clip": "mean",
    "cispo": "mean_std",
    "gspo": "mean_std",
    "dppo": "mean",
}
"""Kind of loss → the baseline that its paper pairs it with."""


Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
"""Averages over tokens, by verl's names for it (``loss_agg_mode``)."""
AGGREGATIONS: Mapping[str, Aggregation] = {
    "policy_gradient": "token_mean",
    "rloo": "seq_mean_token_sum",
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "ppo_clip": "token_mean",
    "cispo": "token_mean",
    "gspo": "seq_mean_token_mean",
    "dppo": "token_mean",
}
"""Kind of loss → the average that its paper pairs it with."""


OldPolicy: TypeAlias = Literal["engine", "recomputed"]
"""Source of the log-probabilities that a clipped loss takes the ratio to."""
WEIGHTS: tuple[CorrectionKind, ...] = ("tis", "none", "sequence_tis", "mis", "icepop", "sequence_mis")
"""Corrections by an importance weight, the default first."""
UNCLIPPED: tuple[LossKind, ...] = ("policy_gradient", "rloo")
"""Kinds without a ratio of their own."""


def corrections(kind: str, old_policy: OldPolicy = "engine") -> tuple[CorrectionKind, ...]:
    """The corrections that go with a kind of loss, the default first.

    A ratio to the engine is in a clipped loss by itself: another weight for the same ratio would count it twice.

    One of your own may do without, or with any of them.
    """
    if kind not in BASELINES:
        return get_args(CorrectionKind)
    return WEIGHTS if kind in UNCLIPPED or old_policy == "recomputed" else ("none", "decoupled")


class ClippedOptions(Section):
    """A ratio to the policy that sampled, held by bounds."""

    old_policy: OldPolicy = "engine"
    """Denominator of the ratio: the engine's own numbers, or the trainer's own numbers for the weights that sampled.
    Then ``correction`` is for the difference between the two.
    """
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε below 1 at which the ratio is clipped; 1 clips nothing there."""
    clip_high: float = Field(default=0.2, gt=0)
    """ε above 1."""


class DualClippedOptions(ClippedOptions):
    """PPO's clip, whose ratio has no upper bound of its own where the advantage is negative."""

    dual_clip: float = Field(default=0.0, ge=0)
    """Ratio above which tokens of a negative advantage are clipped, too (verl's ``clip_ratio_c``); 0: none."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"loss.options.dual_clip = {self.dual_clip:g} is within the clip, which ends at 1 + "
                             f"clip_high = {1 + self.clip_high:g}: set one above, such as 3")  # fmt: skip
        return self


class GspoOptions(DualClippedOptions):
    """GSPO's clip, of the geometric mean of a trajectory's ratios."""

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε below 1, the paper's."""
    clip_high: float = Field(default=4e-4, gt=0)
    """ε above 1, the paper's."""


class CispoOptions(ClippedOptions):
    """CISPO's bounds of a weight."""

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """ε below 1; 1 bounds nothing there, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0)
    """ε above 1, ScaleRL's."""


class DppoOptions(ClippedOptions):
    """DPPO's mask of tokens whose probability has moved too far."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Fall of a probability from which a token of a negative advantage is masked."""
    clip_high: float = Field(default=0.2, gt=0)
    """Rise of a probability from which one of a positive advantage is masked."""


class SumNormOptions(Section):
    """Sums of trajectories over a constant."""

    sequence_tokens: int = Field(ge=1)
    """The constant, the same for all trajectories: the longest completion, say."""


class CapOptions(Section):
    """A bound on the ratio of a token, or of a whole trajectory."""

    cap: float = Field(default=2.0, ge=1)
    """Ratio at which one is truncated (``tis``, ``sequence_tis``) or above which it is masked (others)."""


class IcepopOptions(Section):
    """Bounds between which the ratio of a token must be, or it is masked."""

    floor: float = Field(default=0.5, ge=0, le=1)
    """Tokens whose ratio is below are masked."""
    cap: float = Field(default=5.0, ge=1)
    """Tokens whose ratio is above are masked."""


class DecoupledOptions(Section):
    """A bound on the ratio of the policy between to the engine's."""

    cap: float = Field(default=5.0, ge=1)
    """Ratio above which a token is masked."""


class RatioMaskOptions(Section):
    """Bounds on the ratio of a whole trajectory."""

    floor: float = Field(default=0.5, ge=0, le=1)
    """Trajectories below are masked."""
    cap: float = Field(default=2.0, ge=1)
    """Trajectories above are masked."""


class GeometricMaskOptions(Section):
    """Bounds on the geometric mean of a trajectory's ratios."""

    floor: float = Field(default=0.99, ge=0, le=1)
    """Trajectories below are masked."""
    cap: float = Field(default=1.01, ge=1)
    """Trajectories above are masked."""


class OffPolicyMaskOptions(Section):
    """DeepSeek-V3.2's rule."""

    divergence: float = Field(default=0.1, ge=0)
    """Nats per token by which the policy may have left a trajectory whose advantage is negative."""


LOSSES = Registry(
    "loss.kind",
    "loss",
    {
        **dict.fromkeys(("policy_gradient", "rloo"), "etude.trainer.losses:policy_gradient"),
        **dict.fromkeys(("grpo", "dr_grpo", "ppo_clip"), "etude.trainer.losses:clipped"),
        "cispo": "etude.trainer.losses:cispo",
        "gspo": "etude.trainer.losses:gspo",
        "dppo": "etude.trainer.losses:dppo",
    },
)
"""Losses by name: functions of a :class:`~etude.trainer.losses.LossInput`, or classes that make one from options."""
LOSS_OPTIONS = OptionsOf(
    "loss",
    "kind",
    {
        **dict.fromkeys(("grpo", "dr_grpo", "ppo_clip"), DualClippedOptions),
        "gspo": GspoOptions,
        "cispo": CispoOptions,
        "dppo": DppoOptions,
    },
    names=LOSSES,
)
AGGREGATION_OPTIONS = OptionsOf(
    "loss", "aggregation", {"seq_mean_token_sum_norm": SumNormOptions}, "aggregation_options"
)
CORRECTION_OPTIONS = OptionsOf(
    "loss",
    "correction",
    {
        **dict.fromkeys(("tis", "sequence_tis", "mis", "sequence_mis"), CapOptions),
        "icepop": IcepopOptions,
        "decoupled": DecoupledOptions,
    },
    "correction_options",
)
MASK_OPTIONS = OptionsOf(
    "loss",
    "sequence_mask",
    {"ratio": RatioMaskOptions, "geometric": GeometricMaskOptions, "off_policy": OffPolicyMaskOptions},
    "mask_options",
)


class LossConfig(Section):
    """``[loss]``: the policy loss. Options that are left out have the values of the chosen paper."""

    kind: Annotated[str, AfterValidator(LOSSES)] = "policy_gradient"
    """The loss; it brings ``baseline`` and ``aggregation`` along unless these are set (``docs/losses.md``). Or one of
    your own (``docs/extending.md``).
    """
    options: Annotated[SerializeAsAny[Section], PlainValidator(LOSS_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[loss.options]``: bounds of the kind."""
    baseline: Annotated[Baseline, AfterValidator(ADVANTAGES)] = "mean"
    """Baseline of a reward: the group's mean, that over the group's deviation, or the mean of the others. Or a function
    of your own (``docs/extending.md``).
    """
    aggregation: Aggregation = "token_mean"
    """Average over tokens: all alike; by trajectory, then over these; as sums over trajectories; or as such sums
    divided by a constant.
    """
    aggregation_options: Annotated[SerializeAsAny[Section], PlainValidator(AGGREGATION_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[loss.aggregation_options]``: keys of the average."""
    correction: CorrectionKind = "tis"
    """Off-policy correction for tokens that another policy sampled; a clipped loss has ``none`` unless the recipe sets
    one.
    """
    correction_options: Annotated[SerializeAsAny[Section], PlainValidator(CORRECTION_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[loss.correction_options]``: bounds of the correction."""
    sequence_mask: MaskKind = "none"
    """Mask of whole trajectories: by their ratio, its geometric mean per token, or DeepSeek-V3.2's rule."""
    mask_options: Annotated[SerializeAsAny[Section], PlainValidator(MASK_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[loss.mask_options]``: bounds of the mask."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy of the distribution that each token was drawn from, added to the objective."""
    draft_learning_rate: float = Field(default=0.0, ge=0)
    """Peak learning rate of a draft head that is distilled from the policy, without gradient to the policy; above 0 the
    model has one, the checkpoint's or a new one (``engine.options.draft_tokens``). A new one needs a rate as for
    pretraining.
    """
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence of the policy from ``kl_to``, estimated token by token in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of it; ``docs/losses.md`` gives the gradient of each."""
    kl_to: Literal["reference", "engine"] = "reference"
    """Policy that the divergence is measured from: ``reference_version``, or whatever sampled the token."""
    reference_beta: float = Field(default=0.0, ge=0)
    """Reward subtracted per nat by which a rollout is likelier under its own policy than under the reference; 0: none.
    """
    reference_version: int = Field(default=0, ge=0)
    """The published weight version that is the reference."""

    @property
    def old_policy(self) -> OldPolicy:
        """Denominator of the ratio; ``engine`` of a kind that has none."""
        return self.options.old_policy if isinstance(self.options, ClippedOptions) else "engine"

    @property
    def sequence_tokens(self) -> int:
        """Divisor of a trajectory's sum; 1 of an average that has none."""
        options = self.aggregation_options
        return options.sequence_tokens if isinstance(options, SumNormOptions) else 1

    @property
    def scores_reference(self) -> bool:
        """True if the loss asks for the reference's log-probabilities."""
        return self.kl_coef > 0 and self.kl_to == "reference"

    @property
    def needs_reference(self) -> bool:
        """True if anything is measured from the reference."""
        return self.scores_reference or self.reference_beta > 0

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, given: Any) -> Any:
        """Put the papers' choices where the recipe says nothing, so that a resolved recipe shows them."""
        if not isinstance(given, Mapping):
            return given
        filled = dict(given)
        kind = filled.get("kind", "policy_gradient")
        if isinstance(kind, str):
            filled["baseline"] = filled.get("baseline") or BASELINES.get(kind, "mean")
            filled["aggregation"] = filled.get("aggregation") or AGGREGATIONS.get(kind, "token_mean")
            options = filled.get("options", {})
            recomputed = isinstance(options, Mapping | Section) and dict(options).get("old_policy") == "recomputed"
            filled.setdefault("correction", corrections(kind, "recomputed" if recomputed else "engine")[0])
        return filled

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        fitting = corrections(self.kind, self.old_policy)
        if self.correction not in fitting:
            raise ValueError(
                f"loss.correction = {self.correction!r} does not go with loss.kind = {self.kind!r} and old_policy = "
                f"{self.old_policy!r}: expected one of {', '.join(fitting)}"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if not self.kl_coef:
            self.refuse_idle("loss", ["kl_estimator", "kl_to"], "with kl_coef = 0")
        if not self.needs_reference:
            idle = "with loss.reference_beta = 0 and no loss.kl_coef to it"
            self.refuse_idle("loss", ["reference_version"], idle)
        return self


EFFORT_KINDS = ("thinking_tokens", "call_tokens", "final_tokens", "output_tokens", "calls", "turns")
"""Kinds of effort, by the fields of :class:`~etude.rewards.shaping.effort.Effort`."""
SAMPLED_KINDS = frozenset({"thinking_tokens", "call_tokens", "final_tokens"})
"""The sampled tokens among them."""


class EffortConfig(Section):
    """``[effort]``: the penalty weight · C(x) for a rollout's effort x; :mod:`etude.rewards.shaping.effort` has the
    equation.

    x is the sum over the kinds of effort: amount times price.
    """

    weight: float = Field(default=0.0, ge=0)
    """Reward subtracted per unit of C; 0: effort is free."""
    scale: float = Field(default=0.01, gt=0)
    """k: above x = 1/k, additional effort costs clearly less."""
    curvature: float = Field(default=0.5, ge=0)
    """q, the curvature of the cost: 0 is linear, 1 logarithmic, above 1 bounded."""
    prices: dict[str, float] = Field(default={})
    """Kind of effort → its price: ``thinking_tokens`` (sampled up to the end of a turn's thinking), ``call_tokens``
    (the other sampled tokens of all turns but the last), ``final_tokens`` (those of the last turn), ``output_tokens``
    (those that tools added to the context), ``calls`` (tool calls, malformed ones included), and ``turns`` (calls of
    the model).
    """
    thinking_end_id: int = Field(default=-1, ge=-1)
    """Id of the token that ends a turn's thinking; −1: the model does not think."""

    @model_validator(mode="after")
    def _check_prices(self) -> Self:
        for kind, price in self.prices.items():
            if kind not in EFFORT_KINDS:
                near = difflib.get_close_matches(kind, EFFORT_KINDS, n=1)
                fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(EFFORT_KINDS)}"
                raise ValueError(f"effort.prices has no {kind!r}: {fix}")
            if not price > 0:
                raise ValueError(f"effort.prices.{kind} = {price:g}: expected a number above 0, or leave it out")
        return self

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if bool(self.weight) != bool(self.prices):
            fix = f"set effort.prices, of {', '.join(EFFORT_KINDS)}" if self.weight else "set effort.weight"
            raise ValueError(f"effort.weight = {self.weight:g} and effort.prices have no effect apart: {fix}")
        for name, idle in (("curvature", not self.weight), ("scale", not (self.weight and self.curvature))):
            if idle and self.is_set(name):
                raise ValueError(f"effort.{name} would have no effect with weight = {self.weight:g} and curvature = "
                                 f"{self.curvature:g}; leave it out")  # fmt: skip
        if "thinking_tokens" in self.prices and self.thinking_end_id < 0:
            raise ValueError("effort.prices.thinking_tokens has no effect without effort.thinking_end_id; set it")
        if self.thinking_end_id >= 0 and not self.prices.keys() & SAMPLED_KINDS:
            raise ValueError("effort.thinking_end_id would have no effect: no sampled token has a price; leave it out")
        return self


class TrainerConfig(Section):
    """``[trainer]``: the RL optimiser."""

    steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Learning rate after the warm-up, of the optimiser that ``optimiser.kind`` names; Muon and the AdamW beside it
    share it.
    """
    warmup_steps: int = Field(default=4, ge=1)
    """Linear warm-up."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Learning-rate schedule, as in ``[midtrain]``."""
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Final share of the steps over which the rate of ``wsd`` falls, so that the policy settles."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm."""
    microbatch_tokens: int = Field(default=12_000, ge=64)
    """Tokens of one forward and backward pass; a longer sequence is a pass of its own."""
    checkpoint_activations: bool | Literal["auto"] = "auto"
    """Activation checkpointing: keep one hidden state per token and block and recompute the rest in the backward pass;
    a third more work for a fraction of the memory, with the same gradients. ``auto``: if the trainer has several ranks.
    """
    checkpoint_steps: int = Field(default=1, ge=1)
    """Steps between checkpoints. With more than 1, a trainer that died repeats the steps after its last checkpoint on
    the same batches, which must give the same bits (docs/control.md).
    """
    mismatch_share: float = Field(default=0.1, ge=0, le=1)
    """Share of each batch's rollouts on which trainer and engine logprobs are compared."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """``auto``: a GPU where torch finds one."""

    @property
    def recomputes(self) -> bool:
        """True if activations are computed again; ``auto`` that was not resolved is one process, which keeps them."""
        return self.checkpoint_activations is True

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "wsd":
            self.refuse_idle("trainer", ["decay_share"], f"with schedule = {self.schedule!r}")
        return self


OptimiserState: TypeAlias = Literal["fp32", "8bit", "offload"]
"""Ways to keep moments; :mod:`etude.trainer.moments` has them."""


class OptimiserConfig(Section):
    """``[optimiser]``: the optimiser of every phase."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalises the updates of the blocks' matrices, per head and per expert; embeddings, output matrix,
    gains and biases use AdamW. Both take the same learning rate.
    """
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""
    state: OptimiserState = "fp32"
    """Storage of the moments: float32 on the device; 8 bits a number there, in blocks with a scale each; or float32 in
    the host's memory, updated on the device to the same bits as ``fp32``.
    """

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if self.kind == "adamw":
            self.refuse_idle("optimiser", ["momentum"], "with optimiser.kind = 'adamw'")
        return self


class ParallelConfig(Section):
    """``[parallel]``: the processes that train together, and the division of their work.

    Their number is ``dp`` · ``cp``; all weights but the experts' are sharded over all of them. One process is the
    default; more are started by `etude train`.
    """

    dp: int = Field(default=1, ge=1)
    """Ranks, or groups of ``cp`` ranks, that train on sequences of their own."""
    imitation_dp: int = Field(default=0, ge=0)
    """The same in mid-training and SFT, when nothing else runs; 0: ``dp``."""
    cp: int = Field(default=1, ge=1)
    """Ranks over which each sequence is split."""
    ep: int = Field(default=1, ge=1)
    """Ranks over which the experts of a layer are spread (expert parallelism); ranks with the same experts shard them.
    """
    sharding: Literal["full", "none"] = "full"
    """``full``: weights, gradients and moments are sharded over all ranks (FSDP). ``none``: each rank has all of them,
    and only gradients are added up (DDP): for small models, where gathering weights takes longer than computing.
    """

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.dp * self.cp

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for key, dp in (("dp", self.dp), ("imitation_dp", self.imitation_dp)):
            if dp * self.cp % self.ep:
                raise ValueError(f"parallel.ep={self.ep} must divide {key} * cp = {dp * self.cp}")
        if self.sharding == "none" and self.ep > 1:
            raise ValueError(f"parallel.sharding = 'none' has all experts on each rank: leave ep = {self.ep} out")
        return self

    @property
    def shards(self) -> int:
        """Processes over which weights, gradients and moments are divided."""
        return self.ranks if self.sharding == "full" else 1

    @property
    def imitation(self) -> Self:
        """The same in mid-training and SFT."""
        return self.model_copy(update={"dp": self.imitation_dp or self.dp})
