"""Distillation of single turns: the policy with a hint in its context teaches the policy without the hint.

    L = L_RL + (γ/Z) Σ_t v_t · KL( π_θ(·|c, y_<t) ‖ sg π_h(·|y_<t) )     π_h(·|y_<t) = π_θ(·|c ⊕ h, y_<t)

    example ──┬─▶ context, reply ──▶ student, with gradient  ──┐
             └─▶ context ⊕ hint, reply ──▶ teacher, without ──┴──▶ divergence at every token of the reply

After Composer 2.5's targeted textual feedback (https://cursor.com/blog/composer-2-5): reverse KL on the student's
samples, as in on-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543), with the same weights as
teacher, as in SDPO (arXiv 2601.20802). Choices that those sources leave open:

- **Estimator.** ``full`` sums over the vocabulary at every token. ``sampled`` uses only the sampled tokens, w_t ·
  sg(log π_θ(y_t) − log π_h(y_t)) · ∇log π_θ(y_t): its mean over y_t ~ π_θ is the gradient of the sum, since the mean of
  ∇log π_θ(y_t) is 0.
- **Contexts.** With ``shared``, v_t = sg min(1, π_h(y_<t) / π_θ(y_<t)): a token counts in proportion to the probability
  that the teacher would also have reached it. After words that the teacher would never have produced, its predictions
  are for an unfamiliar context, and the student would learn nonsense. With ``all``, v_t = 1. Either way every term is
  at least 0, and 0 without a hint.
- **Z** is the divisor of a sum over tokens in L_RL if every group of the batch had a signal
  (:func:`etude.trainer.losses.distillation_normaliser`): by default, the number of sampled tokens. In such a batch a
  nat on one token weighs as much as γ of advantage on one token, for every kind of loss; with fewer groups with a
  signal, whose tokens weigh more, it weighs less. The number of such groups does not change an example, and as a bad
  habit disappears, so does its term. If Z counted hinted tokens instead, the last mistake would weigh as much as all of
  the first ones.
- **Staleness.** Replies were sampled by earlier versions. In ``full`` that only determines the contexts at which the
  two are compared: for any context, every term is at least 0, and 0 if they agree; so nothing is weighted. In
  ``sampled``, y_t is also drawn from the wrong distribution; w_t = min(π_θ(y_t)/μ(y_t), cap) corrects that, as in RL.
- **Truncation.** Both compare whole distributions at the turn's temperature, at 1 for greedy turns: the tokens that a
  hint asks for may be outside of the top-p set. ``sampled`` never sees such tokens, and cannot use greedy turns.
- **Routes.** Student and teacher replay the engine's as RL does (:mod:`etude.trainer.replay`), the teacher only those
  of the tokens before the hint: the engine never read the later tokens with the hint in context.

The logits of ``full`` are computed for a few tokens at a time (:mod:`etude.trainer.readout`), so memory is bounded for
turns of any length: about eight arrays of such a chunk (logits and logarithms of both sides, the terms, and gradients).

Owns the examples of a step and their loss. Does not own the choice of turns to hint
(:mod:`etude.rewards.shaping.hints`) or the position of a hint (:mod:`etude.tokens.reminders`).

Shape legend: N hinted tokens of a micro-batch, n those of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.config.hints import HintsConfig
from etude.models.experts import Routing
from etude.models.hf import CausalModel
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.readout import in_chunks
from etude.trainer.replay import ReplayMode, routing_of
from etude.trainer.scores import SampledTokens, hidden_before, sampled_tokens, score
from etude.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationExample:
    """One hinted turn: the same reply in two contexts."""

    student: Trajectory
    """The turn alone: its context and its reply."""
    teacher: Trajectory
    """With the hint in its context."""

    def __post_init__(self) -> None:
        replies = [view.token_ids[view.loss_mask] for view in (self.student, self.teacher)]
        if not len(replies[0]) or replies[0].tolist() != replies[1].tolist():
            raise ValueError(
                f"an example of {self.student.rollout_id} has replies of {len(replies[0])} and {len(replies[1])} "
                f"tokens: student and teacher must read the same one, of at least one token"
            )

    @property
    def tokens(self) -> int:
        """Length of the reply."""
        return int(self.student.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationBatch:
    """The distillation examples of a step, and the rollouts that they come from."""

    examples: tuple[DistillationExample, ...] = ()
    shares: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Micro-batches for each share of the batch, as indices of examples that go through the model together."""


