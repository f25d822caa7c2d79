"""The wire format between engine client and engine server: JSON in, arrays out.

A request is a JSON object. A completion is a safetensors file: arrays travel as they are, routes and kept sets too,
with nothing to unpickle. A stream is lines of JSON, one per chunk; the last line says how many bytes of such a file
follow it. Owns both directions, so that client and server cannot disagree.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, final

import numpy as np
import numpy.typing as npt
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.protocols import Completion, SamplingParams, TokenChunk
from etude.types import Finish, Json, SamplingMask, TokenIds

PARAMS = tuple(field.name for field in fields(SamplingParams))
"""The sampling parameters that travel: all of them."""
MAX_LINE_BYTES = 2**20
"""Longest line of a chunk: far more tokens than any engine has at once."""
MAX_SEED = 2**63 - 1
"""Largest seed: every random generator takes it."""
REQUIRED = frozenset({"prompt_ids", "session", "max_tokens"})
OPTIONAL = frozenset({"temperature", "top_p", "top_k", "stop_ids", "seed", "priority", "want_routes"})
CHUNK = frozenset({"token_ids", "logprobs", "versions", "completion_bytes"})
FINISH = "finish"
"""The one word of a completion that is no array: kept as its code, an index into :class:`~etude.types.Finish`."""
ARRAYS: Mapping[str, tuple[type[np.generic], int]] = MappingProxyType(
    {
        "token_ids": (np.int32, 1),
        "logprobs": (np.float32, 1),
        "versions": (np.int32, 1),
        FINISH: (np.uint8, 1),
        "routes": (np.uint16, 3),
        "kept_offsets": (np.int64, 1),
        "kept_ids": (np.int32, 1),
    }
)
"""Type and axes of everything in a completion's file."""


def encode_request(prompt_ids: TokenIds, params: SamplingParams, session: str) -> bytes:
    """The body of ``POST /generate`` and ``POST /stream``."""
    fields = {"prompt_ids": prompt_ids, "session": session} | {name: getattr(params, name) for name in PARAMS}
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_request(body: bytes) -> tuple[list[int], SamplingParams, str]:
    """Prompt ids, sampling parameters and session of a request. Raises ``ValueError`` naming the field at fault."""
    fields = _fields(body, REQUIRED, OPTIONAL)
    session = fields["session"]
    if not isinstance(session, str):
        raise ValueError(f"session={session!r}: expected a string")
    want_routes = fields.get("want_routes", False)
    if not isinstance(want_routes, bool):
        raise ValueError(f"want_routes={want_routes!r}: expected true or false")
    seed = fields.get("seed")
    params = SamplingParams(
        max_tokens=_whole("max_tokens", fields["max_tokens"], low=1),
        temperature=_real("temperature", fields.get("temperature", 1.0)),
        top_p=_real("top_p", fields.get("top_p", 1.0)),
        top_k=_whole("top_k", fields.get("top_k", 0), low=0),
        stop_ids=tuple(_ids("stop_ids", fields.get("stop_ids", []))),
        seed=None if seed is None else _whole("seed", seed, low=0),
        priority=_whole("priority", fields.get("priority", 0), low=-MAX_SEED),
        want_routes=want_routes,
    )
    return _ids("prompt_ids", fields["prompt_ids"]), params, session


