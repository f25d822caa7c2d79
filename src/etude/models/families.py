"""Model families: Hugging Face's ``config.json`` to a model spec and back.

Read: ``qwen3``, ``qwen3_moe``, ``qwen2``, ``llama``, ``mistral``, ``deepseek_v3``, ``kimi_k2``, ``glm4_moe`` (GLM-4.5,
4.6), ``gemma3_text`` and ``gpt_oss``, as transformers 4 and 5 write them. An unsupported value that would change the
computation is rejected by name, never ignored; an absent key has transformers' default for that family, or is rejected.
Written: the family whose model computes the same, so ``mistral`` without a window is written as ``llama`` and
``kimi_k2`` as ``deepseek_v3``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias, TypeVar, final

from etude.errors import DamagedError, UserError
from etude.models.spec import (
    GELU_TANH,
    ExpertsSpec,
    GateSpec,
    GroupedSpec,
    LatentSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    Scaling,
    WindowSpec,
    YarnScaling,
)
from etude.types import Json

T = TypeVar("T", int, float, bool, str)
Config: TypeAlias = dict[str, Json]
DRAFT = "draft_head"
"""étude's own key: a draft head is part of the model. ``num_nextn_predict_layers`` alone does not load one."""


MOST_LAYERS = 10_000
"""Upper limit of layers, above that of any model; the spec has a row per layer."""


def spec_of(config: Mapping[str, Json], *, origin: str) -> ModelSpec:
    """The model spec of a ``config.json``; ``origin`` names the file in messages.

    Raises :class:`~etude.errors.DamagedError` for missing, mistyped or contradictory values, and
    :class:`~etude.errors.UserError` for unsupported ones.
    """
    fields = ConfigFields(config, origin)
    family = fields.read("model_type", str)
    if family not in FAMILIES:
        raise UserError(f"{origin}: model_type {family!r} is not supported, these are: {', '.join(sorted(FAMILIES))}")
    if (layers := fields.optional("num_hidden_layers", int) or 0) > MOST_LAYERS:
        raise DamagedError(f"{origin}: num_hidden_layers = {layers}: expected at most {MOST_LAYERS}")
    fields.expect("hidden_act", "silu", fix="other activations are not implemented")
    is_mxfp4 = fields.part("quantization_config").get("quant_method") == "mxfp4"
    fix = f"convert the checkpoint to bfloat16 first{MXFP4_FIX if is_mxfp4 else ''}"
    fields.expect("quantization_config", None, fix=fix)
    if family not in PARTLY_ROTARY:
        fields.expect("partial_rotary_factor", 1.0, fix=f"{family} turns whole heads")
    if family not in WINDOWED:
        fields.expect("use_sliding_window", False, fix=f"{family} has no windows")
    if family not in LAYERED and any(kind != FULL for kind in fields.items("layer_types")):
        raise UserError(f"{origin}: layer_types other than {FULL!r} are not supported in {family}")
    try:
        return replace(FAMILIES[family](fields), draft=fields.read(DRAFT, bool, False))
    except ValueError as error:
        raise DamagedError(f"{origin} contradicts itself: {error}") from error


def hf_config(spec: ModelSpec) -> dict[str, Json]:
    """The ``config.json`` of a model spec, for transformers 4 and 5.

    Raises ``ValueError`` if no family has the shape.
    """
    config = _config(spec)
    if spec_of(config, origin="config.json") != spec:
        raise ValueError(f"no family has the shape {spec}: {config['model_type']} comes closest")
    return config


def _config(spec: ModelSpec) -> Config:
    """The ``config.json`` of a model spec, if any family has its shape."""
    config: dict[str, Json] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.attention.heads,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "intermediate_size": spec.dense_size,
        **_rope_config(spec.rope),
    }
    if spec.draft:
        config |= {DRAFT: True, "num_nextn_predict_layers": 1}
    if isinstance(spec.attention, GroupedSpec) and spec.sandwich:
        del config["hidden_act"]
        return config | _gemma3_config(spec, spec.attention)
    if isinstance(spec.attention, LatentSpec):
        return config | _latent_config(spec, spec.attention)
    return config | _grouped_config(spec, spec.attention)


