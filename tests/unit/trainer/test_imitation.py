"""Imitation: it learns its documents, with the given weights, and no document attends to another."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from etude.config.training import OptimiserConfig
from etude.errors import DivergedError
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.trainer.imitation import ImitationTrainer, Loss, predict
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.types import Document


def make_document(ids: Sequence[int], weights: Sequence[float] | None = None) -> Document:
    return Document(token_ids=np.array(ids, np.int32), weights=np.array(weights or [1.0] * len(ids), np.float32))


def make_model() -> Decoder:
    model = Decoder(TINY)
    model.initialise(0)
    return model


def make_trainer(model: Decoder, steps: int = 60) -> ImitationTrainer:
    optimiser = build_optimiser(model, OptimiserConfig(), learning_rate=1e-2, betas=(0.9, 0.98))
    return ImitationTrainer(
        Optimisation(model, optimiser, RateSchedule(steps=steps, warmup_steps=5, decay_share=0.4), clip_norm=1.0)
    )


def test_it_learns_by_heart() -> None:
    trainer = make_trainer(make_model())
    document = make_document([1, 5, 2, 9, 3, 7, 4, 8])
    losses = [trainer.step(step, [[document] * 8]) for step in range(1, 61)]
    assert losses[0].tokens == 64
    assert losses[0].mean == pytest.approx(math.log(TINY.vocab_size), rel=0.1)
    assert losses[-1].mean < 0.05
    assert math.isnan(losses[-1].action_mean)


def test_tokens_of_weight_zero_are_not_learnt() -> None:
    model = make_model()
    trainer = make_trainer(model)
    for step in range(1, 61):
        trainer.step(step, [[make_document([1, 5, 2, 9], [1.0, 1.0, 0.0, 1.0])] * 16])
    with torch.no_grad():
        chances = model.logits(model.forward_packed(torch.tensor([1, 5, 2, 9]))).softmax(-1)
    assert chances[0, 5] > 0.9
    assert chances[2, 9] > 0.9
    assert chances[1, 2] < 0.5


def test_a_batch_in_chunks_takes_the_same_step() -> None:
    """Normalised over the whole batch: were each piece a mean of its own, its few tokens would count more."""
    documents = [make_document([1, 2, 3], [1, 1, 0.5]), make_document(range(1, 40)), make_document([7, 8])]
    one, other = make_model(), make_model()
    whole = make_trainer(one).step(1, [documents])
    parts = make_trainer(other).step(1, [documents[:1], [], documents[1:]])
    assert parts.mean == pytest.approx(whole.mean, rel=1e-6)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def test_no_document_sees_another() -> None:
    model = make_model()
    one, other = make_document([4, 5, 6, 7]), make_document([9, 8, 7])
    jointly, _, _ = predict(model, [one, other])
    torch.testing.assert_close(jointly, torch.cat([predict(model, [one])[0], predict(model, [other])[0]]))
    swapped, _, _ = predict(model, [other, one])
    torch.testing.assert_close(jointly[:3], swapped[2:])


def test_what_an_agent_wrote_is_measured_apart() -> None:
    trainer = make_trainer(make_model())
    session = make_document([1, 2, 3, 4], [0.5, 0.5, 1.0, 1.0])
    result = trainer.measure([[session, make_document([5, 6, 7])]])
    assert (result.actions, result.weight, result.tokens) == (2, 4.5, 7)
    losses, _, _ = predict(make_model(), [session])
    assert result.action_mean == pytest.approx(float(losses.detach()[1:].mean()), rel=1e-5)


def test_eval_changes_nothing() -> None:
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    make_trainer(model).measure([[make_document([1, 2, 3])]])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_batch_without_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="step 3: no token of the batch has a weight"):
        make_trainer(make_model()).step(3, [[make_document([1, 2], [1.0, 0.0]), make_document([1])]])


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = make_model()
    with torch.no_grad():
        model.gain[0] = math.inf
    before = model.embedding.detach().clone()
    with pytest.raises(DivergedError, match="step 1"):
        make_trainer(model).step(1, [[make_document([1, 2, 3])]])
    assert torch.equal(model.embedding, before)


def test_nothing_has_no_mean() -> None:
    assert math.isnan(Loss().mean)
