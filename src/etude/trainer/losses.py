"""The losses of reinforcement learning, one function each, and what all of them are put together from.

    L = Σ_t a_t · w_t · ℓ(r_t, A_t)

ℓ is what a kind of loss makes of a token: of its advantage A (:mod:`etude.trajectories.advantage`) and, in the clipped
kinds, of its ratio r = π_θ / π_anchor. w is a constant of the gradient and belongs to who sampled the token
(:mod:`etude.trainer.corrections`). a is how tokens are averaged. The anchor is the engine's μ, or π_prox in the
decoupled form. There is one optimiser step per batch, so the papers' "old" policy is the one that sampled.

Every normaliser is one of the *whole* batch, known before its first token is computed: losses of micro-batches, on
however many ranks, add up to the batch's. Masked tokens stay in it, for the same reason and because leaving out some
must not make the others count more.

Owns what is done with log-probabilities, not how they come about: of which distribution they are is
:mod:`etude.trainer.kept`'s.

Shape legend: N loss tokens of a micro-batch, S its trajectories.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.config.training import LossConfig, LossKind
from etude.trainer.corrections import Correction, correct, trajectory_means


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The loss tokens of one micro-batch: N tokens of S trajectories, none of which is cut."""

    logprobs_N: Tensor
    """log π_θ, with gradient: of the distribution that a model with the trainer's weights would have sampled from, at
    the token's temperature and over the set that was kept for it.
    """
    engine_logprobs_N: Tensor
    """log μ, at the version that sampled the token."""
    advantages_N: Tensor
    """The same for all tokens of a turn, and with the default ``[credit]`` of a trajectory."""
    trajectories_N: Tensor
    """int64, ascending: which trajectory of the micro-batch, 0 … S−1."""
    proximal_logprobs_N: Tensor | None = None
    """log π_prox of the decoupled form; ``None``: log π_θ, detached."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole batch, over all micro-batches and ranks."""

    tokens: int
    """Loss tokens."""
    trajectories: int
    sampled: int = 0
    """Sampled tokens, those of groups without a signal included."""
    sampled_trajectories: int = 0
    """Likewise."""
    lost_tokens: float = 0.0
    """Loss tokens that rollouts would have had that infrastructure lost."""
    lost_trajectories: float = 0.0
    """Likewise."""

    @property
    def planned_tokens(self) -> float:
        """T: what is averaged over tokens is averaged over these, so that what was lost does not enlarge the step."""
        return self.tokens + self.lost_tokens

    @property
    def planned_trajectories(self) -> float:
        """S, likewise."""
        return self.trajectories + self.lost_trajectories


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A micro-batch's share of the step's loss, and sums for its statistics."""

    loss: Tensor
    """Scalar with gradient; summed over micro-batches (and ranks) it is the loss of the step."""
    truncated: int
    """Loss tokens whose importance weight was cut, and which count nevertheless."""
    masked: int
    """Loss tokens left out by a correction or clip: they have no gradient."""


def policy_loss(tokens: LossTokens, config: LossConfig, totals: Totals) -> PolicyLoss:
    """The loss that ``config`` asks for, of a micro-batch; 0, with a gradient of 0, where that has no tokens."""
    if not len(tokens.logprobs_N):
        return PolicyLoss(tokens.logprobs_N.sum(), truncated=0, masked=0)
    proximal_N = tokens.proximal_logprobs_N
    if proximal_N is None:
        proximal_N = tokens.logprobs_N.detach()
    log_ratios_N = proximal_N - tokens.engine_logprobs_N
    correction = correct(log_ratios_N, tokens.advantages_N, tokens.trajectories_N, config)
    anchors_N = proximal_N if config.correction == "decoupled" else tokens.engine_logprobs_N
    found = LOSSES[config.kind](LossInput(tokens, anchors_N, correction, config, totals))
    masked_N = correction.masked_N | found.clipped_N
    truncated_N = (correction.truncated_N | found.capped_N) & ~masked_N
    return PolicyLoss(found.loss, truncated=int(truncated_N.sum()), masked=int(masked_N.sum()))


def lesson_normaliser(config: LossConfig, totals: Totals) -> float:
    """What lessons (:mod:`etude.trainer.distillation`) are divided by: what a sum over tokens would be divided by in
    the loss of ``config``, had every group of the batch a signal.

    In the kinds that average over trajectories of |o| tokens a token counts 1/(S·|o|), which is 1/T on average.
    """
    match config.kind:
        case "rloo":
            return totals.sampled_trajectories
        case "dr_grpo":
            return totals.sampled_trajectories * config.sequence_tokens
        case _:
            return totals.sampled


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a loss is made from."""

    tokens: LossTokens
    anchors_N: Tensor
    """log π_anchor, without gradient."""
    correction: Correction
    config: LossConfig
    totals: Totals


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A micro-batch's share of a loss, and what was cut in making it."""

    loss: Tensor
    """Scalar with gradient."""
    capped_N: Tensor
    """True where the ratio was cut and its token keeps its gradient."""
    clipped_N: Tensor
    """True where a clip took the gradient."""


def policy_gradient(x: LossInput) -> Surrogate:
    """Policy gradient with no length term and no standard deviation.

        L = −(1/T) Σ_t w_t · A_t · log π_θ(y_t)

    T counts the loss tokens of the batch; w_t is the correction's, a constant of the gradient. With ``tis`` it is
    min(π_θ/μ, cap): truncated importance sampling, https://fengyao.notion.site/off-policy-rl; on log π as in CISPO,
    arXiv 2506.13585; token mean over the batch instead of 1/|o_i|: Dr. GRPO, arXiv 2503.20783. A = R − mean, as in the
    Composer 2 report, arXiv 2603.24477.
    """
    terms_N = x.correction.weights_N * x.tokens.advantages_N * x.tokens.logprobs_N
    return _unclipped(-terms_N.sum() / x.totals.planned_tokens, x)