def encode_completion(completion: Completion) -> bytes:
    """A completion as a safetensors file."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        FINISH: np.array([list(Finish).index(completion.finish)], np.uint8),
    }
    if completion.routes is not None:
        arrays["routes"] = completion.routes
    if completion.sampling_mask is not None:
        arrays |= {"kept_offsets": completion.sampling_mask.offsets, "kept_ids": completion.sampling_mask.token_ids}
    # Of an array with gaps safetensors would write the gaps.
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_completion(data: bytes) -> Completion:
    """The completion of :func:`encode_completion`. Raises ``ValueError`` on anything else."""
    try:
        arrays = load(data)
        _check_kinds(arrays)
        mask = None
        if "kept_ids" in arrays:
            mask = SamplingMask(offsets=arrays["kept_offsets"], token_ids=arrays["kept_ids"])
        completion = Completion(
            token_ids=arrays["token_ids"],
            logprobs=arrays["logprobs"],
            versions=arrays["versions"],
            finish=list(Finish)[int(arrays[FINISH][0])],
            routes=arrays.get("routes"),
            sampling_mask=mask,
        )
    except (SafetensorError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _check_tokens(completion)
    if mask is not None and len(mask) != len(completion.token_ids):
        raise ValueError(f"{len(mask)} sampling masks of {len(completion.token_ids)} tokens")
    return completion


def encode_chunk(chunk: TokenChunk) -> bytes:
    """One line of a stream; with the last chunk, what follows it as well."""
    tail = b"" if chunk.completion is None else encode_completion(chunk.completion)
    line = {
        "token_ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "versions": chunk.versions,
        "completion_bytes": len(tail),
    }
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" + tail


@final
class ChunkReader:
    """Puts a stream together again, however its bytes were cut. What came together is one chunk."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._tail_bytes = 0
        """Size of the completion that is expected now; 0 while it is lines."""
        self._is_done = False

    def feed(self, data: bytes) -> TokenChunk | None:
        """The chunk that more bytes complete, if any. Raises ``ValueError`` on what is no stream of chunks."""
        self._rest += data
        if self._is_done:
            self._check_end(0)
            return None
        while not self._tail_bytes and (end := self._rest.find(b"\n")) >= 0:
            self._take(bytes(self._rest[:end]))
            del self._rest[: end + 1]
        if not self._tail_bytes:
            if len(self._rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            return self._chunk(None) if self._token_ids else None
        if len(self._rest) < self._tail_bytes:
            return None
        self._check_end(self._tail_bytes)
        completion = decode_completion(bytes(self._rest))
        self._is_done = True
        self._rest.clear()
        return self._chunk(completion)

    def _check_end(self, size: int) -> None:
        """A completion ends its stream."""
        if len(self._rest) > size:
            raise ValueError(f"{len(self._rest) - size} bytes more behind the completion of a stream")

    def _take(self, line: bytes) -> None:
        fields = _fields(line, CHUNK)
        logprobs = fields["logprobs"]
        if not isinstance(logprobs, list):
            raise ValueError("logprobs must be a list of numbers")
        token_ids, versions = _ids("token_ids", fields["token_ids"]), _ids("versions", fields["versions"])
        if not len(token_ids) == len(logprobs) == len(versions):
            lengths = [len(token_ids), len(logprobs), len(versions)]
            raise ValueError(f"{lengths} token ids, log probabilities and versions: expected as many of each")
        self._token_ids += token_ids
        self._logprobs += [_real("logprobs", value) for value in logprobs]
        self._versions += versions
        self._tail_bytes = _whole("completion_bytes", fields["completion_bytes"], low=0)

    def _chunk(self, completion: Completion | None) -> TokenChunk:
        try:
            with np.errstate(over="ignore"):  # what becomes infinite is refused
                chunk = TokenChunk(
                    token_ids=np.array(self._token_ids, np.int32),
                    logprobs=np.array(self._logprobs, np.float32),
                    versions=np.array(self._versions, np.int32),
                    completion=completion,
                )
        except OverflowError as error:
            raise ValueError(str(error)) from error
        _check_tokens(chunk)
        self._token_ids, self._logprobs, self._versions = [], [], []
        return chunk


def _check_kinds(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    for name, array in arrays.items():
        dtype, axes = ARRAYS[name]
        if array.dtype != dtype or array.ndim != axes:
            expected = f"{np.dtype(dtype)} with {axes} axes"
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {expected}")


def _check_tokens(sampled: Completion | TokenChunk) -> None:
    lengths = [len(array) for array in (sampled.token_ids, sampled.logprobs, sampled.versions)]
    if len(set(lengths)) != 1:
        raise ValueError(f"{lengths} token ids, log probabilities and versions: expected as many of each")
    if not np.isfinite(sampled.logprobs).all():  # it would poison the loss
        raise ValueError("a log probability is not finite")


def _fields(text: bytes, required: frozenset[str], optional: frozenset[str] = frozenset()) -> dict[str, Json]:
    """A JSON object with all ``required`` keys and no others than those and ``optional`` ones."""
    fields: Json = orjson.loads(text)  # its JSONDecodeError is a ValueError
    if not isinstance(fields, dict):
        raise ValueError("expected a JSON object")
    if missing := required - fields.keys():
        raise ValueError(f"missing {sorted(missing)}")
    if unknown := fields.keys() - required - optional:
        raise ValueError(f"unknown {sorted(unknown)}: expected {sorted(required | optional)}")
    return fields


def _real(name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: expected a number")
    return float(value)


def _whole(name: str, value: Json, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_SEED:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {low}")
    return value


def _ids(name: str, value: Json) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of token ids")
    return [_whole(f"{name}[{index}]", token, low=0) for index, token in enumerate(value)]
