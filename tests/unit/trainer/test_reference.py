"""The reference scores samples under the same conditions as the policy, and k1 in the reward pulls towards it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.trainer.reference import Reference
from etude.types import UNSAMPLED, Floats, SamplingMask, Trajectory

torch.set_num_threads(1)


def make_model(seed: int) -> Decoder:
    model = Decoder(TINY, InvariantArithmetic())
    model.initialise(seed, std=0.2)
    return model


def make_trajectory(ids: list[int], mask: list[bool], model: Decoder, temperature: float = 1.0) -> Trajectory:
    """A trajectory with ``model``'s logprobs at ``temperature``."""
    logprobs = np.where(mask, np.append(np.float32(0), score(model, ids, temperature)), np.float32(0))
    return Trajectory(
        rollout_id="r",
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask),
        logprobs=logprobs.astype(np.float32),
        versions=np.where(mask, 3, UNSAMPLED).astype(np.int32),
        temperatures=np.where(mask, np.float32(temperature), np.float32(1)).astype(np.float32),
        turn_starts=(mask.index(True),),
        advantages=np.zeros(len(ids), np.float32),
    )


@torch.no_grad()
def score(model: Decoder, ids: list[int], temperature: float) -> Floats:
    """[L − 1] log-probabilities of all tokens but the first, from one plain forward pass."""
    logits = model.logits(model.forward_packed(torch.tensor(ids)))[:-1] / temperature
    scores: Floats = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    return scores


IDS, MASK = [5, 3, 9, 1, 7, 2], [False, False, True, True, False, True]


def test_it_sums_the_differences_of_sampled_tokens() -> None:
    policy, start = make_model(1), make_model(2)
    reference = Reference.alone(make_model(3), state_of(start), NumericsConfig())
    one, other = make_trajectory(IDS, MASK, policy), make_trajectory(IDS[::-1], MASK, policy, temperature=0.5)
    result = reference.divergences([one, other])
    sampled = np.array(MASK[1:])
    expected = [
        float((score(policy, ids, t) - score(start, ids, t))[sampled].sum(dtype=np.float64))
        for ids, t in ((IDS, 1.0), (IDS[::-1], 0.5))
    ]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert min(map(abs, expected)) > 0.01


def test_the_policy_itself_is_no_way_from_its_reference_and_training_it_leaves_that_alone() -> None:
    policy = make_model(1)
    reference = Reference.alone(make_model(3), state_of(policy), NumericsConfig())
    trajectory = make_trajectory(IDS, MASK, policy)
    with torch.no_grad():
        policy.embedding.add_(1.0)
    assert reference.divergences([trajectory]) == [0.0]
    assert make_trajectory(IDS, MASK, policy).logprobs.tolist() != trajectory.logprobs.tolist()


def test_the_reference_uses_the_sampling_mask_too() -> None:
    """A token that was alone in its sampling mask is certain under both models."""
    policy, start = make_model(1), make_model(2)
    remaining = SamplingMask(offsets=np.array([0, 0, 0, 1, 2, 2, 3]), token_ids=np.array([9, 1, 2], np.int32))
    certain = replace(
        make_trajectory(IDS, MASK, policy), sampling_mask=remaining, logprobs=np.zeros(len(IDS), np.float32)
    )
    assert Reference.alone(make_model(3), state_of(start), NumericsConfig()).divergences([certain]) == [0.0]


def test_k1_in_the_reward_has_the_gradient_of_the_divergence() -> None:
    """Exactly, over all two-token texts of a policy with a state of its own after each first token.

    E[−k1 · ∇ log π(text)] = −∇ KL(π ‖ π_ref); k1 of each token by itself is biased, and k1 differentiated is nothing.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    rows, lease = logits.log_softmax(-1), start.log_softmax(-1)
    texts = [
        (rows[0, a], rows[1 + a, b], lease[0, a], lease[1 + a, b]) for a, b in itertools.product(range(3), repeat=2)
    ]
    chances = [(p + q).exp() for p, q, _, _ in texts]
    nats = [p + q - r - s for p, q, r, s in texts]

    def slope(*terms: Tensor) -> Tensor:
        return torch.autograd.grad(torch.stack(terms).sum(), logits, retain_graph=True)[0]

    expected = slope(*(chance * k1 for chance, k1 in zip(chances, nats, strict=True)))
    frozen = [chance.detach() for chance in chances]
    result = slope(*(c * k1.detach() * (p + q) for c, k1, (p, q, _, _) in zip(frozen, nats, texts, strict=True)))
    biased = slope(
        *(c * ((p - r).detach() * p + (q - s).detach() * q) for c, (p, q, r, s) in zip(frozen, texts, strict=True))
    )
    nothing = slope(*(c * k1 for c, k1 in zip(frozen, nats, strict=True)))
    torch.testing.assert_close(result, expected)
    assert math.isclose(float(nothing.abs().max()), 0.0, abs_tol=1e-12)
    assert float((biased - expected).abs().max()) > 0.01
