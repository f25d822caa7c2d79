"""The turns of a session as one blob of arrays: how they leave the gateway.

Owns the form: a safetensors file whose arrays hold all turns end to end, with offsets. Per-token data never becomes
JSON. Routes and kept sets do not travel: they lie in payload files (:mod:`etude.ledger.payloads`), a turn refers to
them.

    prompt_ids       int32   [ΣP]        prompt_offsets       int64 [T + 1]
    completion_ids   int32   [ΣC]        completion_offsets   int64 [T + 1]
    logprobs         float32 [ΣC]        finish               uint8 [T]  index into Finish
    versions         int32   [ΣC]        temperatures         float64 [T]
    payload_digests  uint8   [T, 32]     payload_sizes        int64 [T]  bytes; −1: no payload
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.types import Finish, PayloadRef, Turn

Array: TypeAlias = npt.NDArray[Any]
"""An array of any type."""

KINDS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "prompt_ids": np.dtype(np.int32),
        "prompt_offsets": np.dtype(np.int64),
        "completion_ids": np.dtype(np.int32),
        "completion_offsets": np.dtype(np.int64),
        "logprobs": np.dtype(np.float32),
        "versions": np.dtype(np.int32),
        "finish": np.dtype(np.uint8),
        "temperatures": np.dtype(np.float64),
        "payload_digests": np.dtype(np.uint8),
        "payload_sizes": np.dtype(np.int64),
    }
)
"""Name → type of every array."""
DIGEST_BYTES = 32
"""Of a SHA-256."""
NO_PAYLOAD = -1
"""Size of the payload of a turn that has none."""
FINISHES = tuple(Finish)
"""Finishes by their number; new ones come last."""


def encode_turns(turns: Sequence[Turn]) -> bytes:
    """All turns as one safetensors file. Raises ``ValueError`` for a turn whose routes or kept sets are in memory."""
    for index, turn in enumerate(turns):
        if turn.routes is not None or turn.kept is not None:
            raise ValueError(f"turn {index} holds routes or kept sets: put them into a payload file first")
    refs = [turn.payload for turn in turns]
    digests = b"".join(bytes(DIGEST_BYTES) if ref is None else bytes.fromhex(ref.digest) for ref in refs)
    arrays: dict[str, Array] = {
        "prompt_ids": _joined([turn.prompt_ids for turn in turns], "prompt_ids"),
        "prompt_offsets": _offsets([len(turn.prompt_ids) for turn in turns]),
        "completion_ids": _joined([turn.completion_ids for turn in turns], "completion_ids"),
        "completion_offsets": _offsets([len(turn.completion_ids) for turn in turns]),
        "logprobs": _joined([turn.logprobs for turn in turns], "logprobs"),
        "versions": _joined([turn.versions for turn in turns], "versions"),
        "finish": np.array([FINISHES.index(turn.finish) for turn in turns], np.uint8),
        "temperatures": np.array([turn.temperature for turn in turns], np.float64),
        "payload_digests": np.frombuffer(digests, np.uint8).reshape(len(turns), DIGEST_BYTES),
        "payload_sizes": np.array([NO_PAYLOAD if ref is None else ref.size_bytes for ref in refs], np.int64),
    }
    return save(arrays)


def decode_turns(data: bytes) -> tuple[Turn, ...]:
    """The turns of :func:`encode_turns`. Raises ``ValueError`` on anything else."""
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"turns of {len(data)} bytes are no safetensors file: {error}") from error
    num_turns = _check(arrays)
    prompts = _split("prompt", arrays["prompt_offsets"], len(arrays["prompt_ids"]))
    completions = _split("completion", arrays["completion_offsets"], len(arrays["completion_ids"]))
    return tuple(_turn(arrays, index, prompts[index], completions[index]) for index in range(num_turns))


def _joined(parts: list[Array], name: str) -> Array:
    joined: Array = np.concatenate([np.empty(0, KINDS[name]), *parts])
    return joined.astype(KINDS[name], copy=False)


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _check(arrays: dict[str, Array]) -> int:
    """The number of turns, once every array has its type and a length that fits the others."""
    kinds = {name: array.dtype for name, array in arrays.items()}
    if kinds != KINDS:
        raise ValueError(f"turns are made of {kinds}, expected {dict(KINDS)}")
    num_turns, sampled = len(arrays["finish"].ravel()), len(arrays["completion_ids"].ravel())
    shapes = dict.fromkeys(("completion_ids", "logprobs", "versions"), (sampled,))
    shapes |= dict.fromkeys(("finish", "temperatures", "payload_sizes"), (num_turns,))
    shapes |= dict.fromkeys(("prompt_offsets", "completion_offsets"), (num_turns + 1,))
    shapes["prompt_ids"] = (len(arrays["prompt_ids"].ravel()),)
    found = {name: arrays[name].shape for name in shapes}
    if found != shapes or arrays["payload_digests"].shape != (num_turns, DIGEST_BYTES):
        raise ValueError(f"the arrays of {num_turns} turns do not fit each other: {found}, expected {shapes}")
    return num_turns


def _split(name: str, offsets: Array, length: int) -> list[slice]:
    if offsets[0] != 0 or offsets[-1] != length or bool((np.diff(offsets) < 0).any()):
        raise ValueError(f"{name}_offsets {offsets.tolist()} do not ascend from 0 to {length}")
    return [slice(first, last) for first, last in pairwise(offsets.tolist())]


def _turn(arrays: dict[str, Array], index: int, prompt: slice, completion: slice) -> Turn:
    finish, size = int(arrays["finish"][index]), int(arrays["payload_sizes"][index])
    if finish >= len(FINISHES):
        raise ValueError(f"turn {index} has finish {finish}, expected less than {len(FINISHES)}")
    if size < NO_PAYLOAD:
        raise ValueError(f"turn {index} has a payload of {size} bytes")
    payload = None
    if size != NO_PAYLOAD:
        payload = PayloadRef(digest=arrays["payload_digests"][index].tobytes().hex(), size_bytes=size)
    return Turn(
        prompt_ids=arrays["prompt_ids"][prompt],
        completion_ids=arrays["completion_ids"][completion],
        logprobs=arrays["logprobs"][completion],
        versions=arrays["versions"][completion],
        finish=FINISHES[finish],
        temperature=float(arrays["temperatures"][index]),
        payload=payload,
    )
