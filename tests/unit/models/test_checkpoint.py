"""Damaged checkpoints are named, never half-loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.config.training import ModelShape
from etude.errors import DamagedError, UserError
from etude.models.checkpoint import (
    INDEX_FILE,
    WEIGHTS_FILE,
    load_checkpoint,
    load_spec,
    load_state,
    save_checkpoint,
    spec_from_shape,
    state_of,
)
from etude.models.decoder import Decoder
from etude.models.spec import TINY, TINY_LATENT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Decoder(TINY)
    model.initialise(0)
    save_checkpoint(tmp_path, TINY, state_of(model), end_id=2, pad_id=0)
    return tmp_path


def split(folder: Path) -> None:
    """Turn a checkpoint's one file into two and an index."""
    state = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({name: state[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_truncated_weights_file_is_named(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedError, match=WEIGHTS_FILE):
        load_checkpoint(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(DamagedError, match=WEIGHTS_FILE):
        load_checkpoint(folder)


def test_a_split_checkpoint_is_joined(folder: Path) -> None:
    _, whole = load_checkpoint(folder)
    split(folder)
    _, state = load_checkpoint(folder)
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_a_missing_part_is_named(folder: Path) -> None:
    split(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"model-1\.safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [{"a": "../elsewhere.safetensors"}, ["model-0.safetensors"], None])
def test_an_index_that_names_no_files_of_the_folder_is_refused(folder: Path, weight_map: object) -> None:
    split(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedError, match=r"index\.json"):
        load_checkpoint(folder)


def test_what_the_model_does_not_need_is_left_out(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    extra = {"lm_head.weight": torch.ones(2), "model.layers.2.mlp.gate.weight": torch.ones(2)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(state | extra, folder / WEIGHTS_FILE)
    assert load_checkpoint(folder)[1].keys() == state.keys()


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_damaged_config_is_named(folder: Path, content: str | None) -> None:
    file = folder / "config.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(DamagedError, match=r"config\.json"):
        load_spec(folder)


def test_a_foreign_model_is_refused_by_name(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"qwen3_moe"', '"mamba"'))
    with pytest.raises(UserError, match="mamba"):
        load_spec(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    del state["model.norm.weight"]
    with pytest.raises(DamagedError, match=r"model\.norm\.weight.*missing"):
        load_state(Decoder(TINY), state)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    state["model.norm.weight"] = torch.ones(9)
    with pytest.raises(DamagedError, match=r"should be \[32\], it is \[9\]"):
        load_state(Decoder(TINY), state)


def test_a_tensor_without_a_place_is_named_and_nothing_is_loaded(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    model = Decoder(TINY)
    torch.nn.init.zeros_(model.embedding)
    with pytest.raises(DamagedError, match=r"q_proj\.bias.*has no place"):
        load_state(model, state | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    assert not model.embedding.any()


def test_a_state_is_views_of_the_model(folder: Path) -> None:
    model = Decoder(TINY_LATENT)
    model.initialise(0)
    for tensor in state_of(model).values():
        assert not tensor.requires_grad
        tensor.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())


def test_the_routers_correction_is_part_of_the_state_and_stays_precise() -> None:
    model = Decoder(TINY_LATENT).to(torch.bfloat16)
    state = state_of(model)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert state[name].dtype is torch.float32
    state[name] = torch.full((8,), 1.001)
    load_state(model, state)
    assert torch.equal(state_of(model)[name], torch.full((8,), 1.001))
    assert all("correction" not in name for name, _ in model.named_parameters())


def test_a_recipes_model_is_a_qwen3_moe() -> None:
    spec = spec_from_shape(ModelShape(), vocab_size=400)
    assert spec.vocab_size == 400
    assert spec.routes_shape == (3, 2)
    assert spec.attention.scale == pytest.approx(32**-0.5)
    assert spec.tied