NO_DISTILLATION = DistillationBatch()
"""The batch of a step without hints."""


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """One micro-batch's share of the distillation loss."""

    loss: Tensor
    """Scalar with gradient: its share of the second term of L."""
    tokens: int
    """Hinted tokens."""
    nats: float
    """Σ of v times the divergences of the tokens, before the step; with ``sampled`` an estimate of it."""


@dataclass(frozen=True, slots=True)
class TokenDivergences:
    """Divergences of student and teacher, token by token."""

    terms_N: Tensor
    """Terms to be summed; only their gradient is meaningful."""
    nats_N: Tensor
    """Divergences, or estimates of them."""
    gaps_N: Tensor
    """log π_h − log π_θ of the sampled tokens."""
    examples_N: Tensor
    """int64, ascending: index of the example in the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Computes the distillation loss of examples."""

    config: HintsConfig
    replay: ReplayMode
    floor: float
    """``numerics.replay_floor``."""
    context: ContextParallel | None = None
    chunk_logits: int | None = None
    """See :func:`~etude.trainer.readout.in_chunks`."""

    def teach(self, model: CausalModel, examples: Sequence[DistillationExample], normaliser: float) -> DistillationLoss:
        """The loss of a micro-batch, with ``normaliser`` Z. Without examples it is 0, with a gradient of 0: the pass
        only takes part in the collectives of other ranks.
        """
        students, teachers = [example.student for example in examples], [example.teacher for example in examples]
        compare = self._everything if self.config.estimator == "full" else self._sampled
        compared = compare(model, students, teachers)
        weights_N = prefix_weights(compared) if self.config.contexts == "shared" else torch.ones_like(compared.nats_N)
        loss = (weights_N * compared.terms_N).sum() * (self.config.weight / max(1, normaliser))
        return DistillationLoss(loss, tokens=len(compared.nats_N), nats=float((weights_N * compared.nats_N).sum()))

    def _everything(
        self, model: CausalModel, students: Sequence[Trajectory], teachers: Sequence[Trajectory]
    ) -> TokenDivergences:
        with torch.no_grad():
            _, teacher_nH, teacher_owners_N = self._read(model, teachers)
        tokens, student_nH, owners_N = self._read(model, students)
        ids_n, temperatures_n = tokens.scored_ids_N, torch.where(tokens.temperatures_N == 0, 1.0, tokens.temperatures_N)
        if self.context is not None:
            assert teacher_owners_N is not None and owners_N is not None
            mine_N = owners_N == self.context.rank
            teacher_nH = self.context.gathered(teacher_nH, teacher_owners_N)[mine_N]
            ids_n, temperatures_n = ids_n[mine_N], temperatures_n[mine_N]
        columns = (teacher_nH, temperatures_n, ids_n)
        (found_N2,) = in_chunks(_chunk, model, student_nH, *columns, most=self.chunk_logits)
        if self.context is not None and owners_N is not None:
            found_N2 = self.context.gathered(found_N2, owners_N)
        terms_N, gaps_N = found_N2.unbind(1)
        return TokenDivergences(terms_N, terms_N.detach(), gaps_N.detach(), tokens.trajectories_N)

    def _sampled(
        self, model: CausalModel, students: Sequence[Trajectory], teachers: Sequence[Trajectory]
    ) -> TokenDivergences:
        with torch.no_grad():
            teacher_N = score(model, *self._tokens(model, teachers), self.context).logprobs_N
        tokens, routing = self._tokens(model, students)
        student_N = score(model, tokens, routing, self.context).logprobs_N
        terms_N, nats_N = sampled_terms(student_N, teacher_N, tokens.engine_logprobs_N, cap=self.config.cap)
        return TokenDivergences(terms_N, nats_N, teacher_N - student_N.detach(), tokens.trajectories_N)

    def _read(self, model: CausalModel, views: Sequence[Trajectory]) -> tuple[SampledTokens, Tensor, Tensor | None]:
        tokens, routing = self._tokens(model, views)
        placed = (tokens.token_ids_T, tokens.lengths, tokens.places_N)
        return tokens, *hidden_before(model, *placed, routing, self.context)

    def _tokens(self, model: CausalModel, views: Sequence[Trajectory]) -> tuple[SampledTokens, Routing | None]:
        """The replies of some contexts, without sampling masks, and the routes of all tokens."""
        device = model.embedding.device
        tokens = replace(sampled_tokens(views, [view.loss_mask for view in views], device), sampling_mask=None)
        return tokens, routing_of(views, self.replay, self.floor, device)


