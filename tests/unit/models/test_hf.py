"""transformers' models in the trainer: packed, in chunks and rounded, they compute the same as in transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from etude.config.inference import NumericsConfig
from etude.errors import DamagedError, UserError
from etude.models.checkpoint import StoredCheckpoint, check_state, save_checkpoint, state_of
from etude.models.fast import FastArithmetic
from etude.models.hf import HfBlock, HfModel, hf_spec, make_causal_model
from etude.models.sizes import ModelSizes
from etude.run.numerics import count_parameters, published_state
from etude.trainer.readout import in_chunks

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE: dict[str, Any] = {**SIZES, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "topk_group": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 2,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(**WIDE, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**WIDE, sliding_window=4, query_pre_attn_scalar=8),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.5),
    "mixtral": lambda: transformers.MixtralConfig(**WIDE, **EXPERTS),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}, **ROUTED),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**WIDE, **ROUTED, first_k_dense_replace=1, n_group=1),
    "gpt_oss": lambda: transformers.GptOssConfig(**WIDE, **EXPERTS, sliding_window=4),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**WIDE, **LINEAR),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}
PADDED = ("gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_next")
"""Those with windows, caps or states, which go over padded rows."""
LENGTHS = (7, 12, 1, 5)
IDS_N = torch.randint(3, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
TARGETS_N = IDS_N.roll(-1)


def saved(family: str, folder: Path) -> Any:
    """A random model of transformers, and its checkpoint in ``folder``."""
    torch.manual_seed(0)
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path) -> HfModel:
    stored = StoredCheckpoint(folder, "hf")
    model = make_causal_model(stored.spec)
    stored.load(model)
    assert isinstance(model, HfModel)
    return model.train()


def separate(model: Any) -> Tensor:
    """[N,V] transformers' own logits, one sequence at a time."""
    return torch.cat([model(ids_L[None]).logits[0] for ids_L in IDS_N.split(LENGTHS)])


def loss_of(logits_NV: Tensor) -> Tensor:
    return functional.cross_entropy(logits_NV.float(), TARGETS_N)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_separate_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = saved(family, tmp_path)
    ours = loaded(tmp_path)
    assert ours._packs == (family not in PADDED)
    assert state_of(ours).keys() == load_file(tmp_path / "model.safetensors").keys()
    expected_NV = separate(theirs)
    logits_NV = ours.logits(ours.forward_packed(IDS_N, LENGTHS))
    torch.testing.assert_close(logits_NV, expected_NV, atol=2e-5, rtol=1e-4)
    loss_of(logits_NV).backward()
    loss_of(expected_NV).backward()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    for own, other in pairs:
        if other.grad is not None:
            assert own.grad is not None
            torch.testing.assert_close(own.grad, other.grad, atol=2e-6, rtol=1e-3)
    first = [None if own.grad is None else own.grad.clone() for own, _ in pairs]
    ours.zero_grad()
    ours.recompute = True
    loss_of(ours.logits(ours.forward_packed(IDS_N, LENGTHS))).backward()
    for before, (own, _) in zip(first, pairs, strict=True):
        torch.testing.assert_close(own.grad, before)


def test_numbers_in_chunks_are_the_whole_ones_with_their_gradients(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)  # tied, with capped logits
    model = loaded(tmp_path)

    def read(model: HfModel, hidden_nH: Tensor, ids_n: Tensor) -> tuple[Tensor]:
        return (functional.cross_entropy(model.logits(hidden_nH), ids_n, reduction="none"),)

    results = []
    for most in (1 << 20, 4 * 64):
        model.zero_grad()
        (nats_N,) = in_chunks(read, model, model.forward_packed(IDS_N, LENGTHS), TARGETS_N, most=most)
        nats_N.sum().backward()
        assert model.embedding.grad is not None
        results.append((nats_N.detach(), model.embedding.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_a_rounded_model_computes_what_transformers_does_with_published_weights(tmp_path: Path) -> None:
    theirs = saved("olmo2", tmp_path).to(torch.bfloat16)
    model = loaded(tmp_path)
    model.arithmetic = FastArithmetic(torch.bfloat16)
    logits_NV = model.logits(model.forward_packed(IDS_N, LENGTHS))
    assert logits_NV.dtype is torch.bfloat16
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(logits_NV.float(), separate(theirs).float(), atol=0.05, rtol=0.05)
    loss_of(logits_NV).backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_what_is_published_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    theirs = saved("mixtral", tmp_path)
    model = loaded(tmp_path)
    state = published_state(model, NumericsConfig())
    assert count_parameters(model.spec) == sum(tensor.numel() for tensor in state.values())
    assert ModelSizes.of(model.spec).total == count_parameters(model.spec)
    last = next(name for name in state if ".experts.3." in name)  # one tensor for each expert
    save_checkpoint(tmp_path / "again", model.spec, state, end_id=2, pad_id=0)
    factory: Any = transformers.AutoModelForCausalLM
    again = factory.from_pretrained(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(separate(again.eval()), separate(theirs))
    with pytest.raises(DamagedError, match="missing"):
        check_state(model, {name: tensor for name, tensor in state.items() if name != last})


def test_only_blocks_are_recomputed_and_every_layer_is_one(tmp_path: Path) -> None:
    saved("phi", tmp_path)
    model = loaded(tmp_path)
    assert len(model.blocks) == 2
    assert all(isinstance(block, HfBlock) for block in model.blocks)
    assert not model.network.training


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "code of the checkpoint"),
        ({"model_type": "mine"}, "none of transformers"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"model_type": "bert"}, "not a causal language model"),
        ({"model_type": "gemma3"}, "more than one part"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hf_spec(json.loads(json.dumps(values)), origin="here/config.json")
