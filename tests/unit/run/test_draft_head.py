"""The draft head of version 0: the checkpoint's own where it has one, else a new one; the policy's weights are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, DamagedError
from etude.models.checkpoint import WEIGHTS_FILE, StoredCheckpoint, load_checkpoint, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINIEST, TINY_LATENT, ModelSpec
from etude.run.draft_head import has_draft_head, with_draft_head


def write(folder: Path, spec: ModelSpec, seed: int) -> Decoder:
    model = Decoder(spec)
    model.initialise(seed)
    save_checkpoint(folder, spec, state_of(model), end_id=2, pad_id=0)
    return model


def foreign(folder: Path) -> None:
    """Add what DeepSeek's own checkpoints have: copies of the shared matrices, and none of étude's keys."""
    state = load_file(folder / WEIGHTS_FILE)
    state["model.layers.3.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.3.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    del config["draft_head"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_checkpoints_own_head_is_taken_and_only_when_it_is_asked_for(tmp_path: Path) -> None:
    start, trained = tmp_path / "start", tmp_path / "trained"
    head = write(start, replace(TINY_LATENT, draft=True), 1)
    foreign(start)
    policy = write(trained, TINY_LATENT, 2)  # what the phases made of the checkpoint
    assert load_checkpoint(start)[0] == TINY_LATENT
    assert has_draft_head(start) and not has_draft_head(trained)
    config = RunConfig.model_validate(
        {"model": {"checkpoint": str(start)}, "midtrain": {"tokens": 0}, "loss": {"draft_learning_rate": 0.1}}
    )
    joined = state_of(with_draft_head(trained, config))
    for name, tensor in (state_of(head) | state_of(policy)).items():
        assert torch.equal(joined[name], tensor), name


@pytest.mark.parametrize("shape", TINIEST, ids=["experts", "dense", "latent", "glm", "gemma", "oss"])
def test_a_model_without_one_gets_a_new_one_that_survives_its_checkpoint(shape: ModelSpec, tmp_path: Path) -> None:
    policy = write(tmp_path / "trained", shape, 2)
    config = RunConfig.model_validate({"loss": {"draft_learning_rate": 0.1}, "seed": 5})
    model = with_draft_head(tmp_path / "trained", config)
    save_checkpoint(tmp_path / "run", model.spec, state_of(model), end_id=2, pad_id=0)
    spec, state = load_checkpoint(tmp_path / "run")
    assert spec == replace(shape, draft=True)
    assert state.keys() == state_of(model).keys() > state_of(policy).keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(policy).items())
    with pytest.raises(DamagedError, match=rf"'model\.layers\.{shape.layers}\..*' is missing"):
        StoredCheckpoint(tmp_path / "trained", draft=True).check(Decoder(replace(shape, draft=True)))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"engine": {"kind": "vllm"}, "loss": {"draft_learning_rate": 0.1}}, "would not know a draft head"),
        ({"parallel": {"dp": 2}, "loss": {"draft_learning_rate": 0.1}}, "not sharded over"),
        ({"engine": {"options": {"draft_tokens": 2}}}, "set loss.draft_learning_rate"),
        (
            {"midtrain": {"tokens": 1000}, "lora": {"rank": 8, "phases": ["rl"]}, "loss": {"draft_learning_rate": 0.1}},
            "not know its adapters",
        ),
    ],
)
def test_what_cannot_draft_is_refused(recipe: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(recipe, source="run.toml")
