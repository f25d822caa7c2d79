"""Safetensors files and Hugging Face checkpoint folders, to and from states, without torch.

    model.safetensors                                     one file, or
    model-00001-of-00002.safetensors …                    several, and
    model.safetensors.index.json                          {"metadata": …, "weight_map": {tensor: file}}

    file      u64 header length | JSON header, padded with spaces to a multiple of 8 | the tensors' bytes, without gaps

This file owns how tensors are spread over the files of a folder, and the file format
(https://huggingface.co/docs/safetensors): parsed without trusting it, mapped without copying it, written without
assembling it. It exists beside the safetensors library because that one reads into torch or numpy arrays, of which
numpy has neither bfloat16 nor 8-bit floats, while a state is raw bytes. ``config.json``, tokenizers and whatever else
lies in a folder are the model's business; ``version_folder.py`` builds on the same index.
"""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.types import Json, TensorSpec
from etude.weights.state import Bytes1d, State, StoredTensor, ordered, state_bytes

WEIGHTS_FILE = "model.safetensors"
"""The only file of a checkpoint that is not split."""
INDEX_FILE = "model.safetensors.index.json"
"""The file that maps tensors to files."""
SHARD_BYTES = 5_000_000_000
"""Tensors per file, in bytes: small enough to be fetched again, large enough for few files."""
METADATA = "__metadata__"
"""The header's only key that is not a tensor."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that is parsed: the safetensors library's own limit."""
MAX_AXES = 64
"""Most axes of one tensor: what numpy and torch can express."""
ALIGNMENT = 8
"""The tensors' bytes start at a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The index of a split checkpoint: tensors by file; file names are plain, so they stay inside the folder."""

    metadata: Mapping[str, Json]
    files: Mapping[str, str]
    """Tensor → file name."""


# --- Reading a folder ---------------------------------------------------------------------------------------------


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
        raise UserError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: it is not a safetensors checkpoint")
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
        raise DamagedError(f"{path} is longer than {MAX_HEADER_BYTES} bytes: it is not an index")
    index = parse_json(data, str(path))
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise DamagedError(f"{path} needs a weight_map and may have metadata, both of them objects")
    return Index(metadata=metadata, files={name: _plain(file, path) for name, file in weight_map.items()})


def read_indexed(folder: Path, index: Index) -> Iterable["TensorFile"]:
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
        raise DamagedError(f"{origin} names {file!r:.200}, which is not a plain .safetensors file name")
    return file


# --- Writing a folder ---------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, state: State, *, shard_bytes: int = SHARD_BYTES, metadata: Mapping[str, Json] | None = None
) -> None:
    """Write a state as a checkpoint that every reader of safetensors loads.

    More than ``shard_bytes`` of tensors are spread over several files with an index, which comes last. ``metadata``
    joins the index, which is then written for a single file as well. Raises ``UserError`` if the folder holds weights
    already, ``InfrastructureError`` if a file cannot be written.
    """
    tensors = ordered(state)
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
    """Split tensors into files of at most ``limit`` bytes, at least one; a larger tensor has its own."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + len(tensor.data) > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += len(tensor.data)
    return shards


# --- One file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorFile:
    """The contents of one safetensors file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    """By name, in the order of their bytes. Read-only views of the mapped file where that is possible."""


# --- Reading ------------------------------------------------------------------------------------------------------


