"""The policy losses of reinforcement learning, one function each, and their shared parts.

    L = −Σ_t a_t · (w_t · ℓ(r_t, A_t) − κ · k_t + η · H_t)

ℓ is the term of a token, which depends on the kind of loss: a function of its advantage A
(:mod:`etude.trainer.batching.advantage`) and, in the clipped kinds, of its ratio r = π_θ / π_anchor. w corrects for the
policy that sampled the token and is a constant of the gradient (:mod:`etude.trainer.corrections`). a averages tokens; k
estimates a divergence and H is the entropy of the distribution that the token was drawn from, both added as in verl and
TRL: neither weighted nor clipped nor masked. There is one optimiser step per batch, so the papers' "old" policy is the
one that sampled. The anchor is μ, the probabilities that the engine reported; or π_old, which the trainer computes with
the same weights; or π_prox in the decoupled form.

Every normaliser is that of the *whole* batch, computed before its first forward pass: losses of micro-batches, on any
number of ranks, add up to the batch's loss. Normalisers include masked tokens, for the same reason and because leaving
out some tokens must not make the others count more.

Owns the losses as functions of log-probabilities. The distribution of these is defined in
:mod:`etude.trainer.sampling_mask`.

Shape legend: N loss tokens of a micro-batch, S its trajectories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from etude.config.training import LOSSES, Aggregation, ClippedOptions, DualClippedOptions, LossConfig
from etude.trainer.corrections import Correction, correct, trajectory_means

LARGEST_LOG_RATIO = 20.0
"""The largest log-ratio, as in verl (``core_algos.py``): a larger one means that something is broken, and an
exponential that overflows has a NaN gradient even where it is clipped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The loss tokens of one micro-batch: N tokens of S whole trajectories."""

    logprobs_N: Tensor
    """log π_θ, with gradient: under the distribution that a model with the trainer's weights would have sampled from,
    at the token's temperature and over its sampling mask.
    """
    engine_logprobs_N: Tensor
    """log μ, at the version that sampled the token."""
    advantages_N: Tensor
    """The same for all tokens of a turn; with the default ``[credit]``, for all tokens of a trajectory."""
    trajectories_N: Tensor
    """int64, ascending: index of the token's trajectory in the micro-batch, 0 … S−1."""
    proximal_logprobs_N: Tensor | None = None
    """log π_prox of the decoupled form, or the recomputed log π_old; ``None``: log π_θ, detached."""
    reference_logprobs_N: Tensor | None = None
    """log π_ref, if the loss uses it."""
    entropies_N: Tensor | None = None
    """H, with gradient, if the loss uses it."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Loss normalisers: totals of the whole batch, over all micro-batches and ranks."""

    tokens: int
    """Loss tokens."""
    trajectories: int
    sampled: int = 0
    """Sampled tokens, including those of groups without a signal."""
    sampled_trajectories: int = 0
    """Trajectories with sampled tokens, including those of groups without a signal."""
    lost_tokens: float = 0.0
    """Estimated loss tokens of the rollouts that were lost to infrastructure."""
    lost_trajectories: float = 0.0
    """Estimated trajectories of those rollouts."""

    @property
    def planned_tokens(self) -> float:
        """T, the divisor of averages over tokens. It includes lost tokens, so that losses do not enlarge the step."""
        return self.tokens + self.lost_tokens

    @property
    def planned_trajectories(self) -> float:
        """S, the divisor of averages over trajectories; includes lost ones."""
        return self.trajectories + self.lost_trajectories


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A micro-batch's share of the step's loss, and sums for its statistics."""

    loss: Tensor
    """Scalar with gradient; summed over micro-batches (and ranks) it is the loss of the step."""
    truncated: int
    """Loss tokens whose importance weight was capped; they still have a gradient."""
    masked: int
    """Loss tokens excluded by a correction or clip: they have no gradient."""


def policy_loss(tokens: LossTokens, config: LossConfig, totals: Totals) -> PolicyLoss:
    """The policy loss of a micro-batch, as ``config`` selects it; 0, with a gradient of 0, if there are no tokens."""
    if not len(tokens.logprobs_N):
        return PolicyLoss(tokens.logprobs_N.sum(), truncated=0, masked=0)
    proximal_N = tokens.proximal_logprobs_N
    if proximal_N is None:
        proximal_N = tokens.logprobs_N.detach()
    gaps_N = tokens.logprobs_N.detach() - tokens.engine_logprobs_N
    log_ratios_N = proximal_N - tokens.engine_logprobs_N
    correction = correct(log_ratios_N, gaps_N, tokens.advantages_N, tokens.trajectories_N, config)
    has_anchor = config.correction == "decoupled" or config.old_policy == "recomputed"
    anchors_N = proximal_N if has_anchor else tokens.engine_logprobs_N
    surrogate = loss_of(config)(LossInput(tokens, anchors_N, correction, config))
    terms_N = surrogate.terms_N
    if config.kl_coef:
        terms_N = terms_N - config.kl_coef * divergence_terms(tokens, config)
    if config.entropy_coef:
        assert tokens.entropies_N is not None, "the loss asks for entropies"
        terms_N = terms_N + config.entropy_coef * tokens.entropies_N
    masked_N = correction.masked_N | surrogate.clipped_N
    truncated_N = (correction.truncated_N | surrogate.capped_N) & ~masked_N
    loss = -aggregate(terms_N, tokens.trajectories_N, config, totals)
    return PolicyLoss(loss, truncated=int(truncated_N.sum()), masked=int(masked_N.sum()))


def aggregate(terms_N: Tensor, trajectories_N: Tensor, config: LossConfig, totals: Totals) -> Tensor:
    """A micro-batch's share of the average over the batch.

    T counts the loss tokens of the batch, S its trajectories, |o_i| the loss tokens of trajectory i:

        token_mean               (1/T) Σ_t
        seq_mean_token_mean      (1/S) Σ_i (1/|o_i|) Σ_t      every trajectory counts the same
        seq_mean_token_sum       (1/S) Σ_i Σ_t
        seq_mean_token_sum_norm  (1/(S·L)) Σ_i Σ_t            L is ``sequence_tokens``, a constant
    """
    kind: Aggregation = config.aggregation
    match kind:
        case "token_mean":
            return terms_N.sum() / totals.planned_tokens
        case "seq_mean_token_mean":
            lengths_S = torch.bincount(trajectories_N)
            return (terms_N / lengths_S[trajectories_N]).sum() / totals.planned_trajectories
        case "seq_mean_token_sum":
            return terms_N.sum() / totals.planned_trajectories
        case "seq_mean_token_sum_norm":
            return terms_N.sum() / (totals.planned_trajectories * config.sequence_tokens)


def divergence_terms(tokens: LossTokens, config: LossConfig) -> Tensor:
    """[N] estimates of KL(π_θ ‖ q), where q is the reference or the policy that sampled; d = log π_θ − log q.

    k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d (J. Schulman, "Approximating KL divergence", 2020), differentiated directly,
    as with verl's ``kl_loss_type`` and TRL's ``beta`` (k3). For tokens sampled from π_θ, the mean gradient of k1 is 0,
    that of k2 is the gradient of the divergence, that of k3 is the gradient of KL(q ‖ π_θ).
    """
    others_N = tokens.reference_logprobs_N if config.kl_to == "reference" else tokens.engine_logprobs_N
    assert others_N is not None, "the loss asks for a reference"
    gaps_N = tokens.logprobs_N - others_N
    match config.kl_estimator:
        case "k1":
            return gaps_N
        case "k2":
            return 0.5 * gaps_N**2
        case "k3":
            return torch.expm1(-gaps_N) + gaps_N


def distillation_normaliser(config: LossConfig, totals: Totals) -> float:
    """Divisor of distillation terms (:mod:`etude.trainer.distillation`): the divisor of a sum over tokens in the loss
    of ``config`` if every group of the batch had a signal.

    In an average over trajectories of |o| tokens each, a token has the weight 1/(S·|o|), which is 1/T on average.
    """
    match config.aggregation:
        case "seq_mean_token_sum":
            return totals.sampled_trajectories
        case "seq_mean_token_sum_norm":
            return totals.sampled_trajectories * config.sequence_tokens
        case _:
            return totals.sampled


@dataclass(frozen=True, slots=True)
class LossInput:
    """Input of one policy loss."""

    tokens: LossTokens
    anchors_N: Tensor
    """log π_anchor, without gradient."""
    correction: Correction
    config: LossConfig

    @property
    def bounds(self) -> ClippedOptions:
        """Clipping bounds, for the kinds that have them."""
        assert isinstance(self.config.options, ClippedOptions), self.config.kind
        return self.config.options


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The surrogate objective of each token, to be maximised, and masks of the clipped tokens."""

    terms_N: Tensor
    """w · ℓ, with gradient."""
    capped_N: Tensor
    """True where the ratio was capped and the token keeps its gradient."""
    clipped_N: Tensor
    """True where a clip removed the gradient."""


