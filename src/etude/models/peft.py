"""Adapters as PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``, which PEFT and vLLM load.

Owns the two files and PEFT's prefix of names; the rest of a name, and every number, is that of a state of
:mod:`etude.models.adapters`. An expert's matrices have their own factors, named as if each expert were a module.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import DamagedError, UserError
from etude.models.adapters import ABOUT, DOWN, SCALE, AdapterSpec
from etude.models.checkpoint import state_of, views
from etude.models.decoder import Decoder
from etude.models.lora import RANK_STEP
from etude.models.spec import ModelSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of every name in a PEFT file."""
PLAIN = ("bias", "use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Keys of a configuration that change the computation; étude supports only their default values."""


def write_peft(folder: Path, state: Mapping[str, Tensor], spec: ModelSpec, *, base_name: str) -> None:
    """Write an adapter's ``state`` into ``folder``, which is made; ``spec`` is its base's."""
    tensors = {name: tensor for name, tensor in state.items() if name not in ABOUT}
    adapted = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(DOWN))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": float(state[SCALE]) * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(adapted, spec),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _target_modules(adapted: set[str], spec: ModelSpec) -> list[str]:
    """The last parts of the adapted modules' names, or whole names if other modules' names end with them, too."""
    words = {name.rpartition(".")[2] for name in adapted}
    with torch.device("meta"):
        model = Decoder(spec)
    all_names = {name.removesuffix(".weight") for name, view in views(model) if view.ndim == 2}
    is_clear = {name for name in all_names if name.rpartition(".")[2] in words} == adapted
    return sorted(words if is_clear else adapted)


def read_peft(folder: Path, model: Decoder, spec: AdapterSpec) -> dict[str, Tensor]:
    """Read an adapter that was trained elsewhere, as tensors of an adapted model's state; smaller ranks are filled up.

    Raises :class:`~etude.errors.UserError` for one that the recipe's adapter cannot be, and
    :class:`~etude.errors.DamagedError` for files that cannot be read.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
        rank, scale = int(config["r"]), float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedError(f"{folder} is not a PEFT folder that can be read: {error!r}") from error
    if special := [key for key in PLAIN if config.get(key) not in (None, False, "none", {}, [])]:
        raise UserError(f"{folder / CONFIG_FILE}: {special[0]} = {config[special[0]]!r} is not supported")
    if rank > spec.rank or scale != spec.scale:
        fitting = -(-rank // RANK_STEP) * RANK_STEP
        raise UserError(
            f"{folder} has rank {rank} and alpha {config['lora_alpha']:g}: set lora.rank = {fitting} and lora.alpha = "
            f"{scale * fitting:g}"
        )
    places, filled = state_of(model), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = places.get(name.removeprefix(PREFIX))
        if place is None:
            raise UserError(f"{folder}: {name!r} is none of the matrices of lora.targets = {list(spec.targets)}")
        axis = 0 if name.endswith(DOWN) else 1
        whole = torch.zeros(place.shape)
        part = whole.narrow(axis, 0, rank)
        if part.shape != tensor.shape:
            raise DamagedError(f"{folder}: {name!r} is {list(tensor.shape)}, expected {list(part.shape)}")
        part.copy_(tensor)
        filled[name.removeprefix(PREFIX)] = whole
    return filled
