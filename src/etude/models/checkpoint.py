"""Hugging Face checkpoints and published states, to and from a :class:`~etude.models.qwen3_moe.Qwen3Moe`.

A *state* is ``{checkpoint name: tensor}`` with Hugging Face's names: one tensor per projection and expert. That is the
coordinate system in which weights are stored, published and verified. The model keeps fused parameters (``qkv``,
``gate_up``); this module is the only place that knows how the two correspond.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import DamagedError
from etude.models.qwen3_moe import Block, ModelSpec, Qwen3Moe

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def spec_from_config(config: ModelConfig, vocab_size: int) -> ModelSpec:
    """The model a recipe asks for, with the vocabulary its tokenizer really has."""
    shape = config.model_dump(exclude={"vocab_size"})
    return ModelSpec(vocab_size=vocab_size, **shape)


def state_of(model: Qwen3Moe) -> dict[str, Tensor]:
    """The model's weights as a state: detached views, no copies."""
    return {name: view.detach() for name, view in _views(model)}


def load_state(model: Qwen3Moe, state: Mapping[str, Tensor]) -> None:
    """Copy a state into a model. Raises :class:`~etude.errors.DamagedError` on a missing or misshapen tensor."""
    with torch.no_grad():
        for name, view in _views(model):
            tensor = state.get(name)
            if tensor is None or tensor.shape != view.shape:
                found = "missing" if tensor is None else f"{list(tensor.shape)}"
                raise DamagedError(f"tensor {name!r} should be {list(view.shape)}, it is {found}")
            view.copy_(tensor)


def save_checkpoint(folder: Path, spec: ModelSpec, state: Mapping[str, Tensor], *, end_id: int, pad_id: int) -> None:
    """Write ``config.json`` and ``model.safetensors`` that ``AutoModelForCausalLM.from_pretrained`` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(spec) | {"eos_token_id": end_id, "pad_token_id": pad_id}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({k: v.contiguous() for k, v in state.items()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_checkpoint(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Read a Qwen3-MoE checkpoint. Raises :class:`~etude.errors.DamagedError` naming the file."""
    spec = load_spec(folder)
    file = folder / WEIGHTS_FILE
    try:
        return spec, load_file(file)
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{file} is missing or damaged: {error}") from error


def load_spec(folder: Path) -> ModelSpec:
    """The shape in a checkpoint's ``config.json``. Raises :class:`~etude.errors.DamagedError`."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] != "qwen3_moe":
            raise DamagedError(f"{file}: model_type is {config['model_type']!r}, this version loads 'qwen3_moe'")
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        return ModelSpec(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            expert_size=config["moe_intermediate_size"],
            rope_theta=theta,
            norm_eps=config["rms_norm_eps"],
            max_positions=config["max_position_embeddings"],
        )
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise DamagedError(f"{file} is missing or damaged: {error!r}") from error


def hf_config(spec: ModelSpec) -> dict[str, object]:
    """``config.json`` of a spec, readable by transformers 4 (``rope_theta``) and 5 (``rope_parameters``)."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.expert_size * spec.experts_per_token,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.max_positions,
        "use_sliding_window": False,
        "dtype": "float32",
    }


def _views(model: Qwen3Moe) -> Iterator[tuple[str, Tensor]]:
    """Every checkpoint tensor as a view into the model's fused parameters."""
    yield "model.embed_tokens.weight", model.embedding.data
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, view in _block_views(block, model.spec):
            yield f"model.layers.{index}.{name}", view
    yield "model.norm.weight", model.norm.weight.data


def _block_views(block: Block, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    widths = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    for projection, view in zip("qkv", block.qkv.data.split(widths), strict=True):
        yield f"self_attn.{projection}_proj.weight", view
    yield "self_attn.o_proj.weight", block.output.data
    yield "self_attn.q_norm.weight", block.query_norm.weight.data
    yield "self_attn.k_norm.weight", block.key_norm.weight.data
    yield "input_layernorm.weight", block.attention_norm.weight.data
    yield "post_attention_layernorm.weight", block.experts_norm.weight.data
    yield "mlp.gate.weight", block.experts.router.data
    for expert in range(spec.experts):
        gate, up = block.experts.gate_up.data[expert].chunk(2)
        yield f"mlp.experts.{expert}.gate_proj.weight", gate
        yield f"mlp.experts.{expert}.up_proj.weight", up
        yield f"mlp.experts.{expert}.down_proj.weight", block.experts.down.data[expert]