Loss: TypeAlias = Callable[[LossInput], Surrogate]
"""A kind of loss; :mod:`etude.config.training` defines the names, and the advantage and average of each."""


def policy_gradient(x: LossInput) -> Surrogate:
    """The score function, w_t · A_t · log π_θ(y_t): the kinds ``policy_gradient`` and ``rloo``.

    w_t is the correction's weight, a constant of the gradient. With ``tis`` it is min(π_θ/μ, cap): truncated importance
    sampling, https://fengyao.notion.site/off-policy-rl; applied to log π as in CISPO, arXiv 2506.13585. With the token
    mean over the batch instead of 1/|o_i| (Dr. GRPO, arXiv 2503.20783) and A = R − mean, this is the loss of the
    Composer 2 report, arXiv 2603.24477. With sums over whole completions and the mean of the others as baseline, it is
    RLOO (arXiv 2402.14740), where a completion is one action.
    """
    none_N = torch.zeros_like(x.correction.masked_N)
    terms_N = x.correction.weights_N * x.tokens.advantages_N * x.tokens.logprobs_N
    return Surrogate(terms_N, capped_N=none_N, clipped_N=none_N)


def clipped(x: LossInput) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), w_t · min(r_t A_t, clip(r_t, 1−ε_low, 1+ε_high) A_t).

    Depending on average and advantage, it is the loss of GRPO (DeepSeekMath, arXiv 2402.03300, equation 3, without its
    k3 term), of Dr. GRPO (arXiv 2503.20783, section 3.2) or of DAPO (arXiv 2503.14476, equation 8).
    """
    return _clip(_ratios(x), x)


def cispo(x: LossInput) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equation 4): the weight is clipped, no token loses its gradient.

        w_t · sg(clip(r_t, 1−ε_low, 1+ε_high)) · A_t · log π_θ(y_t)

    The paper sets no lower bound (ε_low = 1) and does not publish the upper one; r ≤ 5 is from ScaleRL (arXiv
    2510.13786).
    """
    low, high = 1 - x.bounds.clip_low, 1 + x.bounds.clip_high
    ratios_N = _ratios(x).detach()
    weights_N = x.correction.weights_N * ratios_N.clamp(low, high)
    terms_N = weights_N * x.tokens.advantages_N * x.tokens.logprobs_N
    capped_N = (ratios_N < low) | (ratios_N > high)
    return Surrogate(terms_N, capped_N=capped_N, clipped_N=torch.zeros_like(capped_N))