def read_tensor_file(path: Path) -> TensorFile:
    """Map a file and check all of it but the tensors' values.

    The mapping lives as long as a tensor of it; who shortens the file meanwhile kills the process that reads it, as
    with every mapped file. Raises ``DamagedError`` if the file is missing or not what its header says, and
    ``InfrastructureError`` if it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data: bytes | mmap.mmap = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing; copy the folder again") from error
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}") from error
    return parse_tensor_file(data, str(path))


def parse_tensor_file(data: bytes | mmap.mmap, origin: str) -> TensorFile:
    """Check and view the bytes of a file; nothing is copied but tensors that lie at odd addresses.

    ``origin`` names the file in messages. Raises ``DamagedError`` unless every byte of the file is accounted for:
    a header within its limits, and tensors of known types whose bytes fill the rest without gap or overlap.
    """
    content = np.frombuffer(data, np.uint8)
    header, start = _header(content, origin)
    metadata = _metadata(header.pop(METADATA, {}), origin)
    entries = sorted((_entry(name, value, origin) for name, value in header.items()), key=lambda entry: entry.place)
    tensors: dict[str, StoredTensor] = {}
    end = 0
    body = content[start:]
    for entry in entries:
        if entry.place[0] != end:
            raise DamagedError(f"{origin}: tensor {entry.spec.name!r} starts at byte {entry.place[0]}, not {end}")
        end = entry.place[1]
        if end > len(body):
            raise DamagedError(f"{origin} is cut short: tensor {entry.spec.name!r} ends at byte {end} of {len(body)}")
        tensors[entry.spec.name] = _tensor(entry, body, origin)
    if end != len(body):
        raise DamagedError(f"{origin} has {len(body) - end} bytes after its last tensor")
    return TensorFile(metadata=metadata, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorEntry:
    spec: TensorSpec
    place: tuple[int, int]


def _header(content: Bytes1d, origin: str) -> tuple[dict[str, Json], int]:
    """The JSON header and where the tensors' bytes start."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise DamagedError(f"{origin} is not a safetensors file: {len(content)} bytes cannot hold its header")
    header = parse_json(content[8 : 8 + length].tobytes(), origin)
    if not isinstance(header, dict):
        raise DamagedError(f"{origin}: the header is {type(header).__name__}, expected an object")
    return header, 8 + length


def _metadata(value: Json, origin: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DamagedError(f"{origin}: {METADATA} is {type(value).__name__}, expected an object")
    texts = {name: text for name, text in value.items() if isinstance(text, str)}
    if len(texts) != len(value):
        raise DamagedError(f"{origin}: {METADATA} must hold texts only, not so {sorted(value.keys() - texts.keys())}")
    return texts


def _entry(name: str, value: Json, origin: str) -> _TensorEntry:
    """One tensor's description; whether it fits its bytes is checked when they are cut out."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{origin}: tensor {name!r} needs dtype, shape and data_offsets, has {value!r:.200}")
    dtype, shape, place = value["dtype"], _counts(value["shape"]), _counts(value["data_offsets"])
    if not isinstance(dtype, str) or shape is None or len(shape) > MAX_AXES:
        raise DamagedError(f"{origin}: tensor {name!r} has dtype {dtype!r:.50} and shape {value['shape']!r:.200}")
    if place is None or len(place) != 2 or place[0] > place[1]:
        raise DamagedError(f"{origin}: tensor {name!r} has data_offsets {value['data_offsets']!r:.200}")
    return _TensorEntry(spec=TensorSpec(name=name, dtype=dtype, shape=shape), place=(place[0], place[1]))


def _counts(value: Json) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on, or ``None`` if it is anything else."""
    if not isinstance(value, list):
        return None
    numbers = tuple(number for number in value if type(number) is int and number >= 0)
    return numbers if len(numbers) == len(value) else None


def _tensor(entry: _TensorEntry, body: Bytes1d, origin: str) -> StoredTensor:
    """A view of the tensor's bytes, or a copy where a processor could not read its numbers in place."""
    begin, end = entry.place
    try:
        tensor = StoredTensor(spec=entry.spec, data=body[begin:end])
    except ValueError as error:
        raise DamagedError(f"{origin}: {error}") from error
    return tensor if tensor.numbers.flags.aligned else StoredTensor(spec=entry.spec, data=tensor.data.copy())


def parse_json(data: bytes, origin: str) -> Json:
    """The value of a JSON text. Raises ``DamagedError`` naming ``origin``."""
    try:
        value: Json = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DamagedError(f"{origin}: its JSON is damaged: {error}") from error
    return value


# --- Writing ------------------------------------------------------------------------------------------------------


def write_tensor_file(path: Path, tensors: Iterable[StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write whole tensors as one file, replacing ``path`` only when all is on disk.

    Largest types first, then by name, as the safetensors library does, so that every tensor is aligned. Raises
    ``InfrastructureError`` if the file cannot be written.
    """
    arranged = sorted(tensors, key=lambda tensor: (-_value_bytes(tensor), tensor.spec.name))
    header: dict[str, Json] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for tensor in arranged:
        begin, end = end, end + len(tensor.data)
        header[tensor.spec.name] = {
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "data_offsets": [begin, end],
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % ALIGNMENT)
    write_file(path, (len(text).to_bytes(8, "little"), text, *(tensor.data.data for tensor in arranged)))


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts one after the other under another name, sync and rename; make the folder if it is missing.

    Raises ``InfrastructureError``.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be written: {error}") from error


def _value_bytes(tensor: StoredTensor) -> int:
    return tensor.element.size_bytes * tensor.element.per_value
