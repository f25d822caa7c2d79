"""The turns of a session as one blob of arrays: the format of the gateway's output and of a ledger's records.

Owns the format: a safetensors file whose arrays concatenate all turns. Per-token data never becomes JSON. Routes and
sampling masks are not in the blob, but in payload files (:mod:`etude.ledger.payloads`) that a turn references.

Each turn of a conversation repeats the tokens of earlier turns, so full prompts would grow quadratically with its
length. In memory the prompts of one branch share an array, and here as well: prompts that start at the same address are
one span of ``prompt_ids``, as long as the longest of them. They are decoded as views of it, so a blob costs 4 bytes per
token of a branch and 12 per sampled token, for any number of turns.

    prompt_ids       int32   [N]   every branch         completion_ids       int32   [ΣC]
    prompt_starts    int64   [T]   in prompt_ids        completion_offsets   int64   [T + 1]
    prompt_lengths   int64   [T]                        logprobs             float32 [ΣC]
    finish           uint8   [T]   index into Finish    versions             int32   [ΣC]
    kind             uint8   [T]   index into TurnKind  temperatures         float64 [T]
    payload_digests  uint8   [T, 32]                    payload_sizes        int64   [T]  bytes; −1: no payload

A blob in the first format has ``prompt_offsets`` [T + 1] and separate prompts instead of starts and lengths, and no
kinds; it can still be read.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.types import Finish, Ids, PayloadRef, Turn, TurnKind

Array: TypeAlias = npt.NDArray[Any]
"""An array of any type."""

FORMS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "prompt_ids": np.dtype(np.int32),
        "prompt_starts": np.dtype(np.int64),
        "prompt_lengths": np.dtype(np.int64),
        "completion_ids": np.dtype(np.int32),
        "completion_offsets": np.dtype(np.int64),
        "logprobs": np.dtype(np.float32),
        "versions": np.dtype(np.int32),
        "finish": np.dtype(np.uint8),
        "kind": np.dtype(np.uint8),
        "temperatures": np.dtype(np.float64),
        "payload_digests": np.dtype(np.uint8),
        "payload_sizes": np.dtype(np.int64),
    }
)
"""Name → type of every array."""
DIGEST_BYTES = 32
"""Bytes of a SHA-256."""
NO_PAYLOAD = -1
"""Payload size of a turn without a payload."""
FINISHES = tuple(Finish)
"""Finishes by index; append new ones."""
KINDS = tuple(TurnKind)
"""Kinds by index; append new ones."""


def encode_turns(turns: Sequence[Turn], rollout_id: str = "") -> bytes:
    """All turns as one safetensors file; its metadata name the rollout.

    Raises ``ValueError`` for a turn whose routes or sampling mask are in memory.
    """
    for index, turn in enumerate(turns):
        if turn.routes is not None or turn.sampling_mask is not None:
            raise ValueError(f"turn {index} holds routes or a sampling mask: store them in a payload file first")
    refs = [turn.payload for turn in turns]
    digests = b"".join(bytes(DIGEST_BYTES) if ref is None else bytes.fromhex(ref.digest) for ref in refs)
    prompts = [np.ascontiguousarray(turn.prompt_ids, np.int32) for turn in turns]
    completions = [turn.completion_ids for turn in turns]
    branches, starts = _branches(prompts)
    arrays: dict[str, Array] = {
        "prompt_ids": _joined(branches, "prompt_ids"),
        "prompt_starts": np.array(starts, np.int64),
        "prompt_lengths": np.array([len(ids) for ids in prompts], np.int64),
        "completion_ids": _joined(completions, "completion_ids"),
        "completion_offsets": np.array([*accumulate((len(ids) for ids in completions), initial=0)], np.int64),
        "logprobs": _joined([turn.logprobs for turn in turns], "logprobs"),
        "versions": _joined([turn.versions for turn in turns], "versions"),
        "finish": np.array([FINISHES.index(turn.finish) for turn in turns], np.uint8),
        "kind": np.array([KINDS.index(turn.kind) for turn in turns], np.uint8),
        "temperatures": np.array([turn.temperature for turn in turns], np.float64),
        "payload_digests": np.frombuffer(digests, np.uint8).reshape(len(turns), DIGEST_BYTES),
        "payload_sizes": np.array([NO_PAYLOAD if ref is None else ref.size_bytes for ref in refs], np.int64),
    }
    return save(arrays, metadata={"rollout": rollout_id} if rollout_id else None)


def decode_turns(data: bytes) -> tuple[Turn, ...]:
    """The turns that :func:`encode_turns` encoded; their arrays are read-only and share memory.

    Raises ``ValueError`` for anything else. The cost of a read is bounded by the blob's size.
    """
    try:
        arrays = _in_todays_form(load(data))
    except (SafetensorError, KeyError) as error:  # KeyError: a type that NumPy does not have
        raise ValueError(f"turns of {len(data)} bytes are not a safetensors file: {error}") from error
    num_turns = _check(arrays)
    for array in arrays.values():
        array.flags.writeable = False
    prompts, completions = _prompts(arrays), _completions(arrays)
    return tuple(_turn(arrays, index, prompts[index], completions[index]) for index in range(num_turns))


def _branches(prompts: Sequence[Ids]) -> tuple[Collection[Ids], list[int]]:
    """The longest prompt of each branch, and the start of each prompt in their concatenation.

    Contiguous arrays with the same address have the same values up to the length of the shorter one.
    """
    longest: dict[int, Ids] = {}
    for ids in prompts:
        address = ids.ctypes.data
        longest[address] = max(longest.get(address, ids), ids, key=len)
    starts = dict(zip(longest, accumulate(map(len, longest.values()), initial=0), strict=False))
    return longest.values(), [starts[ids.ctypes.data] for ids in prompts]


def _joined(parts: Collection[Array], name: str) -> Array:
    joined: Array = np.concatenate([np.empty(0, FORMS[name]), *parts])
    return joined.astype(FORMS[name], copy=False)


def _in_todays_form(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays of a blob in the first format, converted to the current one; others unchanged."""
    if "prompt_offsets" not in arrays:
        return arrays
    offsets = arrays.pop("prompt_offsets").ravel()
    lengths = np.diff(offsets)
    kinds = np.full(len(lengths), KINDS.index(TurnKind.ACT), np.uint8)
    return arrays | {"prompt_starts": offsets[:-1], "prompt_lengths": lengths, "kind": kinds}


