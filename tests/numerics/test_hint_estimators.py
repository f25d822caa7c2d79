"""Both estimators of a hinted turn's gradient have the exact gradient as their mean.

The mean is a sum over everything that could be sampled. The tests also show the error when a weight is left out or
truncated. The policy is a table: for replies of two tokens, one distribution of the first token, and one of the second
token for each first. The exact gradient holds the contexts as they were sampled: Σ over replies of μ(reply) · Σ_t
∇KL_t.

Shape legend: V vocabulary, C = 1 + V contexts.
"""

import pytest
import torch
from torch import Tensor

from etude.trainer.distillation import TokenDivergences, divergences, prefix_weights, sampled_terms

VOCABULARY = 5
NO_CAP = 1e9


def make_tables() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [C,V] of student, teacher, and of the engine some steps ago, in float64."""
    generator = torch.Generator().manual_seed(0)
    student, teacher, shift = (torch.randn(1 + VOCABULARY, VOCABULARY, generator=generator).double() for _ in range(3))
    return student.requires_grad_(), student.detach() + teacher, student.detach() + 0.5 * shift


def contexts_of(first: int) -> list[int]:
    return [0, 1 + first]


def replies() -> list[tuple[int, int]]:
    return [(first, second) for first in range(VOCABULARY) for second in range(VOCABULARY)]


def chances(logits: Tensor) -> Tensor:
    """[V,V] of every reply."""
    result = logits.softmax(-1).detach()
    return result[0].unsqueeze(1) * result[1:]


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """[n] of each row."""
    found_n2 = divergences(student, teacher, torch.ones(len(student)), torch.zeros(len(student), dtype=torch.int64))
    return found_n2[:, 0]


def scored(logits: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
    """[2] log-probabilities of a reply."""
    return logits[rows].log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def shared(student: Tensor, teacher: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
    """[2] weights of the prefixes: how likely the teacher would have reached the same context."""
    gaps = (scored(teacher, rows, tokens) - scored(student, rows, tokens)).detach()
    return prefix_weights(TokenDivergences(gaps, gaps, gaps, torch.zeros(2, dtype=torch.int64)))


def exact(student: Tensor, teacher: Tensor, sampler: Tensor, *, weigh: bool = False) -> Tensor:
    """[C,V] the mean gradient of the full estimator over replies of ``sampler``."""
    gradient, weights = torch.zeros_like(student), chances(sampler)
    for first, second in replies():
        rows = contexts_of(first)
        weight = shared(student, teacher, rows, torch.tensor([first, second])) if weigh else torch.ones(2)
        loss = (weight * kl(student[rows], teacher[rows])).sum()
        gradient += weights[first, second] * torch.autograd.grad(loss, student)[0]
    return gradient


def by_samples(
    student: Tensor, teacher: Tensor, sampler: Tensor, *, cap: float = NO_CAP, weigh: bool = False
) -> Tensor:
    """[C,V] that of the sampled estimator."""
    gradient, weights = torch.zeros_like(student), chances(sampler)
    for first, second in replies():
        rows, tokens = contexts_of(first), torch.tensor([first, second])
        ours, theirs, engines = (scored(logits, rows, tokens) for logits in (student, teacher, sampler))
        terms, _ = sampled_terms(ours, theirs, engines.detach(), cap=cap)
        if weigh:
            terms = terms * shared(student, teacher, rows, tokens)
        gradient += weights[first, second] * torch.autograd.grad(terms.sum(), student)[0]
    return gradient


def test_on_policy_the_sampled_gradients_mean_is_the_full_one() -> None:
    student, teacher, _ = make_tables()
    expected = exact(student, teacher, student)
    assert expected.abs().max() > 0.1
    assert torch.allclose(by_samples(student, teacher, student), expected, atol=1e-12)


def test_off_policy_the_weight_corrects_the_draw_of_each_token() -> None:
    student, teacher, engine = make_tables()
    expected = exact(student, teacher, engine)
    assert torch.allclose(by_samples(student, teacher, engine), expected, atol=1e-12)
    unweighted = by_samples(student, teacher, engine, cap=1e-9) * 1e9  # every weight is the cap: none at all
    assert (unweighted - expected).abs().max() > 0.05


def test_both_agree_where_only_shared_contexts_count() -> None:
    student, teacher, engine = make_tables()
    expected = exact(student, teacher, engine, weigh=True)
    assert torch.allclose(by_samples(student, teacher, engine, weigh=True), expected, atol=1e-12)
    assert (expected - exact(student, teacher, engine)).abs().max() > 0.01


def test_a_cut_weight_costs_a_bounded_bias() -> None:
    student, teacher, engine = make_tables()
    expected = exact(student, teacher, engine)
    errors = [float((by_samples(student, teacher, engine, cap=cap) - expected).abs().max()) for cap in (1.0, 2.0, 4.0)]
    assert errors[0] > errors[1] >= errors[2]


def test_estimates_of_the_divergence_have_it_as_their_mean() -> None:
    student, teacher, engine = (table.detach() for table in make_tables())
    logs = [table[0].log_softmax(-1) for table in (student, teacher, engine)]
    _, nats = sampled_terms(*logs, cap=NO_CAP)
    expected = kl(student[:1], teacher[:1])
    assert float((logs[2].exp() * nats).sum()) == pytest.approx(float(expected), rel=1e-6)


def test_the_full_gradient_points_at_the_teacher_wherever_the_contexts_come_from() -> None:
    """Stale contexts are other contexts, not another aim: the same student is the only one without a gradient."""
    student, teacher, engine = make_tables()
    for sampler in (student, engine):
        assert exact(student, teacher, sampler).abs().max() > 0.1
        assert exact(teacher.clone().requires_grad_(), teacher, sampler).abs().max() < 1e-12