@final
class ConfigFields:
    """Reads a JSON object with types; errors name the field."""

    def __init__(self, values: Mapping[str, Json], origin: str) -> None:
        self._values = values
        self.origin = origin

    def read(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A required value, or ``default`` if it is absent or null. Raises :class:`~etude.errors.DamagedError`."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or type(value) is not kind:
            raise DamagedError(f"{self.origin}: {name} is {value!r:.80}, expected {kind.__name__}")
        return value

    def optional(self, name: str, kind: type[T], absent: T | None = None) -> T | None:
        """A value that may be null, or ``absent``."""
        if name not in self._values:
            return absent
        return None if self._values[name] is None else self.read(name, kind)

    def items(self, name: str) -> list[Json]:
        """A list that may be absent or null."""
        value = self._values.get(name) or []
        if not isinstance(value, list):
            raise DamagedError(f"{self.origin}: {name} is {value!r:.80}, expected a list")
        return value

    def part(self, name: str) -> dict[str, Json]:
        """An object that may be absent or null."""
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise DamagedError(f"{self.origin}: {name} is {value!r:.80}, expected an object")
        return value

    def expect(self, name: str, value: Json, *, fix: str, absent: Json = None) -> None:
        """Reject any other value than ``value``. Null is accepted, and so is an absent key, unless its default
        ``absent`` is another value.
        """
        actual = self._values.get(name, absent)
        if actual is not None and actual != value:
            raise UserError(f"{self.origin}: {name} {actual!r:.80} is not supported: {fix}")


# --- Reading ----------------------------------------------------------------------------------------------------------


def _model(
    fields: ConfigFields,
    attention: GroupedSpec | LatentSpec,
    rope: RopeSpec,
    experts: ExpertsSpec | None = None,
    sparse_layers: tuple[int, ...] = (),
    window: WindowSpec | None = None,
) -> ModelSpec:
    """The fields with the same names in all families."""
    layers = fields.read("num_hidden_layers", int)
    return ModelSpec(
        vocab_size=fields.read("vocab_size", int),
        hidden_size=fields.read("hidden_size", int),
        layers=layers,
        attention=attention,
        dense_size=fields.read("intermediate_size", int) if len(sparse_layers) < layers else 0,
        experts=experts if sparse_layers else None,
        sparse_layers=sparse_layers,
        rope=rope,
        window=window,
        norm_eps=fields.read("rms_norm_eps", float, 1e-6),
        max_positions=fields.read("max_position_embeddings", int),
        tied=fields.read("tie_word_embeddings", bool, False),
    )


def _window(fields: ConfigFields, kinds: list[Json], size: int | None) -> WindowSpec | None:
    """The layers with a window: those in ``layer_types``, or in ``kinds`` if there is no such key."""
    kinds = fields.items("layer_types") or kinds
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise UserError(f"{fields.origin}: layer_types {unknown[0]!r} is neither {FULL!r} nor {SLIDING!r}")
    if len(kinds) != fields.read("num_hidden_layers", int):
        raise DamagedError(f"{fields.origin}: layer_types names {len(kinds)} layers, there are others")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if layers and size is None:
        raise DamagedError(f"{fields.origin}: layer_types has {SLIDING!r}, but sliding_window is null or not in use")
    return WindowSpec(size=size, layers=layers) if layers and size is not None else None


def _qwen_window(fields: ConfigFields) -> WindowSpec | None:
    """Qwen's window: in the upper layers, if enabled."""
    layers = fields.read("num_hidden_layers", int)
    size = fields.optional("sliding_window", int, 4096) if fields.read("use_sliding_window", bool, False) else None
    first = layers if size is None else fields.read("max_window_layers", int, 28)
    return _window(fields, [SLIDING if layer >= first else FULL for layer in range(layers)], size)


def _grouped(
    fields: ConfigFields,
    *,
    bias: bool,
    output_bias: bool,
    normed: bool,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> GroupedSpec:
    """Grouped attention; ``kv_heads`` and ``head_dim`` are defaults for absent keys. Null means one key head per head,
    and heads that are together as wide as the model.
    """
    heads = fields.read("num_attention_heads", int)
    return GroupedSpec(
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads", int, kv_heads) or heads,
        head_dim=fields.optional("head_dim", int, head_dim) or fields.read("hidden_size", int) // heads,
        bias=bias,
        output_bias=output_bias,
        normed=normed,
    )


def _llama(fields: ConfigFields) -> ModelSpec:
    fields.expect("mlp_bias", False, fix="biases of feed-forward layers are not implemented")
    bias = fields.read("attention_bias", bool, False)
    return _model(fields, _grouped(fields, bias=bias, output_bias=bias, normed=False), _rope(fields))


def _mistral(fields: ConfigFields) -> ModelSpec:
    size = fields.optional("sliding_window", int, 4096)
    attention = _grouped(fields, bias=False, output_bias=False, normed=False, kv_heads=8)
    return _model(fields, attention, _rope(fields), window=_everywhere(fields, size))


def _everywhere(fields: ConfigFields, size: int | None) -> WindowSpec | None:
    """A window of this size in all layers."""
    kind = FULL if size is None else SLIDING
    return _window(fields, [kind] * fields.read("num_hidden_layers", int), size)


def _qwen2(fields: ConfigFields) -> ModelSpec:
    attention = _grouped(fields, bias=True, output_bias=False, normed=False, kv_heads=32)
    return _model(fields, attention, _rope(fields), window=_qwen_window(fields))


def _qwen3(fields: ConfigFields) -> ModelSpec:
    bias = fields.read("attention_bias", bool, False)
    attention = _grouped(fields, bias=bias, output_bias=bias, normed=True, kv_heads=32, head_dim=128)
    return _model(fields, attention, _rope(fields), window=_qwen_window(fields))


def _qwen3_moe(fields: ConfigFields) -> ModelSpec:
    bias = fields.read("attention_bias", bool, False)
    step = fields.read("decoder_sparse_step", int, 1)
    dense = fields.items("mlp_only_layers")
    layers = range(fields.read("num_hidden_layers", int))
    size = fields.optional("sliding_window", int, 4096) if fields.read("use_sliding_window", bool, False) else None
    return _model(
        fields,
        _grouped(fields, bias=bias, output_bias=bias, normed=True, kv_heads=4),
        _rope(fields),
        ExpertsSpec(
            count=fields.optional("num_experts", int) or fields.read("num_local_experts", int),
            per_token=fields.read("num_experts_per_tok", int),
            size=fields.read("moe_intermediate_size", int),
            normalise=fields.read("norm_topk_prob", bool, False),
        ),
        tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        window=_everywhere(fields, size),
    )


def _deepseek_v3(fields: ConfigFields) -> ModelSpec:
    fields.expect("attention_bias", False, fix="biases of latent attention are not implemented")
    fields.expect("scoring_func", "sigmoid", fix="with latent attention only DeepSeek-V3's router is implemented")
    fields.expect("topk_method", "noaux_tc", fix="with latent attention only DeepSeek-V3's router is implemented")
    fields.expect("moe_layer_freq", 1, fix="every layer after the dense ones must have experts")
    rope = _rope(fields, interleaved=fields.read("rope_interleave", bool, True))
    experts = _sigmoid_experts(fields, groups=8, top_groups=4, scale=2.5)
    attention = LatentSpec(
        heads=fields.read("num_attention_heads", int),
        q_rank=fields.optional("q_lora_rank", int, 1536),
        kv_rank=fields.read("kv_lora_rank", int),
        nope_dim=fields.read("qk_nope_head_dim", int),
        rope_dim=fields.read("qk_rope_head_dim", int),
        value_dim=fields.read("v_head_dim", int),
        sharpness=rope.latent_sharpness,
    )
    layers, dense = fields.read("num_hidden_layers", int), fields.read("first_k_dense_replace", int, 3)
    return _model(fields, attention, rope, experts, tuple(range(dense, layers)))


def _glm4_moe(fields: ConfigFields) -> ModelSpec:
    share = fields.read("partial_rotary_factor", float, 0.5)
    share = ConfigFields(_rope_values(fields), fields.origin).read("partial_rotary_factor", float, share)
    attention = _grouped(
        fields,
        bias=fields.read("attention_bias", bool, False),
        output_bias=False,
        normed=fields.read("use_qk_norm", bool, False),
        kv_heads=8,
    )
    if share != 1.0:
        attention = replace(attention, rotary_dim=int(attention.head_dim * share))
    experts = _sigmoid_experts(fields, groups=1, top_groups=1, scale=1.0)
    layers, dense = fields.read("num_hidden_layers", int), fields.read("first_k_dense_replace", int, 1)
    spec = _model(fields, attention, _rope(fields), experts, tuple(range(dense, layers)))
    return replace(spec, norm_eps=fields.read("rms_norm_eps", float, 1e-5))


def _sigmoid_experts(fields: ConfigFields, *, groups: int, top_groups: int, scale: float) -> ExpertsSpec:
    """DeepSeek-V3's router; the other arguments are defaults for absent keys."""
    size = fields.read("moe_intermediate_size", int)
    return ExpertsSpec(
        count=fields.optional("n_routed_experts", int) or fields.read("num_local_experts", int),
        per_token=fields.read("num_experts_per_tok", int),
        size=size,
        shared_size=size * fields.read("n_shared_experts", int, 1),
        scoring="sigmoid",
        normalise=fields.read("norm_topk_prob", bool, True),
        groups=fields.read("n_group", int, groups),
        top_groups=fields.read("topk_group", int, top_groups),
        scale=fields.read("routed_scaling_factor", float, scale),
    )


def _gemma3(fields: ConfigFields) -> ModelSpec:
    fields.expect("hidden_activation", "gelu_pytorch_tanh", fix="other activations are not implemented")
    fields.expect("attn_logit_softcapping", None, fix="soft caps are not implemented")
    fields.expect("final_logit_softcapping", None, fix="soft caps are not implemented")
    fields.expect("use_bidirectional_attention", False, fix="a token must not see its future")
    bias = fields.read("attention_bias", bool, False)
    attention = _grouped(fields, bias=bias, output_bias=bias, normed=True, kv_heads=4, head_dim=256)
    query_width = fields.read("query_pre_attn_scalar", int, 256)
    every = fields.read("sliding_window_pattern", int, 6)
    layers = fields.read("num_hidden_layers", int)
    kinds: list[Json] = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    window = _window(fields, kinds, fields.optional("sliding_window", int, 4096))
    spec = _model(
        fields,
        replace(attention, query_width=None if query_width == attention.head_dim else query_width),
        _rope(fields, kind=FULL, theta=1_000_000.0),
        window=None if window is None else replace(window, rope=_local_rope(fields)),
    )
    return replace(
        spec,
        gate=GELU_TANH,
        gain_offset=1.0,
        sandwich=True,
        embedding_scale=float(spec.hidden_size**0.5),
        tied=fields.read("tie_word_embeddings", bool, True),
    )


def _local_rope(fields: ConfigFields) -> RopeSpec:
    """Gemma's second rope, for layers with a window."""
    parameters = fields.part("rope_parameters").get(SLIDING) or {}
    theta = fields.read("rope_local_base_freq", float, 10_000.0)
    return _rope(
        ConfigFields({"max_position_embeddings": 1, "rope_parameters": parameters}, fields.origin), theta=theta
    )


def _gpt_oss(fields: ConfigFields) -> ModelSpec:
    bias = fields.read("attention_bias", bool, True)
    attention = _grouped(fields, bias=bias, output_bias=bias, normed=False, kv_heads=8, head_dim=64)
    layers = fields.read("num_hidden_layers", int)
    kinds: list[Json] = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    experts = ExpertsSpec(
        count=fields.optional("num_local_experts", int) or fields.read("num_experts", int),
        per_token=fields.read("num_experts_per_tok", int),
        size=fields.read("intermediate_size", int),
        bias=True,
        fused=True,
    )
    spec = _model(
        fields,
        replace(attention, sinks=True),
        _rope(fields, theta=150_000.0, absent=GPT_OSS_ROPE),
        experts,
        tuple(range(layers)),
        window=_window(fields, kinds, fields.optional("sliding_window", int, 128)),
    )
    spec = replace(spec, norm_eps=fields.read("rms_norm_eps", float, 1e-5))
    slope, limit = fields.read("swiglu_alpha", float, 1.702), fields.read("swiglu_limit", float, 7.0)
    return replace(spec, gate=GateSpec(slope=slope, shift=1.0, limit=limit, interleaved=True))


def _rope_values(fields: ConfigFields, kind: str = "") -> Config:
    """``rope_scaling`` of transformers 4 or ``rope_parameters`` of 5, for layers of a ``kind`` if these differ."""
    values = fields.part("rope_parameters")
    values = fields.part("rope_scaling") or ConfigFields(values, fields.origin).part(kind) or values
    return {name: value for name, value in values.items() if name not in (FULL, SLIDING)}


def _rope(
    fields: ConfigFields,
    *,
    interleaved: bool = False,
    kind: str = "",
    theta: float = 10_000.0,
    absent: Mapping[str, Json] = MappingProxyType({}),
) -> RopeSpec:
    """``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of transformers 4.

    ``theta`` and ``absent`` are defaults for absent keys.
    """
    origin = f"{fields.origin}: rope_parameters"
    values = _rope_values(fields, kind) or dict(absent)
    theta = fields.read("rope_theta", float, theta)
    parameters = ConfigFields({"rope_type": values.get("type"), "rope_theta": theta} | values, origin)
    if fields.read("model_type", str, "") not in PARTLY_ROTARY:
        parameters.expect("partial_rotary_factor", 1.0, fix="this family turns whole heads")
    return RopeSpec(
        theta=parameters.read("rope_theta", float, theta),
        scaling=_scaling(parameters, fields.read("max_position_embeddings", int)),
        interleaved=interleaved,
    )


def _scaling(parameters: ConfigFields, positions: int) -> Scaling | None:
    kind = parameters.read("rope_type", str, "default")
    original = parameters.read("original_max_position_embeddings", int, positions)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=parameters.read("factor", float))
        case "llama3":
            return Llama3Scaling(
                factor=parameters.read("factor", float),
                low_factor=parameters.read("low_freq_factor", float),
                high_factor=parameters.read("high_freq_factor", float),
                original_positions=original,
            )
        case "yarn":
            return YarnScaling(
                factor=parameters.read("factor", float, positions / original),
                original_positions=original,
                fast_turns=parameters.read("beta_fast", float, 32.0),
                slow_turns=parameters.read("beta_slow", float, 1.0),
                mscale=parameters.read("mscale", float, 0.0),
                mscale_all_dim=parameters.read("mscale_all_dim", float, 0.0),
                attention_factor=parameters.optional("attention_factor", float),
                truncate=parameters.read("truncate", bool, True),
            )
        case _:
            raise UserError(f"{parameters.origin}: rope_type {kind!r} is none of default, linear, llama3, yarn")


FAMILIES: Mapping[str, Callable[[ConfigFields], ModelSpec]] = MappingProxyType(
    {
        "deepseek_v3": _deepseek_v3,
        "gemma3_text": _gemma3,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "kimi_k2": _deepseek_v3,
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
    }
)
"""The reader of each ``model_type``."""
PARTLY_ROTARY = ("glm4_moe",)
"""Families that may rotate only a part of each head."""
WINDOWED = ("qwen2", "qwen3", "qwen3_moe")
"""Families whose windows can be switched on."""
LAYERED = ("gemma3_text", "gpt_oss", "qwen2", "qwen3")
"""Families whose layers may differ in attention."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of ``layer_types``."""
MXFP4_FIX = (
    ": load it with transformers' AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config="
    "Mxfp4Config(dequantize=True)) and write it with save_pretrained"
)
GPT_OSS_ROPE: Mapping[str, Json] = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
"""Transformers' default rope of gpt-oss."""


# --- Writing ----------------------------------------------------------------------------------------------------------


def _grouped_config(spec: ModelSpec, attention: GroupedSpec) -> Config:
    experts = spec.experts
    if experts is not None and experts.fused:
        return _gpt_oss_config(spec, attention, experts)
    if experts is not None and experts.scoring == "sigmoid":
        return _glm4_moe_config(spec, attention, experts)
    family, architecture = _grouped_family(spec, attention)
    config: Config = {
        "model_type": family,
        "architectures": [architecture],
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        **_window_config(spec, family),
    }
    if experts is None:
        return config
    dense: list[Json] = [layer for layer in range(spec.layers) if layer not in spec.sparse_layers]
    return config | {
        "intermediate_size": spec.dense_size or experts.size * experts.per_token,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "norm_topk_prob": experts.normalise,
    }


def _grouped_family(spec: ModelSpec, attention: GroupedSpec) -> tuple[str, str]:
    """(model_type, architecture), by the features of the layers."""
    if attention.normed and attention.bias == attention.output_bias:
        return ("qwen3_moe", "Qwen3MoeForCausalLM") if spec.experts else ("qwen3", "Qwen3ForCausalLM")
    if spec.experts is None and not attention.normed:
        if attention.bias == attention.output_bias:
            return ("llama", "LlamaForCausalLM") if spec.window is None else ("mistral", "MistralForCausalLM")
        if attention.bias:
            return "qwen2", "Qwen2ForCausalLM"
    raise ValueError(f"no family has {attention} with experts={spec.experts}")


def _window_config(spec: ModelSpec, family: str) -> Config:
    """The window keys of families that may have windows."""
    if spec.window is None:
        return {"use_sliding_window": False}
    size: Config = {"sliding_window": spec.window.size}
    if family == "mistral":
        return size
    kinds: Config = {"layer_types": _layer_types(spec)} if family in LAYERED else {}
    return size | kinds | {"use_sliding_window": True, "max_window_layers": spec.window.layers[0]}


def _layer_types(spec: ModelSpec) -> list[Json]:
    return [FULL if spec.window_of(layer) is None else SLIDING for layer in range(spec.layers)]


def _gemma3_config(spec: ModelSpec, attention: GroupedSpec) -> Config:
    window = spec.window
    local = spec.rope if window is None else window.rope or spec.rope
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "query_pre_attn_scalar": attention.query_width or attention.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096 if window is None else window.size,
        "layer_types": _layer_types(spec),
        "rope_local_base_freq": local.theta,
        "rope_parameters": {
            FULL: {"rope_theta": spec.rope.theta, **_scaling_config(spec.rope.scaling)},
            SLIDING: {"rope_theta": local.theta, **_scaling_config(local.scaling)},
        },
    }


