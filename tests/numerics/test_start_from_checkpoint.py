"""Training starts from transformers' checkpoint, computes the same as transformers, and exports for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from etude.errors import DamagedError
from etude.models.checkpoint import StoredCheckpoint, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own future

RATE, TOLERANCE = 0.05, 1e-5
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": GROUPED | {"tie_word_embeddings": True},
    "qwen3_moe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "deepseek_v3": SHAPE
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    | {"v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
    | {"topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
}


def make_theirs(family: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = factory.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def make_ours(folder: Path) -> Decoder:
    stored = StoredCheckpoint(folder)
    model = Decoder(stored.spec, FastArithmetic())
    stored.load(model)
    return model


def make_ids() -> Tensor:
    return torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))


def our_loss(model: Decoder, ids: Tensor) -> Tensor:
    hidden = model.forward_packed(ids.flatten(), [ids.shape[1]] * len(ids)).unflatten(0, ids.shape)
    return functional.cross_entropy(model.logits(hidden[:, :-1].flatten(0, 1)), ids[:, 1:].flatten())


def step(loss: Tensor, parameters: Any) -> None:
    loss.backward()
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", ["one file", "split"])
def test_one_step_is_transformers_own_and_back_again(tmp_path: Path, family: str, shards: str) -> None:
    from transformers import AutoModelForCausalLM

    theirs, ids = make_theirs(family), make_ids()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="1GB" if shards == "one file" else "20KB")
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) == 1) == (shards == "one file")
    ours = make_ours(tmp_path / "theirs")

    expected = theirs(ids, labels=ids).loss
    result = our_loss(ours, ids)
    assert abs(float(result - expected)) < TOLERANCE
    step(expected, theirs.parameters())
    step(result, ours.parameters())

    save_checkpoint(tmp_path / "ours", ours.spec, state_of(ours), end_id=2, pad_id=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    moved = 0.0
    for (name, parameter), theirs_after in zip(again.named_parameters(), theirs.parameters(), strict=True):
        assert (parameter - theirs_after).abs().max() < TOLERANCE, name
        moved = max(moved, float(theirs_after.grad.abs().max()) if theirs_after.grad is not None else 0.0)
    assert moved * RATE > 100 * TOLERANCE  # there was a step to be equal in
    with torch.no_grad():
        assert torch.allclose(again(ids, labels=ids).loss, our_loss(ours, ids), atol=TOLERANCE)


def test_bfloat16_weights_are_read_into_float32_exactly(tmp_path: Path) -> None:
    theirs = make_theirs("qwen3_moe", torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = make_ours(tmp_path)
    assert ours.embedding.dtype is torch.float32
    assert torch.equal(ours.embedding, theirs.get_input_embeddings().weight.float())


def test_what_does_not_fit_is_named_before_anything_is_copied(tmp_path: Path) -> None:
    make_theirs("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["stranger.weight"] = torch.zeros(1)
    state["model.norm.weight"] = torch.zeros(7)
    del state["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(state, file)
    stored = StoredCheckpoint(tmp_path)
    model = Decoder(stored.spec)
    model.initialise(0)
    before = model.embedding.detach().clone()
    with pytest.raises(DamagedError) as caught:
        stored.load(model)
    for fault in (
        "'model.layers.1.mlp.experts.2.up_proj.weight' is missing",
        "'stranger.weight' has no place",
        "'model.norm.weight' should be [32], it is [7]",
    ):
        assert fault in str(caught.value)
    assert torch.equal(model.embedding, before)