def _check(arrays: dict[str, Array]) -> int:
    """Check that every array has its type and a consistent length; return the number of turns."""
    forms = {name: array.dtype for name, array in arrays.items()}
    if forms != FORMS:
        raise ValueError(f"turns are made of {forms}, expected {FORMS}")
    num_turns, sampled = arrays["finish"].size, arrays["completion_ids"].size
    per_turn = ("prompt_starts", "prompt_lengths", "finish", "kind", "temperatures", "payload_sizes")
    shapes = {
        **dict.fromkeys(per_turn, (num_turns,)),
        **dict.fromkeys(("completion_ids", "logprobs", "versions"), (sampled,)),
        "completion_offsets": (num_turns + 1,),
        "prompt_ids": (arrays["prompt_ids"].size,),
    }
    sections = {name: arrays[name].shape for name in shapes}
    if sections != shapes or arrays["payload_digests"].shape != (num_turns, DIGEST_BYTES):
        raise ValueError(f"the arrays of {num_turns} turns do not fit each other: {sections}, expected {shapes}")
    return num_turns


def _prompts(arrays: dict[str, Array]) -> list[slice]:
    """The slice of each turn's prompt. Slices overlap within a conversation, which costs nothing."""
    starts, lengths, size = arrays["prompt_starts"], arrays["prompt_lengths"], arrays["prompt_ids"].size
    wrong = np.flatnonzero((starts < 0) | (lengths < 0) | (starts > size) | (lengths > size - starts))
    if len(wrong):
        turn = int(wrong[0])
        raise ValueError(f"turn {turn} has a prompt of {lengths[turn]} ids from {starts[turn]} on: there are {size}")
    return list(map(slice, starts.tolist(), (starts + lengths).tolist()))


def _completions(arrays: dict[str, Array]) -> list[slice]:
    """The slice of each turn's completion. Slices never overlap; together they cover the whole array."""
    offsets, size = arrays["completion_offsets"], arrays["completion_ids"].size
    if offsets[0] != 0 or offsets[-1] != size or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"the {len(offsets)} completion_offsets do not ascend from 0 to {size}")
    return [slice(first, last) for first, last in pairwise(offsets.tolist())]


def _turn(arrays: dict[str, Array], index: int, prompt: slice, completion: slice) -> Turn:
    finish, kind = int(arrays["finish"][index]), int(arrays["kind"][index])
    if finish >= len(FINISHES) or kind >= len(KINDS):
        raise ValueError(
            f"turn {index} has finish {finish} and kind {kind}, expected less than {len(FINISHES)} and {len(KINDS)}"
        )
    return Turn(
        prompt_ids=arrays["prompt_ids"][prompt],
        completion_ids=arrays["completion_ids"][completion],
        logprobs=arrays["logprobs"][completion],
        versions=arrays["versions"][completion],
        finish=FINISHES[finish],
        temperature=float(arrays["temperatures"][index]),
        kind=KINDS[kind],
        payload=_payload(arrays, index),
    )


def _payload(arrays: dict[str, Array], index: int) -> PayloadRef | None:
    size = int(arrays["payload_sizes"][index])
    if size < NO_PAYLOAD:
        raise ValueError(f"turn {index} has a payload of {size} bytes")
    if size == NO_PAYLOAD:
        return None
    return PayloadRef(digest=arrays["payload_digests"][index].tobytes().hex(), size_bytes=size)
