"""The policy loss against a reference written from the formula, and against finite differences."""

import math

import torch

from etude.trainer.loss import policy_loss

CAP = 1.5


def reference(logits: list[list[float]], ids: list[int], engine: list[float], advantages: list[float], z: int) -> float:
    """−(1/Z) Σ min(π/μ, cap) · A · log π, token by token, in plain Python."""
    total = 0.0
    for row, token, mu, advantage in zip(logits, ids, engine, advantages, strict=True):
        log_pi = row[token] - math.log(sum(math.exp(x) for x in row))
        total += min(math.exp(log_pi - mu), CAP) * advantage * log_pi
    return -total / z


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def make_case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (6,), generator=generator)
    engine = logprobs_of(logits, ids) + torch.tensor([0.0, -0.2, 0.3, -2.0, -1.0, 0.1], dtype=torch.float64)
    advantages = torch.tensor([0.5, -0.5, 0.25, 1.0, -1.0, 0.0], dtype=torch.float64)
    return logits, ids, engine, advantages


def test_it_is_the_formula() -> None:
    logits, ids, engine, advantages = make_case()
    loss = policy_loss(logprobs_of(logits, ids), engine, advantages, cap=CAP, normaliser=11)
    expected = reference(logits.tolist(), ids.tolist(), engine.tolist(), advantages.tolist(), 11)
    assert math.isclose(float(loss.loss), expected, rel_tol=1e-12)


def test_the_gradient_is_the_weighted_score_function() -> None:
    """The importance weight is a constant: differentiate −(1/Z) Σ w·A·log π with w frozen, by finite differences."""
    logits, ids, engine, advantages = make_case()
    logits.requires_grad_()
    policy_loss(logprobs_of(logits, ids), engine, advantages, cap=CAP, normaliser=6).loss.backward()
    weights = (logprobs_of(logits.detach(), ids) - engine).exp().clamp(max=CAP) * advantages

    def frozen(at: torch.Tensor) -> float:
        return float(-(weights * logprobs_of(at, ids)).sum() / 6)

    step = 1e-6
    for row in range(6):
        for column in range(5):
            nudge = torch.zeros_like(logits)
            nudge[row, column] = step
            slope = (frozen(logits.detach() + nudge) - frozen(logits.detach() - nudge)) / (2 * step)
            assert logits.grad is not None
            assert math.isclose(float(logits.grad[row, column]), slope, rel_tol=1e-5, abs_tol=1e-9)


def test_weights_above_the_cap_are_counted_and_cut() -> None:
    logits, ids, engine, advantages = make_case()
    loss = policy_loss(logprobs_of(logits, ids), engine, advantages, cap=CAP, normaliser=6)
    assert loss.truncated == 2  # π/μ = e² and e
    uncut = policy_loss(logprobs_of(logits, ids), engine, advantages, cap=100.0, normaliser=6)
    assert uncut.truncated == 0
    assert float(uncut.loss) != float(loss.loss)


def test_microbatches_add_up_to_the_batch() -> None:
    logits, ids, engine, advantages = make_case()
    logprobs = logprobs_of(logits, ids)
    whole = policy_loss(logprobs, engine, advantages, cap=CAP, normaliser=6)
    parts = [policy_loss(logprobs[s], engine[s], advantages[s], cap=CAP, normaliser=6) for s in (slice(2), slice(2, 6))]
    assert math.isclose(float(whole.loss), sum(float(part.loss) for part in parts), rel_tol=1e-12)
