"""Mid-training: it learns what it reads, weighs it as told, and follows its schedule."""

import itertools

import numpy as np
import torch

from etude.config import MidtrainConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.telemetry.events import MidtrainProgress
from etude.trainer.midtrain import midtrain
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
