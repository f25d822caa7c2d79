"""Data that leaves the GPU: checkpoints, published weights, blocks of the parity gate."""

from pathlib import Path

import pytest
import torch

from etude.config.inference import NumericsConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.run.numerics import load_published, published_state, published_types, training_model
from etude.run.parity import streamed_model
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.whole_copy import WholeCopy

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(device: torch.device) -> Decoder:
    fresh = Decoder(TINY)
    fresh.initialise(0, std=0.15)
    return fresh.to(device).requires_grad_(False)


def test_weights_may_change_while_a_checkpoint_of_them_is_written(model: Decoder, tmp_path: Path) -> None:
    checkpoints, before = Checkpoints(tmp_path), model.embedding.cpu()
    written = checkpoints.start(1, model.state_dict())
    model.embedding.zero_()
    written.result()
    assert torch.equal(checkpoints.load(1)["embedding"], before)


def test_a_copy_of_the_weights_follows_a_model_on_the_device(model: Decoder) -> None:
    numerics = NumericsConfig(arithmetic="fast", dtype="bfloat16")
    copy = WholeCopy(model, None, published_types(model, numerics))
    for _ in range(2):
        whole = copy.update()
        assert whole is not None
        assert {parameter.device.type for parameter in whole.parameters()} == {"cpu"}
        published, expected = published_state(whole, numerics), published_state(model, numerics)
        assert all(torch.equal(tensor, expected[name].cpu()) for name, tensor in published.items())
        model.embedding[3] *= 2


def test_the_parity_gate_leaves_no_block_of_the_trainer_on_the_device(model: Decoder) -> None:
    numerics = NumericsConfig(arithmetic="fast", dtype="bfloat16", replay="completion")
    trainer = streamed_model(TINY, numerics, "cuda").eval()
    load_published(trainer, published_state(model, numerics), numerics)
    ids = torch.arange(20, device="cuda")
    with torch.no_grad():
        alike, own = (one.forward_packed(ids) for one in (training_model_of(model, numerics), trainer))
    assert torch.equal(alike, own)
    assert {parameter.device.type for block in trainer.blocks for parameter in block.parameters()} == {"cpu"}


def training_model_of(model: Decoder, numerics: NumericsConfig) -> Decoder:
    whole = training_model(TINY, numerics, "cuda").eval()
    assert isinstance(whole, Decoder)
    load_published(whole, published_state(model, numerics), numerics)
    return whole
