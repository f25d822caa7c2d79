"""Any causal language model of transformers as the trainer's model: ``model.impl = "hf"``.

    packed tokens ──▶ transformers' own layers ──▶ hidden states ──▶ transformers' own output layer, chunk by chunk

A :class:`HfModel` has the trainer's interface of a :class:`~etude.models.decoder.Decoder`, so that packing, losses,
sharding and publishing are the same code for both. Transformers does the mathematics. This module separates packed
sequences, rounds parameters, recomputes activations in the backward pass, and publishes weights under their checkpoint
names, as views into parameters.

transformers and accelerate are an optional extra, imported when a model or a spec is made.

Shape legend: N tokens, B sequences, T positions of the longest, H hidden, V vocabulary, Q query heads, D width.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from etude.errors import ConfigError, UserError
from etude.models.arithmetic import Arithmetic, AttentionRule, PackedRows, packed_rows
from etude.models.decoder import RECOMPUTED, Decoder
from etude.models.experts import Routing
from etude.models.fast import FastArithmetic
from etude.models.spec import GroupedSpec, ModelSpec
from etude.types import Json

ATTENTION = "etude_packed"
"""Name under which transformers finds the attention over packed rows."""
NO_LIMIT = 1 << 30
"""Position limit of a model whose config has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelSpec):
    """The spec of a model that transformers computes.

    Its numbers are sizes for costs and limits. ``dense_size`` includes the experts that one token uses, since their
    routes can be neither recorded nor replayed. ``config`` defines the computation.
    """

    config: Mapping[str, Json] = field(hash=False)
    """The ``config.json``; not part of the hash, since a mapping is not hashable."""


def hf_spec(values: Mapping[str, Json], *, origin: str) -> HfSpec:
    """The spec of a ``config.json``; ``origin`` names the file in messages.

    Raises :class:`~etude.errors.ConfigError` without transformers, and :class:`~etude.errors.UserError` for a model
    that it has no causal language model for, or that needs code of the checkpoint.
    """
    transformers, family = _transformers(), values.get("model_type")
    families = _families()
    if family not in families:
        code = "its auto_map names code of the checkpoint, which is never run" if "auto_map" in values else ""
        raise UserError(
            f"{origin}: model_type {family!r} is none of transformers {transformers.__version__}"
            f"{'; ' + code if code else ''}: choose a model of its own families"
        )
    if values.get("quantization_config"):
        raise UserError(f"{origin}: quantization_config is not supported: convert the checkpoint to bfloat16 first")
    config = families[family].from_dict(dict(values))
    if config.get_text_config() is not config:
        raise UserError(f"{origin}: model_type {family!r} has more than one part: save its text model by itself")
    is_causal = not config.is_encoder_decoder and getattr(config, "is_decoder", True)
    if not is_causal or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{origin}: model_type {family!r} is not a causal language model of transformers")
    heads = _size(config, "num_attention_heads", 1)
    kv_heads = _size(config, "num_key_value_heads", heads)
    width = _size(config, "head_dim", config.hidden_size // heads)
    dense = _size(config, "intermediate_size", 4 * config.hidden_size)
    expert = _size(config, "moe_intermediate_size", dense)
    return HfSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        attention=GroupedSpec(
            heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else heads, head_dim=width + width % 2
        ),
        dense_size=_size(config, "num_experts_per_tok", 0) * expert or dense,
        max_positions=_size(config, "max_position_embeddings", NO_LIMIT),
        tied=bool(config.tie_word_embeddings),
        config=dict(values),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TensorPlace:
    """The place of one checkpoint tensor inside a parameter or buffer, which is contiguous."""

    name: str
    owner: nn.Module
    attribute: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self) -> tuple[str, Tensor]:
        """Its name and a view of its numbers; writing to the view writes to the model."""
        whole = self.owner._parameters.get(self.attribute)
        tensor = self.owner._buffers[self.attribute] if whole is None else whole.data
        assert tensor is not None
        return self.name, tensor.as_strided(self.size, self.stride, self.offset)


