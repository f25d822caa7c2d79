"""Micro-batches as tensors: every sampled token has its data, and the score that it has alone."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY, GroupedSpec, ModelSpec
from etude.trainer.scores import sampled_logprobs, sampled_tokens, score
from etude.types import UNSAMPLED, SamplingMask, Trajectory

CPU = torch.device("cpu")
torch.set_num_threads(1)


def make_trajectory(mask: list[bool], seed: int) -> Trajectory:
    """Random numbers in every field."""
    random, length = np.random.default_rng(seed), len(mask)
    return Trajectory(
        rollout_id="r",
        token_ids=random.integers(0, 50, length).astype(np.int32),
        loss_mask=np.array(mask),
        logprobs=random.random(length, np.float32),
        versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
        temperatures=random.random(length, np.float32) + np.float32(0.5),
        turn_starts=(),
        advantages=random.random(length, np.float32),
    )


TRAJECTORIES = st.builds(make_trajectory, st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 99))


@settings(deadline=None, max_examples=50)
@given(st.lists(TRAJECTORIES, min_size=1, max_size=5))
def test_every_token_that_is_predicted_is_there_once_in_order(batch: list[Trajectory]) -> None:
    tokens = sampled_tokens(batch, [one.loss_mask for one in batch], CPU)
    expected = [(b, t) for b, one in enumerate(batch) for t in range(1, len(one.token_ids)) if one.loss_mask[t]]
    assert tokens.lengths == tuple(len(one.token_ids) for one in batch)
    assert tokens.token_ids_T.tolist() == [int(i) for one in batch for i in one.token_ids]
    assert tokens.trajectories_N.tolist() == [b for b, _ in expected]
    assert tokens.scored_ids_N.tolist() == [int(batch[b].token_ids[t]) for b, t in expected]
    assert tokens.engine_logprobs_N.tolist() == [float(batch[b].logprobs[t]) for b, t in expected]
    assert tokens.advantages_N.tolist() == [float(batch[b].advantages[t]) for b, t in expected]
    assert tokens.temperatures_N.tolist() == [float(batch[b].temperatures[t]) for b, t in expected]
    assert [x.dtype for x in (tokens.token_ids_T, tokens.places_N, tokens.trajectories_N)] == [torch.int64] * 3


def test_company_changes_no_bit_of_a_score() -> None:
    model = Decoder(TINY, InvariantArithmetic())
    model.initialise(0, std=0.2)
    lengths = (3, 17, 1, 40, 17, 16)
    masks = [[t % 3 > 0 for t in range(length)] for length in lengths]
    batch = [make_trajectory(mask, seed) for seed, mask in enumerate(masks)]
    jointly = sampled_logprobs(model, sampled_tokens(batch, [one.loss_mask for one in batch], CPU))
    alone = [sampled_logprobs(model, sampled_tokens([one], [one.loss_mask], CPU)) for one in batch]
    assert jointly.requires_grad
    assert torch.equal(jointly, torch.cat(alone))
    assert len(jointly.unique()) > 40


def test_a_score_trains_the_model_with_the_sampling_distribution() -> None:
    attention = GroupedSpec(heads=2, kv_heads=1, head_dim=8)
    model = Decoder(ModelSpec(vocab_size=50, hidden_size=16, layers=1, attention=attention, dense_size=16))
    model.initialise(0, std=1.0)
    remaining = SamplingMask(offsets=np.array([0, 0, 2, 2, 3]), token_ids=np.array([4, 9, 7], np.int32))
    trajectory = replace(
        make_trajectory([False, True, True, True], 0),
        token_ids=np.array([1, 9, 3, 7], np.int32),
        temperatures=np.array([1, 0.5, 1, 1], np.float32),
        sampling_mask=remaining,
    )
    tokens = sampled_tokens([trajectory], [trajectory.loss_mask], CPU)
    scores = score(model, tokens)
    logits = model.logits(model.forward_packed(torch.tensor([1, 9, 3, 7])))
    expected = torch.stack([(logits[0, [4, 9]] / 0.5).log_softmax(0)[1], logits[1].log_softmax(0)[3], torch.zeros(())])
    torch.testing.assert_close(scores.logprobs_N, expected)
    assert sampled_logprobs(model, tokens).tolist() == scores.logprobs_N.tolist()
    assert not scores.entropies_N.requires_grad
    scores.logprobs_N.sum().backward()
    assert model.embedding.grad is not None
    assert float(model.embedding.grad.abs().max()) > 0


def test_nothing_to_score_still_goes_through_the_whole_model() -> None:
    for arithmetic in (None, InvariantArithmetic()):
        model = Decoder(TINY, arithmetic)
        model.initialise(0)
        scores = score(model, sampled_tokens([], [], CPU))
        assert scores.logprobs_N.shape == scores.entropies_N.shape == (0,)
        scores.logprobs_N.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert all(gradient is not None and not gradient.any() for gradient in gradients.values()), gradients
