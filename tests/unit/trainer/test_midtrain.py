"""Mid-training: it learns what it reads, weighs it as told, and follows its schedule."""

import itertools

import numpy as np
import pytest
import torch

from etude.config import MidtrainConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.telemetry.events import MidtrainProgress
from etude.trainer.midtrain import FINAL_RATE_SHARE, midtrain, rate_share
from etude.types import Document

CONFIG = MidtrainConfig(tokens=256 * 60, batch_tokens=256, warmup_steps=5, learning_rate=1e-2)


def make_document(ids: list[int], weights: list[float] | None = None) -> Document:
    return Document(token_ids=np.array(ids, np.int32), weights=np.array(weights or [1.0] * len(ids), np.float32))


def test_it_learns_by_heart_and_reports() -> None:
    model = Decoder(TINY)
    model.initialise(0)
    document = make_document([1, 5, 2, 9, 3, 7, 4, 8])
    progress: list[MidtrainProgress] = []
    tokens = midtrain(model, itertools.repeat([document] * 32), CONFIG, progress.append)
    assert tokens == 256 * 60
    assert progress[-1].step == progress[-1].steps == 60
    assert progress[0].loss > 1.0
    assert progress[-1].loss < 0.05


def test_tokens_of_weight_zero_are_not_learnt() -> None:
    model = Decoder(TINY)
    model.initialise(0)
    document = make_document([1, 5, 2, 9], [1.0, 1.0, 0.0, 1.0])
    midtrain(model, itertools.repeat([document] * 64), CONFIG, lambda _: None)
    with torch.no_grad():
        chances = model.logits(model.forward_padded(torch.tensor([[1, 5, 2, 9]]))[0]).softmax(-1)
    assert chances[0, 5] > 0.9
    assert chances[2, 9] > 0.9
    assert chances[1, 2] < 0.5


def test_the_schedule_warms_up_holds_and_decays() -> None:
    shares = [rate_share(step, 100, CONFIG.model_copy(update={"decay_share": 0.4})) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(shares[5:60]) == {1.0}
    assert shares[60:] == sorted(shares[60:], reverse=True)
    assert min(shares[60:]) >= FINAL_RATE_SHARE


def test_without_decay_the_rate_holds_to_the_end() -> None:
    shares = [rate_share(step, 50, CONFIG.model_copy(update={"decay_share": 0.0})) for step in range(50)]
    assert set(shares[5:]) == {1.0}