@final
class HfBlock(nn.Module):
    """One layer of transformers, with rounded parameters and optional activation checkpointing.

    Attributes that the surrounding model reads are delegated to the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.places: list[_TensorPlace] = []
        self.dtype: torch.dtype | None = None
        self.recompute = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        run = partial(_compute, self.layer, list(self.layer.modules()), self.dtype)
        return RECOMPUTED(run, *args, **kwargs) if self.recompute else run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


@final
class HfModel(nn.Module):
    """A causal language model of transformers, in place of a :class:`~etude.models.decoder.Decoder`.

    Dropout and other training-only behaviour is off. If all layers attend to the whole past, packed rows are computed
    with the attention of :class:`~etude.models.fast.FastArithmetic`; other models use rows padded on the right, where
    causal attention never sees the padding.

    Under the ``meta`` device only its parameters are on ``meta``; buffers are computed at construction.
    """

    def __init__(self, spec: HfSpec, arithmetic: Arithmetic | None = None) -> None:
        """Raises :class:`~etude.errors.UserError` for a model whose parts cannot be identified."""
        super().__init__()
        self.spec = spec
        self.arithmetic: Arithmetic = FastArithmetic() if arithmetic is None else arithmetic
        """Parameters are rounded to its type; it also computes logprobs."""
        self.recompute = False
        """Activation checkpointing, layer by layer."""
        self.adapters: None = None
        """Adapters are not supported for this model."""
        self.draft: None = None
        """It has no draft head."""
        self.network, self._packs = _make_network(spec)
        body = self.network.base_model
        if body is self.network:
            raise UserError(f"model_type {spec.config['model_type']!r}: no model below the output layer was found")
        takes = inspect.signature(body.forward).parameters.values()
        self._takes_positions = any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in takes)
        self._shared = _untie(self.network)
        layout = _layout(self.network)
        self.blocks = _BlockList(_wrap_layers(body, spec))
        inner = {id(module) for block in self.blocks for module in block.modules()}
        self._body = [module for module in body.modules() if id(module) not in inner]
        taken = inner | {id(module) for module in self._body}
        self._head = [module for module in self.network.modules() if id(module) not in taken]
        owners = {id(module): block for block in self.blocks for module in block.layer.modules()}
        self.places: list[_TensorPlace] = []
        """Places of the checkpoint tensors outside of blocks."""
        for place in layout:
            owner = owners.get(id(place.owner))
            (self.places if owner is None else owner.places).append(place)
        device = torch.get_default_device()
        if device.type != "meta":
            materialise_hf(self, str(device))

    @property
    def embedding(self) -> nn.Parameter:
        """[V,H] the embedding of token ids."""
        return cast("nn.Parameter", self.network.get_input_embeddings().weight)

    def train(self, mode: bool = True) -> "HfModel":
        """Set the mode; transformers' modules always stay in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, token_ids_BT: Tensor, rows: PackedRows | None = None) -> Tensor:
        """[B,T,H] final hidden states; with ``rows`` the one row is of packed sequences."""
        dtype = self._dtype
        for block in self.blocks:
            block.dtype, block.recompute = dtype, self.recompute
        more: dict[str, Any] = {} if rows is None else {"rows": rows}
        if self._takes_positions:
            positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)[None]
            more["position_ids"] = positions_BT if rows is None else rows.positions_N[None]
        with _rounded(self._body, dtype):
            out = self.network.base_model(input_ids=token_ids_BT, use_cache=False, **more)
        hidden_BTH: Tensor = out.last_hidden_state
        return hidden_BTH

    def forward_packed(
        self, token_ids_N: Tensor, lengths: Sequence[int] | None = None, routing: Routing | None = None
    ) -> Tensor:
        """[N,H] final hidden states of whole sequences that lie back to back, as :meth:`Decoder.forward_packed`.

        ``routing`` has no effect: a run with this model replays no routes.
        """
        lengths = (len(token_ids_N),) if lengths is None else tuple(lengths)
        if sum(lengths) != len(token_ids_N):
            raise ValueError(f"sequences of {sum(lengths)} tokens in all cannot lie in {len(token_ids_N)} packed ones")
        rows = packed_rows(lengths, token_ids_N.device)
        if self._packs:
            hidden_1NH: Tensor = self(token_ids_N[None], rows)
            return hidden_1NH[0]
        hidden_BTH: Tensor = self(pad_sequence(list(token_ids_N.split(lengths)), batch_first=True))
        return torch.cat([hidden_TH[:length] for hidden_TH, length in zip(hidden_BTH, lengths, strict=True)])

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N,H] → [N,V] by transformers' own code, including scales, biases and caps of logits: a temporary stub that
        returns these hidden states replaces the model below the output layer.
        """
        with self._given(hidden_NH[None]), _rounded(self._head, self._dtype):
            out = self.network.forward(inputs_embeds=hidden_NH[None], use_cache=False)
        logits_1NV: Tensor = out.logits
        return logits_1NV[0]

    @contextmanager
    def _given(self, hidden_1NH: Tensor) -> Iterator[None]:
        prefix = self.network.base_model_prefix
        body = self.network._modules[prefix]
        for one in self._shared:
            one.owner._parameters[one.attribute] = one.source._parameters[one.source_attribute]
        self.network._modules[prefix] = _GivenHidden(hidden_1NH)
        try:
            yield
        finally:
            self.network._modules[prefix] = body
            for one in self._shared:
                one.owner._parameters[one.attribute] = None

    @property
    def _dtype(self) -> torch.dtype | None:
        assert isinstance(self.arithmetic, FastArithmetic), "refused with the recipe"
        return self.arithmetic.dtype


CausalModel: TypeAlias = Decoder | HfModel
"""A model that can be trained: étude's own, or one of transformers."""


