"""Messages of the Tinker API that are protocol buffers: batches in, samples and logprobs out.

The numbers are those of ``tinker_public.proto`` in the package ``tinker`` (0.38). Everything else of that API is JSON.
Legend: n tokens of one datum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.engines.native.scoring import PromptScores
from etude.protocols import Completion
from etude.tinker.protobuf import Fields, Value, decode, entry, field, varints
from etude.types import Finish, Floats, Ids

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of the enum ``DType`` that requests may have."""
DTYPES: Mapping[int, type[np.float32] | type[np.int64] | type[np.int32]] = {
    FLOAT32: np.float32,
    INT64: np.int64,
    INT32: np.int32,
}
OUTPUT_TYPE = "ArrayRecord"
NO_LOGPROB = np.float32(-99999.0)
"""Says in a table of the likeliest tokens that there is none."""

Numbers: TypeAlias = npt.NDArray[np.float64]
"""Numbers of any of these types, all of which it holds exactly, integers up to 2^53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence to be trained on."""

    token_ids: Ids
    """[n] what the model reads."""
    inputs: Mapping[str, Numbers]
    """[n] each: ``target_tokens``, and what the loss takes beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A request to compute a loss, and its gradient unless ``forward_only``."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float]
    forward_only: bool


def decode_batch(data: bytes) -> BatchRequest:
    """Read a ``ForwardBackwardRequest``. Raises ``ValueError`` for what is damaged, or not text."""
    fields = decode(data)
    config = dict(_map(fields, 5))
    if texts := sorted(dict(_map(fields, 7)).keys() - config.keys()):
        raise ValueError(f"loss_fn_config[{texts[0]!r}] is a text: every option of a loss here is a number")
    return BatchRequest(
        model_id=_text(fields, 1),
        seq_id=_number(fields, 2),
        data=tuple(_datum(_bytes(message)) for message in fields.get(3, [])),
        loss_fn=_text(fields, 4),
        loss_config={name: float(value) for name, value in config.items() if not isinstance(value, bytes)},
        forward_only=bool(_number(fields, 6)),
    )


def encode_output(logprobs: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """Write a ``ForwardBackwardOutput`` with the logprobs of each datum's targets."""
    ends = np.cumsum([0, *(values.nbytes for values in logprobs)], dtype=np.int64)
    tensor = (
        field(1, b"".join(values.astype(np.float32).tobytes() for values in logprobs))
        + field(2, ends.tobytes())
        + field(3, FLOAT32)
    )
    record = field(1, OUTPUT_TYPE) + entry(2, "logprobs", tensor) + field(3, len(logprobs))
    totals = b"".join(entry(3, name, float(value)) for name, value in metrics.items())
    return field(1, OUTPUT_TYPE) + field(2, record) + totals


def encode_samples(completions: Sequence[Completion], scores: PromptScores | None = None) -> bytes:
    """Write a ``SampleResponse``, with what the prompt's tokens were given where that is known."""
    sequences = b"".join(field(1, _sequence(completion)) for completion in completions)
    if scores is None:
        return sequences
    length, top_k = scores.top_ids_PK.shape
    top_logprobs_PK = np.where(np.isnan(scores.top_logprobs_PK), NO_LOGPROB, scores.top_logprobs_PK)
    table = (
        field(1, scores.top_ids_PK.tobytes()) + field(2, top_logprobs_PK.tobytes()) + field(3, top_k) + field(4, length)
    )
    return sequences + field(2, scores.logprobs_P.tobytes()) + (field(3, table) if top_k else b"")


def _sequence(completion: Completion) -> bytes:
    return (
        field(1, 0 if completion.finish is Finish.STOP else 1)
        + field(2, completion.token_ids.astype(np.int32).tobytes())
        + field(3, completion.logprobs.astype(np.float32).tobytes())
    )


def _datum(data: bytes) -> Datum:
    fields = decode(data)
    chunks = [decode(_bytes(chunk)) for chunk in fields.get(1, [])]
    if any(1 not in chunk for chunk in chunks):
        raise ValueError("a datum has an image or a sound in it: this server trains on tokens alone")
    tokens = [np.frombuffer(_bytes(decode(_bytes(chunk[1][0])).get(1, [b""])[0]), np.int32) for chunk in chunks]
    token_ids = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    inputs = {name: _tensor(_bytes(value)) for name, value in _map(fields, 2)}
    for name, values in inputs.items():
        if values.shape != token_ids.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}: expected one number for each of "
                             f"{len(token_ids)} tokens")  # fmt: skip
    return Datum(token_ids=token_ids, inputs=inputs)


def _tensor(data: bytes) -> Numbers:
    fields = decode(data)
    kind = DTYPES.get(_number(fields, 3))
    if kind is None or 2 in fields:
        raise ValueError("a tensor is sparse, or of a type other than float32, int64 and int32")
    values = np.frombuffer(_bytes(fields.get(1, [b""])[0]), kind).astype(np.float64)
    shape = [size for part in fields.get(4, []) for size in (varints(part) if isinstance(part, bytes) else [part])]
    return values.reshape([int(size) for size in shape]) if shape else values


def _map(fields: Fields, number: int) -> Iterator[tuple[str, Value]]:
    for message in fields.get(number, []):
        parts = decode(_bytes(message))
        yield _text(parts, 1), parts.get(2, [b""])[0]


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a protobuf field has the number {value!r} where a message belongs")
    return value


def _text(fields: Fields, number: int) -> str:
    return _bytes(fields.get(number, [b""])[-1]).decode()


def _number(fields: Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"protobuf field {number} has {value!r} where a whole number belongs")
    return value