def _gpt_oss_config(spec: ModelSpec, attention: GroupedSpec, experts: ExpertsSpec) -> Config:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "intermediate_size": experts.size,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": 128 if spec.window is None else spec.window.size,
        "layer_types": _layer_types(spec),
        "swiglu_alpha": spec.gate.slope,
        "swiglu_limit": spec.gate.limit,
    }


def _glm4_moe_config(spec: ModelSpec, attention: GroupedSpec, experts: ExpertsSpec) -> Config:
    share = attention.rotary_width / attention.head_dim
    rope: Config = {"rope_theta": spec.rope.theta, **_scaling_config(spec.rope.scaling), "partial_rotary_factor": share}
    return {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "use_qk_norm": attention.normed,
        "partial_rotary_factor": share,
        "rope_parameters": rope,
        **_sigmoid_config(spec, experts),
    }


def _sigmoid_config(spec: ModelSpec, experts: ExpertsSpec) -> Config:
    """The keys of DeepSeek-V3's experts."""
    return {
        "intermediate_size": spec.dense_size or experts.size * experts.per_token,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "n_shared_experts": experts.shared_size // experts.size,
        "first_k_dense_replace": spec.sparse_layers[0],
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "num_nextn_predict_layers": int(spec.draft),
    }


def _latent_config(spec: ModelSpec, attention: LatentSpec) -> Config:
    experts = spec.experts
    if experts is None:
        raise ValueError("no family has latent attention without experts")
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": attention.heads,
        "attention_bias": False,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": spec.rope.interleaved,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **_sigmoid_config(spec, experts),
    }


def _rope_config(rope: RopeSpec) -> Config:
    """For transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``)."""
    scaling = _scaling_config(rope.scaling)
    config: Config = {"rope_theta": rope.theta, "rope_parameters": {"rope_theta": rope.theta, **scaling}}
    return config | {"rope_scaling": {**scaling, "rope_theta": rope.theta}} if rope.scaling else config


def _scaling_config(scaling: Scaling | None) -> Config:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_factor,
                "high_freq_factor": scaling.high_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
        case YarnScaling():
            config: Config = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_positions,
                "beta_fast": scaling.fast_turns,
                "beta_slow": scaling.slow_turns,
                "mscale": scaling.mscale or None,
                "mscale_all_dim": scaling.mscale_all_dim or None,
                "attention_factor": scaling.attention_factor,
                "truncate": scaling.truncate,
            }
            return {name: value for name, value in config.items() if value is not None}
