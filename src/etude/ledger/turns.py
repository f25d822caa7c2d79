"""The turns of a session as one blob of arrays: how they leave the gateway, and how they lie in a ledger's record.

Owns the form: a safetensors file whose arrays hold all turns end to end. Per-token data never becomes JSON. Routes and
sampling masks do not travel: they are in payload files (:mod:`etude.ledger.payloads`), to which a turn refers.

Every turn of a conversation reads again what the turns before it read, so prompts that were written out would grow with
the square of its length. Those of one branch lie in one array wherever they are kept, and here, too: prompts that begin
at the same byte of memory are one span of ``prompt_ids``, as long as the longest of them. They come back as views of
it, so the way through a blob costs 4 bytes per token of a branch and 12 per sampled one, however many turns there are.

    prompt_ids       int32   [N]   every branch         completion_ids       int32   [ΣC]
    prompt_starts    int64   [T]   in prompt_ids        completion_offsets   int64   [T + 1]
    prompt_lengths   int64   [T]                        logprobs             float32 [ΣC]
    finish           uint8   [T]   index into Finish    versions             int32   [ΣC]
    kind             uint8   [T]   index into TurnKind  temperatures         float64 [T]
    payload_digests  uint8   [T, 32]                    payload_sizes        int64   [T]  bytes; −1: no payload

A blob of the first form has ``prompt_offsets`` [T + 1], every prompt by itself, in place of starts and lengths, and no
kinds; it is still read.
"""

import json
from collections.abc import Mapping, Sequence
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
"""Size of the payload of a turn that has none."""
FINISHES = tuple(Finish)
"""Finishes by their number; new ones come last."""
KINDS = tuple(TurnKind)
"""Kinds by their number; new ones come last."""


def encode_turns(turns: Sequence[Turn], rollout_id: str = "") -> bytes:
    """All turns as one safetensors file, whose metadata name their rollout.

    Raises ``ValueError`` for a turn whose routes or sampling mask are in memory.
    """
    for index, turn in enumerate(turns):
        if turn.routes is not None or turn.sampling_mask is not None:
            raise ValueError(f"turn {index} holds routes or a sampling mask: store them in a payload file first")
    refs = [turn.payload for turn in turns]
    digests = b"".join(bytes(DIGEST_BYTES) if ref is None else bytes.fromhex(ref.digest) for ref in refs)
    prompts = [np.ascontiguousarray(turn.prompt_ids, np.int32) for turn in turns]
    branches, starts = _branches(prompts)
    arrays: dict[str, Array] = {
        "prompt_ids": _joined(branches, "prompt_ids"),
        "prompt_starts": np.array(starts, np.int64),
        "prompt_lengths": np.array([len(ids) for ids in prompts], np.int64),
        "completion_ids": _joined([turn.completion_ids for turn in turns], "completion_ids"),
        "completion_offsets": np.cumsum([0, *(len(turn.completion_ids) for turn in turns)], dtype=np.int64),
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
    """The turns of :func:`encode_turns`; their arrays are read-only and share memory.

    Raises ``ValueError`` on anything else. What it takes to read a blob is bounded by the size of it.
    """
    try:
        arrays = _in_todays_form(load(data))
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"turns of {len(data)} bytes are not a safetensors file: {error}") from error
    num_turns = _check(arrays)
    for array in arrays.values():
        array.flags.writeable = False
    prompts, completions = _prompts(arrays), _completions(arrays)
    return tuple(_turn(arrays, index, prompts[index], completions[index]) for index in range(num_turns))


def _branches(prompts: Sequence[Ids]) -> tuple[list[Ids], list[int]]:
    """The longest prompt of each branch, and where each prompt starts once these lie end to end.

    Contiguous arrays that begin at the same byte of memory are the same as far as both go.
    """
    addresses = [ids.ctypes.data for ids in prompts]
    longest: dict[int, Ids] = {}
    for address, ids in zip(addresses, prompts, strict=True):
        if len(ids) >= len(longest.setdefault(address, ids)):
            longest[address] = ids
    starts = dict(zip(longest, accumulate(map(len, longest.values()), initial=0), strict=False))
    return list(longest.values()), [starts[address] for address in addresses]


def _joined(parts: Sequence[Array], name: str) -> Array:
    joined: Array = np.concatenate([np.empty(0, FORMS[name]), *parts])
    return joined.astype(FORMS[name], copy=False)


def _in_todays_form(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays of a blob of the first form as one of today's has them; any others as they are."""
    if "prompt_offsets" not in arrays:
        return arrays
    offsets = arrays.pop("prompt_offsets").ravel()
    lengths = np.diff(offsets)
    kinds = np.full(len(lengths), KINDS.index(TurnKind.ACT), np.uint8)
    return arrays | {"prompt_starts": offsets[:-1], "prompt_lengths": lengths, "kind": kinds}


def _check(arrays: dict[str, Array]) -> int:
    """The number of turns, once every array has its type and a length that fits the others."""
    forms = {name: array.dtype for name, array in arrays.items()}
    if forms != FORMS:
        raise ValueError(f"turns are made of {forms}, expected {dict(FORMS)}")
    num_turns, sampled = arrays["finish"].size, arrays["completion_ids"].size
    shapes = dict.fromkeys(("completion_ids", "logprobs", "versions"), (sampled,))
    shapes |= dict.fromkeys(("finish", "kind", "temperatures", "payload_sizes"), (num_turns,))
    shapes |= dict.fromkeys(("prompt_starts", "prompt_lengths"), (num_turns,))
    shapes |= {"completion_offsets": (num_turns + 1,), "prompt_ids": (arrays["prompt_ids"].size,)}
    sections = {name: arrays[name].shape for name in shapes}
    if sections != shapes or arrays["payload_digests"].shape != (num_turns, DIGEST_BYTES):
        raise ValueError(f"the arrays of {num_turns} turns do not fit each other: {sections}, expected {shapes}")
    return num_turns


def _prompts(arrays: dict[str, Array]) -> list[slice]:
    """The place of each turn's prompt. They may overlap: that is what they do in a conversation, and costs nothing."""
    starts, lengths, size = arrays["prompt_starts"], arrays["prompt_lengths"], arrays["prompt_ids"].size
    wrong = np.flatnonzero((starts < 0) | (lengths < 0) | (starts > size) | (lengths > size - starts))
    if len(wrong):
        turn = int(wrong[0])
        raise ValueError(f"turn {turn} has a prompt of {lengths[turn]} ids from {starts[turn]} on: there are {size}")
    return [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _completions(arrays: dict[str, Array]) -> list[slice]:
    """The place of each turn's completion. They never overlap, so all of them together are as long as their array."""
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
