"""Hugging Face checkpoint folders, to and from states, without torch.

    model.safetensors                                     one file, or
    model-00001-of-00002.safetensors …                    several, and
    model.safetensors.index.json                          {"metadata": …, "weight_map": {tensor: file}}

This file owns how tensors are spread over the files of a folder. ``config.json``, tokenizers and whatever else lies
there are the model's business; ``version_folder.py`` builds on the same index.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.types import Json
from etude.weights.interop.tensor_file import (
    MAX_HEADER_BYTES,
    TensorFile,
    parse_json,
    read_tensor_file,
    whole,
    write_file,
    write_tensor_file,
)
from etude.weights.state import State, StoredTensor, state_bytes

WEIGHTS_FILE = "model.safetensors"
"""The only file of a checkpoint that is not split."""
INDEX_FILE = "model.safetensors.index.json"
"""Which tensor is in which file."""
SHARD_BYTES = 5_000_000_000
"""Tensors per file, in bytes: small enough to be fetched again, large enough for few files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Which file of a folder holds which tensor; the file names are plain, so they stay inside the folder."""

    metadata: Mapping[str, Json]
    files: Mapping[str, str]
    """Tensor → file name."""


# --- Reading ------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by ascending name, as read-only views of its mapped files.

    Raises ``UserError`` if there is no checkpoint, ``DamagedError`` if a file is missing or broken or holds other
    tensors than the index says, ``InfrastructureError`` if a file cannot be read.
    """
    index = read_index(folder)
    if index is not None:
        tensors = {name: tensor for file in read_indexed(folder, index) for name, tensor in file.tensors.items()}
    elif (folder / WEIGHTS_FILE).exists():
        tensors = dict(read_tensor_file(folder / WEIGHTS_FILE).tensors)
    else:
        raise UserError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: it is no safetensors checkpoint")
    return {name: tensors[name] for name in sorted(tensors)}


def read_index(folder: Path) -> Index | None:
    """The index of a folder, or ``None`` if it has none. Raises ``DamagedError`` and ``InfrastructureError``."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_HEADER_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}") from error
    if len(data) > MAX_HEADER_BYTES:
        raise DamagedError(f"{path} is longer than {MAX_HEADER_BYTES} bytes: it is no index")
    index = parse_json(data, str(path))
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise DamagedError(f"{path} needs a weight_map and may have metadata, both of them objects")
    return Index(metadata=metadata, files={name: _plain(file, path) for name, file in weight_map.items()})


def read_indexed(folder: Path, index: Index) -> Iterable[TensorFile]:
    """The files an index names, one by one, each holding exactly the tensors that the index places in it.

    Raises ``DamagedError`` (also for a missing file) and ``InfrastructureError``.
    """
    names_of: dict[str, set[str]] = {}
    for name, file in index.files.items():
        names_of.setdefault(file, set()).add(name)
    for file, names in sorted(names_of.items()):
        content = read_tensor_file(folder / file)
        if content.tensors.keys() != names:
            missing, unknown = sorted(names - content.tensors.keys()), sorted(content.tensors.keys() - names)
            raise DamagedError(f"{folder / file} does not fit the index: lacks {missing[:5]}, also has {unknown[:5]}")
        yield content


def _plain(file: Json, origin: Path) -> str:
    """A file name that cannot lead out of the folder."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & {"/", "\\", "\0"}:
        raise DamagedError(f"{origin} names {file!r:.200}, which is no plain .safetensors file name")
    return file


# --- Writing ------------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, state: State, *, shard_bytes: int = SHARD_BYTES, metadata: Mapping[str, Json] | None = None
) -> None:
    """Write a state as a checkpoint that every reader of safetensors loads.

    More than ``shard_bytes`` of tensors are spread over several files with an index, which comes last. ``metadata``
    joins the index, which is then written for a single file as well. Raises ``UserError`` if the folder holds weights
    already or ``state`` is only one rank's share, ``InfrastructureError`` if a file cannot be written.
    """
    tensors = whole(state)
    if shard_bytes < 1:
        raise UserError(f"shard_bytes is {shard_bytes}, it must be positive")
    if folder.exists() and any(folder.glob("*.safetensors*")):
        raise UserError(f"{folder} holds weights already: choose another folder or remove them")
    shards = split(tensors, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    for name, shard in zip(names, shards, strict=True):
        write_tensor_file(folder / name, shard, {"format": "pt"})
    if len(shards) > 1 or metadata is not None:
        files = {tensor.spec.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_index(folder, Index(metadata={**(metadata or {}), "total_size": state_bytes(state)}, files=files))


def write_index(folder: Path, index: Index) -> None:
    """Write ``model.safetensors.index.json``. Raises ``InfrastructureError``."""
    content = {"metadata": dict(index.metadata), "weight_map": dict(sorted(index.files.items()))}
    write_file(folder / INDEX_FILE, (orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),))


def split(tensors: Sequence[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    """Runs of tensors of at most ``limit`` bytes together, at least one run; a larger tensor has its own."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + len(tensor.data) > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += len(tensor.data)
    return shards