def make_causal_model(spec: ModelSpec, arithmetic: Arithmetic | None = None) -> CausalModel:
    """The model of a spec, without weights."""
    return HfModel(spec, arithmetic) if isinstance(spec, HfSpec) else Decoder(spec, arithmetic)


def hf_views(part: HfModel | HfBlock) -> Iterator[tuple[str, Tensor]]:
    """Views of the checkpoint tensors of a block, or of those outside of blocks, by their names in the checkpoint."""
    return (place.view() for place in part.places)


def materialise_hf(part: nn.Module, device: str) -> None:
    """Give every parameter of ``part`` that is on ``meta`` memory on ``device``, and move its buffers there."""
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@final
class _BlockList(tuple[HfBlock, ...]):
    """The blocks, which are the network's modules already: a tuple is not registered again."""

    __slots__ = ()


@final
class _GivenHidden(nn.Module):
    """A model below the output layer whose hidden states are already computed."""

    def __init__(self, hidden_1NH: Tensor) -> None:
        super().__init__()
        self._hidden_1NH = hidden_1NH

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """The hidden states, as every model of transformers returns them."""
        return _HiddenStates((self._hidden_1NH,))


@final
class _HiddenStates(tuple[Tensor]):
    """The output of a model below the output layer: hidden states, and ``None`` for whatever else its family has."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        """[1,N,H]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SharedParameter:
    """A parameter that is another module's as well; it is registered there alone."""

    owner: nn.Module
    attribute: str
    source: nn.Module
    source_attribute: str


@final
class _AsViews(TorchFunctionMode):
    """Makes operations return views, so that a part of a tensor can be located in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))


def _transformers() -> ModuleType:
    try:
        import accelerate  # noqa: F401 - looked for now, used when a model is made
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model.impl = 'hf' needs transformers and accelerate, and {error.name} is not installed here: "
            f"pip install 'etude[hf]' -c constraints-hf.txt"
        ) from error
    return transformers


def _families() -> Any:
    """Transformers' classes of configurations by their ``model_type``."""
    return _transformers().models.auto.configuration_auto.CONFIG_MAPPING