def divergences(student_nV: Tensor, teacher_nV: Tensor, temperatures_n: Tensor, ids_n: Tensor) -> Tensor:
    """[n,2] KL(student ‖ teacher) in nats, of softmax(logits / temperature) over the whole vocabulary, and the
    teacher's minus the student's log-probability of ``ids``.
    """
    wide = torch.promote_types(student_nV.dtype, torch.float32)
    scales_n1 = temperatures_n.unsqueeze(1)
    ours_nV, theirs_nV = ((x_nV.to(wide) / scales_n1).log_softmax(-1) for x_nV in (student_nV, teacher_nV))
    gaps_nV = theirs_nV - ours_nV
    return torch.stack([-(ours_nV.exp() * gaps_nV).sum(-1), gaps_nV.gather(1, ids_n.unsqueeze(1)).squeeze(1)], 1)


def sampled_terms(student_N: Tensor, teacher_N: Tensor, engine_N: Tensor, *, cap: float) -> tuple[Tensor, Tensor]:
    """([N] w · sg(log π_θ − log π_h) · log π_θ, [N] w · (log π_θ − log π_h)) of sampled tokens, w = min(π_θ/μ, cap).

    All three arguments are log-probabilities; only the student's has a gradient. Over y_t ~ μ the mean gradient of the
    first result is that of :func:`divergences`, as long as no weight is capped.
    """
    fixed_N = student_N.detach()
    weighted_N = (fixed_N - engine_N).exp().clamp(max=cap) * (fixed_N - teacher_N)
    return weighted_N * student_N, weighted_N


def prefix_weights(compared: TokenDivergences) -> Tensor:
    """[N] min(1, π_h(y_<t) / π_θ(y_<t)): relative probability that the teacher reaches a token, too; 1 at the first
    one.
    """
    sums_N = compared.gaps_N.double().cumsum(0)
    before_N = sums_N - compared.gaps_N
    lengths_S = torch.bincount(compared.examples_N)
    firsts_S = lengths_S.cumsum(0) - lengths_S
    return (before_N - before_N[firsts_S][compared.examples_N]).clamp(max=0.0).exp().to(compared.terms_N.dtype)


def _chunk(
    model: CausalModel, student_nH: Tensor, teacher_nH: Tensor, temperatures_n: Tensor, ids_n: Tensor
) -> tuple[Tensor]:
    """[n,2] divergences of the predictions from both sides' hidden states, and log π_h − log π_θ of the
    sampled tokens.
    """
    with torch.no_grad():
        teacher_nV = model.logits(teacher_nH)
    return (divergences(model.logits(student_nH), teacher_nV, temperatures_n, ids_n),)
