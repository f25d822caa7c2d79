"""Hugging Face checkpoints and published states, to and from a :class:`~etude.models.decoder.Decoder`.

A *state* is ``{checkpoint name: tensor}`` with Hugging Face's names: one tensor per projection and expert. Weights are
stored, published and verified in this form. Owns files; :mod:`etude.models.naming` owns the names,
:mod:`etude.models.families` the meaning of ``config.json``.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.config.training import ModelShape
from etude.errors import DamagedError
from etude.models.adapters import SCALE, adapter_views, check_base
from etude.models.decoder import Decoder, DecoderBlock
from etude.models.families import hf_config, spec_of
from etude.models.hf import CausalModel, HfBlock, HfModel, HfSpec, hf_spec, hf_views
from etude.models.naming import HEAD, Views, block_views, outer_views
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.types import Json

Impl: TypeAlias = Literal["native", "hf"]
"""The implementation of a model, ``model.impl``."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Index of a split checkpoint: the file of each tensor."""
CONFIG_FILE = "config.json"

LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
FAULTS_NAMED = 8
"""Number of mismatched tensors that an error names; the rest are counted."""
DRAFT_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Suffixes of a draft head's tensors that it shares with the model; some checkpoints store them twice."""
TABLE_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of rotation tables, which old checkpoints contain and which are not needed."""


def spec_from_shape(shape: ModelShape, vocab_size: int) -> ModelSpec:
    """The Qwen3-MoE model spec of a recipe, with the vocabulary size of its tokenizer."""
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        attention=GroupedSpec(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, normed=True),
        experts=ExpertsSpec(count=shape.experts, per_token=shape.experts_per_token, size=shape.expert_size),
        sparse_layers=tuple(range(shape.layers)),
    )


def state_views(model: CausalModel) -> Views:
    """Views of all tensors of a model's state, by name; only those of the adapter if it has one."""
    return adapter_views(model) if isinstance(model, Decoder) and model.adapters is not None else views(model)


def state_of(model: CausalModel) -> dict[str, Tensor]:
    """The model's weights as a state: detached views, no copies."""
    return {name: view.detach() for name, view in state_views(model)}


def load_state(model: CausalModel, state: Mapping[str, Tensor]) -> None:
    """Copy a state into a model.

    Raises as :func:`check_state` does, before anything is copied.
    """
    check_state(model, state)
    with torch.no_grad():
        for name, view in state_views(model):
            view.copy_(state[name])


def check_state(model: CausalModel, state: Mapping[str, Tensor]) -> None:
    """Compare a state's names and shapes with those of ``model``, whose weights may lie on ``meta``.

    Raises :class:`~etude.errors.DamagedError` for a missing or misshapen tensor, for one that the model does not have,
    because it would be ignored, and for an adapter of another base or scale.
    """
    places = dict(state_views(model))
    for name in state:
        if name not in places:
            raise DamagedError(f"tensor {name!r} has no place in this model: the state is another model's")
    for name, view in places.items():
        tensor = state.get(name)
        if tensor is None or tensor.shape != view.shape:
            actual = "missing" if tensor is None else f"{list(tensor.shape)}"
            raise DamagedError(f"tensor {name!r} should be {list(view.shape)}, it is {actual}")
    if isinstance(model, Decoder) and model.adapters is not None:
        check_base(model, state)
        if float(state[SCALE]) != float(model.adapters.scale):
            raise DamagedError(
                f"the adapter has the scale {float(state[SCALE]):g}, expected is {float(model.adapters.scale):g}: it "
                f"is of another lora.alpha or lora.rank"
            )


