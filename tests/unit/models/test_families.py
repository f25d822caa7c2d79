"""``config.json``: unsupported options and damage are refused by name."""

import re
from dataclasses import replace

import pytest

from etude.errors import DamagedError, UserError
from etude.models.families import FAMILIES, hf_config, spec_of
from etude.models.spec import (
    TINIEST,
    TINY,
    TINY_DENSE,
    TINY_GEMMA,
    TINY_GLM,
    TINY_LATENT,
    GroupedSpec,
    LatentSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    WindowSpec,
    YarnScaling,
)
from etude.types import Json

transformers = pytest.importorskip("transformers")

SCALINGS = [
    None,
    LinearScaling(factor=4.0),
    Llama3Scaling(factor=8.0, low_factor=1.0, high_factor=4.0, original_positions=1024),
    YarnScaling(factor=4.0, original_positions=1024),
    YarnScaling(factor=4.0, original_positions=1024, mscale=0.7, mscale_all_dim=1.0, fast_turns=16.0, truncate=False),
    YarnScaling(factor=4.0, original_positions=1024, attention_factor=1.25),
]


def with_scaling(spec: ModelSpec, scaling: object) -> ModelSpec:
    assert scaling is None or isinstance(scaling, LinearScaling | Llama3Scaling | YarnScaling)
    rope = replace(spec.rope, scaling=scaling)
    if isinstance(spec.attention, LatentSpec):
        return replace(spec, rope=rope, attention=replace(spec.attention, sharpness=rope.latent_sharpness))
    return replace(spec, rope=rope)


@pytest.mark.parametrize("spec", TINIEST)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_spec_survives_its_config(spec: ModelSpec, scaling: object) -> None:
    scaled = with_scaling(spec, scaling)
    assert spec_of(hf_config(scaled), origin="config.json") == scaled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported, these are: deepseek_v3, gemma3_text, glm4_moe"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "llama", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "layer_types 'linear_att"),
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next'"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "Mxfp4Config(dequantize=True)"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "convert the checkpoint to bfloat16 first"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias True"),
        ({"model_type": "kimi_k2", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Json], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        spec_of(hf_config(TINY) | change, origin="here/config.json")
    assert str(caught.value).startswith("here/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None, expected int"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', expected int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected int"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], expected an object"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "sliding_window is null or not in use"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
        ({"num_key_value_heads": 3}, "contradicts itself: kv_heads=3 must divide heads=4"),
        ({"num_experts": 1}, "contradicts itself: per_token=2 and count=1"),
    ],
)
def test_damage_is_named(change: dict[str, Json], message: str) -> None:
    with pytest.raises(DamagedError, match=re.escape(message)):
        spec_of(hf_config(TINY) | change, origin="config.json")


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    config = hf_config(TINY_DENSE)
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "attention_bias"):
        del config[name]
    spec = spec_of(config, origin="config.json")
    assert spec.attention == GroupedSpec(heads=4, kv_heads=4, head_dim=8)
    assert spec.rope == RopeSpec(theta=10_000.0)


def test_the_published_shape_of_kimi_k2_is_understood() -> None:
    spec = spec_of(KIMI_K2, origin="config.json")
    assert spec.routes_shape == (60, 8)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.shared_size, spec.experts.scale) == (384, 2048, 2.827)
    assert spec.attention.key_width == 576
    assert spec.attention.scale == pytest.approx(192**-0.5 * (0.1 * 3.4657359 + 1) ** 2)
    assert spec.rope.amplitude == 1.0
    assert spec.rope.interleaved


KIMI_K2: dict[str, Json] = {
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@pytest.mark.parametrize(
    "spec",
    [
        replace(TINY_DENSE, attention=GroupedSpec(heads=2, kv_heads=2, head_dim=16, output_bias=True)),
        replace(TINY, attention=GroupedSpec(heads=2, kv_heads=2, head_dim=16)),
        replace(TINY, experts=replace(TINY.experts, shared_size=16) if TINY.experts else None),
        replace(TINY_LATENT, sparse_layers=(0, 1)),
        replace(TINY_LATENT, experts=None, sparse_layers=()),
        replace(TINY_GEMMA, embedding_scale=2.0),
        replace(TINY_GLM, gain_offset=1.0),
        replace(TINY_DENSE, window=WindowSpec(size=8, layers=(1,))),
    ],
)
def test_a_shape_that_no_family_has_cannot_be_written(spec: ModelSpec) -> None:
    with pytest.raises(ValueError, match="no family"):
        hf_config(spec)


def test_every_family_is_documented() -> None:
    from etude.models import families

    assert all(f"``{family}``" in families.__doc__ for family in FAMILIES)


SIGMOID_EXPERTS: dict[str, Json] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
    "first_k_dense_replace": 2,
}
SMALL: dict[str, dict[str, Json]] = {
    "grouped": {"num_key_value_heads": 2, "head_dim": 24},
    "qwen3_moe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        **SIGMOID_EXPERTS,
        "q_lora_rank": 20,
        "kv_lora_rank": 28,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_interleave": False,
    },
    "glm4_moe": {
        **SIGMOID_EXPERTS,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25},
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 30,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
        },
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_bias": False,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 3.0,
    },
}
"""Values that no family has by default, for what it has beside the others."""


def small_config(family: str) -> tuple[dict[str, Json], type]:
    """A config with all of transformers' keys for a family, few with their default; and the config class."""
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[
        "deepseek_v3" if family == "kimi_k2" else family
    ]
    defaults = config_class().to_dict()
    own = SMALL.get(config_class.model_type, {}) | (
        SMALL["grouped"] if config_class.model_type != "deepseek_v3" else {}
    )
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 8, "rms_norm_eps": 1e-5}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True}
    given = {
        "attention_bias": True,
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    }
    unlike = {"attention_bias"} if config_class.model_type == "deepseek_v3" else set()
    chosen = {key: given[key] for key in (given.keys() & defaults.keys()) - unlike}
    config = config_class(**shape | chosen | own).to_dict()
    config.pop("layer_types", None)  # it has the length of another key, and says what others say
    return config | {"model_type": family}, config_class


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_key_that_is_absent_is_what_the_family_takes_it_for_or_refused(family: str) -> None:
    config, config_class = small_config(family)
    assert spec_of(config, origin="config.json").vocab_size == 96
    refused = []
    for key in config.keys() - {"model_type"}:
        rest = {name: value for name, value in config.items() if name != key}
        default = (
            config_class(**{name: value for name, value in rest.items() if name != "model_type"}).to_dict().get(key)
        )
        try:
            actual = spec_of(rest, origin="config.json")
        except (DamagedError, UserError):
            refused.append(key)
            continue
        assert actual == spec_of(rest | {key: default}, origin="config.json"), f"{family}: {key}"
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= set(refused)