def gspo(x: LossInput) -> Surrogate:
    """GSPO (arXiv 2507.18071, equations 5 and 7): ratio, clip and mean are per trajectory, not per token.

        w_i · min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i)
        s_i = (π_θ(y_i) / π_anchor(y_i))^(1/|y_i|) = exp((1/|y_i|) Σ_t log r_t)

    It is computed per token, with the same value for all tokens of a trajectory, so that weights may differ by token.
    """
    means_N = trajectory_means(x.tokens.logprobs_N - x.anchors_N, x.tokens.trajectories_N)
    return _clip(means_N.clamp(max=LARGEST_LOG_RATIO).exp(), x)


def dppo(x: LossInput) -> Surrogate:
    """DPPO with the binary total variation (arXiv 2602.04879), as in prime-rl: a mask instead of a clip.

        w_t · m_t · r_t · A_t,   m_t = 0 if A_t > 0 and π_θ(y_t) − π_anchor(y_t) > ε_high,
                                     or if A_t ≤ 0 and π_θ(y_t) − π_anchor(y_t) < −ε_low, else 1

    The mask uses a difference of probabilities, because a ratio would mask rare tokens first. verl's form has the same
    gradient up to a bound on r, 20 by default.
    """
    moved_N = x.tokens.logprobs_N.detach().exp() - x.anchors_N.exp()
    advantages_N = x.tokens.advantages_N
    outside_N = torch.where(advantages_N > 0, moved_N > x.bounds.clip_high, moved_N < -x.bounds.clip_low)
    terms_N = x.correction.weights_N * advantages_N * torch.where(outside_N, 0.0, _ratios(x))
    return Surrogate(terms_N, capped_N=torch.zeros_like(outside_N), clipped_N=outside_N)


def loss_of(config: LossConfig) -> Loss:
    """The loss that a recipe names: a function, or an instance of a class made from its options."""
    named = LOSSES.find(config.kind)
    made = named(config.options) if isinstance(named, type) else named
    return cast("Loss", made)


def _ratios(x: LossInput) -> Tensor:
    """[N] r = π_θ / π_anchor, with gradient."""
    return (x.tokens.logprobs_N - x.anchors_N).clamp(max=LARGEST_LOG_RATIO).exp()


def _clip(ratios_N: Tensor, x: LossInput) -> Surrogate:
    """``w · min(r A, clip(r) A)``, token by token.

    A token has no gradient once its ratio has moved too far in the direction of its advantage. With a dual clip c
    (arXiv 1912.09729, equation 5; ``delta`` in TRL) it has none either where A < 0 and r > c: max(min(r A, clip(r) A),
    c A).
    """
    bounds = x.config.options
    assert isinstance(bounds, DualClippedOptions), x.config.kind
    low, high, dual = 1 - bounds.clip_low, 1 + bounds.clip_high, bounds.dual_clip
    advantages_N = x.tokens.advantages_N
    outside_N = ((advantages_N > 0) & (ratios_N > high)) | ((advantages_N < 0) & (ratios_N < low))
    bounded_N = torch.where(outside_N, ratios_N.detach().clamp(low, high), ratios_N)
    if dual:
        above_N = (advantages_N < 0) & (ratios_N > dual)
        bounded_N, outside_N = torch.where(above_N, dual, bounded_N), outside_N | above_N
    terms_N = x.correction.weights_N * advantages_N * bounded_N
    return Surrogate(terms_N, capped_N=torch.zeros_like(outside_N), clipped_N=outside_N)