def rloo(x: LossInput) -> Surrogate:
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740): the whole completion is one action.

    L = −(1/S) Σ_i A_i Σ_t w_{i,t} · log π_θ(y_{i,t}),  A_i = R_i − mean of the others' R
    """
    terms_N = x.correction.weights_N * x.tokens.advantages_N * x.tokens.logprobs_N
    return _unclipped(-terms_N.sum() / x.totals.planned_trajectories, x)


def grpo(x: LossInput) -> Surrogate:
    """GRPO (DeepSeekMath, arXiv 2402.03300, equation 3), without its k3 term.

        L = −(1/S) Σ_i (1/|o_i|) Σ_t w_t · min(r_t A_i, clip(r_t, 1−ε_low, 1+ε_high) A_i),  A_i = (R_i − mean) / std

    |o_i| counts the loss tokens of trajectory i, S the trajectories of the batch.
    """
    values_N, outside_N = _clip(_ratios(x), x)
    return _clipped(-_mean_of_means(values_N, x), outside_N)


def dr_grpo(x: LossInput) -> Surrogate:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): GRPO without its two biases.

        L = −(1/(S·L)) Σ_i Σ_t w_t · min(r_t A_i, clip(r_t, 1−ε_low, 1+ε_high) A_i),  A_i = R_i − mean

    L is ``loss.sequence_tokens``, a constant.
    """
    values_N, outside_N = _clip(_ratios(x), x)
    return _clipped(-values_N.sum() / (x.totals.planned_trajectories * x.config.sequence_tokens), outside_N)


def ppo_clip(x: LossInput) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), averaged over the batch's tokens as in DAPO (2503.14476).

    L = −(1/T) Σ_t w_t · min(r_t A_t, clip(r_t, 1−ε_low, 1+ε_high) A_t),  A = R − mean: no critic
    """
    values_N, outside_N = _clip(_ratios(x), x)
    return _clipped(-values_N.sum() / x.totals.planned_tokens, outside_N)


def cispo(x: LossInput) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equation 4): the weight is clipped, no token loses its gradient.

        L = −(1/T) Σ_t w_t · sg(clip(r_t, 1−ε_low, 1+ε_high)) · A_t · log π_θ(y_t),  A = (R − mean) / std

    The paper sets no lower bound, which ε_low = 1 is, and does not publish the upper one; r ≤ 5 is ScaleRL's (arXiv
    2510.13786).
    """
    low, high = 1 - x.config.clip_low, 1 + x.config.clip_high
    ratios_N = _ratios(x).detach()
    weights_N = x.correction.weights_N * ratios_N.clamp(low, high)
    terms_N = weights_N * x.tokens.advantages_N * x.tokens.logprobs_N
    capped_N = (ratios_N < low) | (ratios_N > high)
    return Surrogate(-terms_N.sum() / x.totals.planned_tokens, capped_N=capped_N, clipped_N=torch.zeros_like(capped_N))


def gspo(x: LossInput) -> Surrogate:
    """GSPO (arXiv 2507.18071, equations 5 and 7): ratio, clip and mean are of whole trajectories.

        L = −(1/S) Σ_i w_i · min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i),  A_i = (R_i − mean) / std
        s_i = (π_θ(y_i) / π_anchor(y_i))^(1/|y_i|) = exp((1/|y_i|) Σ_t log r_t)

    Computed as the mean over tokens of what is the same for all of them, so that weights may differ by token.
    """
    means_N = trajectory_means(x.tokens.logprobs_N - x.anchors_N, x.tokens.trajectories_N)
    values_N, outside_N = _clip(means_N.exp(), x)
    return _clipped(-_mean_of_means(values_N, x), outside_N)


LOSSES: dict[LossKind, Callable[[LossInput], Surrogate]] = {
    "policy_gradient": policy_gradient,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
}
"""Kind → its function; :data:`etude.config.BASELINES` has the advantage that goes with it."""


def _ratios(x: LossInput) -> Tensor:
    """[N] r = π_θ / π_anchor, with gradient."""
    return (x.tokens.logprobs_N - x.anchors_N).exp()


def _clip(ratios_N: Tensor, x: LossInput) -> tuple[Tensor, Tensor]:
    """[N] w · min(r A, clip(r) A), and [N] where that is a constant.

    A token has no gradient once its ratio has gone too far in the direction of its advantage.
    """
    low, high = 1 - x.config.clip_low, 1 + x.config.clip_high
    advantages_N = x.tokens.advantages_N
    outside_N = ((advantages_N > 0) & (ratios_N > high)) | ((advantages_N < 0) & (ratios_N < low))
    bounded_N = torch.where(outside_N, ratios_N.detach().clamp(low, high), ratios_N)
    return x.correction.weights_N * advantages_N * bounded_N, outside_N


def _mean_of_means(terms_N: Tensor, x: LossInput) -> Tensor:
    """(1/S) Σ_i (1/|o_i|) Σ_t terms: every trajectory counts the same."""
    lengths_S = torch.bincount(x.tokens.trajectories_N)
    return (terms_N / lengths_S[x.tokens.trajectories_N]).sum() / x.totals.planned_trajectories


def _unclipped(loss: Tensor, x: LossInput) -> Surrogate:
    none_N = torch.zeros_like(x.tokens.trajectories_N, dtype=torch.bool)
    return Surrogate(loss, capped_N=none_N, clipped_N=none_N)


def _clipped(loss: Tensor, outside_N: Tensor) -> Surrogate:
    return Surrogate(loss, capped_N=torch.zeros_like(outside_N), clipped_N=outside_N)