def fill(part: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Copy a block's tensors, or those outside of the blocks, by their names."""
    with torch.no_grad():
        for name, view in _part_views(part):
            view.copy_(read(name))


def views(model: CausalModel) -> Views:
    """Views of all checkpoint tensors of a model, by their Hugging Face names."""
    for part in (*model.blocks, model):
        yield from _part_views(part)


def _part_views(part: nn.Module) -> Views:
    if isinstance(part, HfModel | HfBlock):
        return hf_views(part)
    assert isinstance(part, DecoderBlock | Decoder)
    return block_views(part) if isinstance(part, DecoderBlock) else outer_views(part)


def save_checkpoint(
    folder: Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    end_id: int,
    pad_id: int,
    extra: Mapping[str, Json] = MappingProxyType({}),
) -> None:
    """Write ``config.json`` and ``model.safetensors`` that ``AutoModelForCausalLM.from_pretrained`` loads.

    ``extra`` is added to the configuration, for example the quantisation of weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(max(state.values(), key=Tensor.numel).dtype).removeprefix("torch.")
    shape = dict(spec.config) if isinstance(spec, HfSpec) else hf_config(spec)
    shape.pop("torch_dtype", None)
    config = shape | {"dtype": dtype, "eos_token_id": end_id, "pad_token_id": pad_id} | dict(extra)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({k: v.contiguous() for k, v in state.items()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_checkpoint(folder: Path, impl: Impl = "native") -> tuple[ModelSpec, dict[str, Tensor]]:
    """Read a whole checkpoint. Raises as :class:`StoredCheckpoint` does."""
    stored = StoredCheckpoint(folder, impl)
    return stored.spec, {name: stored.read(name) for name in stored.shapes}


@final
class StoredCheckpoint:
    """A Hugging Face checkpoint, in one file or split, whose tensors are read one at a time.

    It omits a copy of a tied embedding, rotation tables, and layers beyond the last, which predict further tokens. The
    first of these is included if the model has a draft head, or if one is requested. Raises
    :class:`~etude.errors.DamagedError` naming the file, and what :func:`load_spec` raises.
    """

    def __init__(self, folder: Path, impl: Impl = "native", *, draft: bool = False) -> None:
        """With ``draft`` it is read as the checkpoint of a model with a draft head, even if its configuration says
        otherwise.
        """
        self.folder = folder
        spec = load_spec(folder, impl)
        self.spec = replace(spec, draft=True) if draft else spec
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of every tensor that is needed, by name."""
        self._files: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                stream: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DamagedError(f"{file} is missing or damaged: {error}") from error
            for name in stream.keys():  # noqa: SIM118 - it is no dictionary
                if _is_needed(name, self.spec):
                    self.shapes[name] = tuple(stream.get_slice(name).get_shape())
                    self._files[name] = stream

    def read(self, name: str) -> Tensor:
        """One tensor, in its stored type."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def check(self, model: CausalModel) -> None:
        """Compare names and shapes with those of ``model``, which is not changed.

        Raises :class:`~etude.errors.DamagedError` that names the tensors that are missing, unexpected or misshapen.
        """
        places = {name: tuple(view.shape) for name, view in views(model)}
        faults = [f"{name!r} is missing" for name in places if name not in self.shapes]
        faults += [f"{name!r} has no place in this model" for name in self.shapes if name not in places]
        faults += [
            f"{name!r} should be {list(shape)}, it is {list(self.shapes[name])}"
            for name, shape in places.items()
            if self.shapes.get(name, shape) != shape
        ]
        if faults:
            more = f"; and {len(faults) - FAULTS_NAMED} more" if len(faults) > FAULTS_NAMED else ""
            named = "; ".join(faults[:FAULTS_NAMED])
            raise DamagedError(f"{self.folder} does not fit its own config.json: {named}{more}")

    def load(self, model: CausalModel) -> None:
        """Copy all tensors, one by one, after :meth:`check`."""
        self.check(model)
        for part in (*model.blocks, model):
            fill(part, self.read)


def load_spec(folder: Path, impl: Impl = "native") -> ModelSpec:
    """The shape in a checkpoint's ``config.json``, of a model that ``impl`` computes in the trainer.

    Raises :class:`~etude.errors.DamagedError` if it cannot be read, :class:`~etude.errors.UserError` if it has
    unsupported values.
    """
    file = folder / CONFIG_FILE
    return (hf_spec if impl == "hf" else spec_of)(_read_object(file), origin=str(file))


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or all that the index names."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [folder / WEIGHTS_FILE]
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise DamagedError(f"{index}: weight_map is {names!r:.80}, expected an object")
    files = {str(name) for name in names.values()}
    if outside := sorted(name for name in files if Path(name).name != name):
        raise DamagedError(f"{index}: {outside[0]!r} is not a file of this folder")
    return [folder / name for name in sorted(files)]


def _is_needed(name: str, spec: ModelSpec) -> bool:
    layer = LAYER_NAME.match(name)
    is_beyond = layer is not None and int(layer[1]) >= spec.layers + spec.draft
    is_beyond |= name.endswith(DRAFT_COPIES) and layer is not None
    return not (is_beyond or name.endswith(TABLE_SUFFIX) or (spec.tied and name == HEAD))


def _read_object(file: Path) -> dict[str, Json]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{file} is missing or damaged: {error}") from error
    if not isinstance(values, dict):
        raise DamagedError(f"{file} holds {type(values).__name__}, expected an object")
    return values