def _size(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else default


def _make_network(spec: HfSpec) -> tuple[Any, bool]:
    """The model with its parameters on ``meta``, and True if it attends over packed rows."""
    transformers = _transformers()
    from accelerate import init_empty_weights

    transformers.AttentionInterface.register(ATTENTION, _attend_packed)
    config = _families()[spec.config["model_type"]].from_dict(dict(spec.config))
    config.use_cache, config.output_router_logits = False, False
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    packs = _sees_everything(config) and kind._supports_attention_backend and not kind._is_stateful
    implementation = {"attn_implementation": ATTENTION} if packs else {}
    with torch.device("cpu"), init_empty_weights(include_buffers=False):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False, **implementation
        )
    network.tie_weights()  # parameters are made anew on meta, one by one
    return network.eval(), packs


def _sees_everything(config: Any) -> bool:
    """True if every layer attends to the whole past, with a plain softmax of products."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    capped = getattr(config, "attn_logit_softcapping", None)
    return not window and not capped and kinds == {"full_attention"}


def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1,Q,N,D] each in, [1,N,Q,D] out. Raises ``ValueError`` for a layer that
    wants more than packed rows know.
    """
    beyond = [name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if more.get(name) is not None]
    if beyond or attention_mask is not None or more.get("dropout") or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} attends with {beyond or 'a mask or dropout'}, over packed rows")
    q_NQD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    rule = AttentionRule(scale=more.get("scaling") or query.shape[-1] ** -0.5)
    return FastArithmetic().attend_packed(q_NQD, k_NKD, v_NKD, more["rows"], rule)[None], None


def _untie(network: nn.Module) -> list[_SharedParameter]:
    """Register each shared parameter only in the first module that has it."""
    shared, first = [], dict[int, tuple[nn.Module, str]]()
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            source, attribute = first.setdefault(id(parameter), (module, name))
            if source is not module:
                shared.append(_SharedParameter(owner=module, attribute=name, source=source, source_attribute=attribute))
    for one in shared:
        one.owner._parameters[one.attribute] = None
    return shared


def _layout(network: Any) -> list[_TensorPlace]:
    """The place of every tensor that a checkpoint of this model has, by transformers' own conversion of names.

    Raises :class:`~etude.errors.UserError` for one that is no part of a parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    owners = {
        f"{prefix}.{name}": (module, name)
        for prefix, module in network.named_modules()
        for name in (*module._parameters, *module._buffers)
    }
    state = network.state_dict()
    storages = {tensor.untyped_storage()._cdata: owners[name] for name, tensor in state.items()}
    with _AsViews():
        saved = revert_weight_conversion(network, dict(state))
    places = []
    for name, tensor in saved.items():
        owner = storages.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise UserError(f"{type(network).__name__}: {name!r} of its checkpoints is not a part of a parameter")
        places.append(
            _TensorPlace(
                name=name,
                owner=owner[0],
                attribute=owner[1],
                size=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()),
            )
        )
    return places


def _wrap_layers(body: nn.Module, spec: HfSpec) -> list[HfBlock]:
    """Wrap each layer in a block; the layers are the module list whose length is the number of layers."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == spec.layers]
    if not lists:
        raise UserError(f"{type(body).__name__}: no list of {spec.layers} layers was found in it")
    layers = lists[0]
    for index, layer in enumerate(layers):
        layers[index] = HfBlock(layer)
    return [cast("HfBlock", block) for block in layers]


def _compute(
    layer: nn.Module, modules: Sequence[nn.Module], dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> Any:
    with _rounded(modules, dtype):
        return layer(*args, **kwargs)


@contextmanager
def _rounded(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Round parameters of ``modules`` to a type while the context is open; gradients go to the original parameters."""
    before = [] if dtype is None else [(module, dict(module._parameters)) for module in modules]
    for module, own in before:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = cast("nn.Parameter", parameter.to(dtype))
    try:
        yield
    finally:
        for module, own in before:
            module._parameters.update(own)
