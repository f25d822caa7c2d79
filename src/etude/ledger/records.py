"""Rollouts and tasks as bytes, and back, without pickle.

A rollout is a header and its turns:

    ┌─────────────┬────────┬───────────────────────────────────────┐
    │ header size │ header │ turns                                 │
    │ uint32      │ JSON   │ encoded by :mod:`etude.ledger.turns`  │
    └─────────────┴────────┴───────────────────────────────────────┘

Turns in an object beside the ledger (:mod:`etude.ledger.payloads`) are not in the record: it ends after the header, and
the row has the digest. Routes and sampling masks are not in the record either; a turn references them.

The first format is still read: its header lists the turns, followed by their concatenated raw arrays, little-endian:
prompt ids int32 [ΣP], completion ids int32 [ΣC], logprobs float32 [ΣC], versions int32 [ΣC].

A task is JSON that follows the types of its fields. A dataclass is an object of its fields, a tuple of any length a
list, a mapping an object, a string enum its value; if a field may have one of several dataclasses, ``kind`` in the
object names it. The JSON is Python's, not orjson's: the cases of a task may contain integers beyond 64 bits and
infinities, which must be preserved.

Array legend: P prompt tokens of a turn, C sampled tokens of a turn.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from etude.errors import DamagedError
from etude.ledger.turns import decode_turns, encode_turns
from etude.types import (
    Branch,
    Disposition,
    Finish,
    Hint,
    Observation,
    ObservedSession,
    PayloadRef,
    Rollout,
    RolloutStatus,
    Task,
    Turn,
    Verdict,
)

HEADER_SIZE = struct.Struct("<I")
INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
HACKED = b'"hacked": true'
"""A verdict's field in a header; unambiguous, since its quotes would be escaped within a string."""
TEMPLATE = b'"template": '
"""A task's field, a string; unambiguous for the same reason."""
Noun = TypeVar("Noun")
KIND = "kind"
"""Field that names an object's dataclass if there is a choice."""
QUOTED = 80
"""Most characters or bytes of a damaged record that an error quotes."""


def encode_rollout(rollout: Rollout, *, with_turns: bool = True) -> bytes:
    """A rollout with or without all its turns; the size is that of the turns plus a few hundred bytes.

    Raises ``ValueError`` for a turn whose routes or sampling mask are still in memory.
    """
    header = {
        "rollout_id": rollout.rollout_id,
        "group_index": rollout.group_index,
        "slot": rollout.slot,
        "attempt": rollout.attempt,
        "status": rollout.status,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "reason": rollout.reason,
        "counts": dict(rollout.counts),
        "seconds": rollout.seconds,
        "stage_s": dict(rollout.stage_s),
        "verdict": None if rollout.verdict is None else asdict(rollout.verdict) | {"reward": rollout.reward},
        "turn_rewards": rollout.turn_rewards,
        "hints": [asdict(hint) for hint in rollout.hints],
        "branch": None if rollout.branch is None else asdict(rollout.branch),
        "observation": None if rollout.observation is None else asdict(rollout.observation),
        "session_id": rollout.session_id,
    }
    text = json.dumps(header).encode()
    return b"".join((HEADER_SIZE.pack(len(text)), text, encode_turns(rollout.turns) if with_turns else b""))


def decode_rollout(data: bytes, turns: tuple[Turn, ...] | None = None) -> Rollout:
    """The rollout that :func:`encode_rollout` encoded, with ``turns`` if they were omitted; arrays are read-only and
    share memory.

    Raises :class:`~etude.errors.DamagedError`.
    """
    try:
        (size,) = HEADER_SIZE.unpack_from(data)
        body = HEADER_SIZE.size + size
        header = json.loads(data[HEADER_SIZE.size : body])
        listed = header.pop("turns", None)
        if turns is None:
            turns = decode_turns(data[body:]) if listed is None else _listed_turns(listed, data, body)
        branch, observation = header.pop("branch", None), header.pop("observation", None)
        return Rollout(
            status=RolloutStatus(header.pop("status")),
            turns=turns,
            verdict=_decode_verdict(header.pop("verdict")),
            turn_rewards=tuple(header.pop("turn_rewards", ())),
            hints=tuple(Hint(**hint) for hint in header.pop("hints", ())),
            branch=None if branch is None else Branch(**branch),
            observation=None if observation is None else Observation(**observation),
            **header,
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"unreadable rollout record of {len(data)} bytes: {error}") from error


def is_hacked(data: bytes) -> bool:
    """Return true if the verdict of an encoded rollout counts it as a hack; decodes nothing else."""
    (size,) = HEADER_SIZE.unpack_from(data)
    return HACKED in data[HEADER_SIZE.size : HEADER_SIZE.size + size]


def template_of(data: bytes) -> str:
    """The template of an encoded task; decodes nothing else."""
    _, mark, rest = data.partition(TEMPLATE)
    if not mark:
        raise DamagedError(f"unreadable task record {data[:QUOTED]!r}: it has no template")
    template: str = json.loads(rest[: rest.index(b'", "') + 1])  # quotes within the text are escaped
    return template


def _decode_verdict(fields: dict[str, Any] | None) -> Verdict | None:
    if fields is None:
        return None
    disposition, flags = Disposition(fields.pop("disposition")), tuple(fields.pop("flags"))
    fields.pop("reward", None)  # the rollout's own
    return Verdict(disposition=disposition, flags=flags, **fields)


def _listed_turns(headers: Sequence[dict[str, Any]], data: bytes, offset: int) -> tuple[Turn, ...]:
    """The turns of a record in the first format, whose arrays start at ``offset``: views of ``data``."""
    prompts = [header["prompt"] for header in headers]
    completions = [header["completion"] for header in headers]
    if len(data) != (expected := offset + 4 * (sum(prompts) + 3 * sum(completions))):
        raise ValueError(f"expected {expected} bytes")
    prompt_ids = _split_array(data, INT32, offset, prompts)
    offset += 4 * sum(prompts)
    token_ids, logprobs, versions = (
        _split_array(data, dtype, offset + 4 * i * sum(completions), completions)
        for i, dtype in enumerate((INT32, FLOAT32, INT32))
    )
    return tuple(
        Turn(
            prompt_ids=prompt_ids[i],
            completion_ids=token_ids[i],
            logprobs=logprobs[i],
            versions=versions[i],
            finish=Finish(header["finish"]),
            temperature=header["temperature"],
            payload=_payload(header["payload"]),
        )
        for i, header in enumerate(headers)
    )


def _payload(fields: tuple[str, int] | None) -> PayloadRef | None:
    return None if fields is None else PayloadRef(digest=fields[0], size_bytes=fields[1])


def _split_array(data: bytes, dtype: np.dtype[Any], offset: int, lengths: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Split the array at ``offset`` into parts of ``lengths``."""
    whole = np.frombuffer(data, dtype, count=sum(lengths), offset=offset)
    ends = np.cumsum(lengths)
    return np.split(whole, ends[:-1])


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_task(task: Task) -> bytes:
    """A task as one line of JSON."""
    return json.dumps(_to_json(task, Task)).encode()


def decode_task(data: bytes) -> Task:
    """The task that :func:`encode_task` encoded. Raises :class:`~etude.errors.DamagedError`."""
    return _decode(data, Task, "task")


def encode_observed(session: ObservedSession) -> bytes:
    """An observed session as one line of JSON."""
    return json.dumps(_to_json(session, ObservedSession)).encode()


def decode_observed(data: bytes) -> ObservedSession:
    """The session that :func:`encode_observed` encoded. Raises :class:`~etude.errors.DamagedError`."""
    return _decode(data, ObservedSession, "session")


def _decode(data: bytes, noun: type[Noun], name: str) -> Noun:
    try:
        value = _from_json(json.loads(data), noun)
        assert isinstance(value, noun)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"unreadable {name} record {data[:QUOTED]!r}: {error}") from error
    return value


def _to_json(value: Any, hint: Any) -> Any:
    """Convert ``value``, of type ``hint``, to a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _fields(type(value))
        fields = {name: _to_json(getattr(value, name), inner) for name, inner in hints.items()}
        return {KIND: type(value).__name__, **fields} if len(_nouns(hint)) > 1 else fields
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return [_to_json(item, arguments[0]) for item in value]
    if get_origin(hint) is Mapping:
        return {name: _to_json(item, arguments[1]) for name, item in value.items()}
    return value


def _from_json(value: Any, hint: Any) -> Any:
    """The inverse of :func:`_to_json`."""
    nouns = _nouns(hint)
    if nouns and not (value is None and NoneType in get_args(hint)):
        return _noun(value, nouns)
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_from_json(item, arguments[0]) for item in value)
    if get_origin(hint) is Mapping:
        return {name: _from_json(item, arguments[1]) for name, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{str(value)[:QUOTED]!r} is no {hint.__name__}")
    return value  # any JSON value, which the parser has checked


def _noun(value: Any, nouns: tuple[Any, ...]) -> Any:
    """The instance of one of ``nouns`` that an object describes."""
    fields = dict(value)
    noun = {choice.__name__: choice for choice in nouns}[fields.pop(KIND)] if len(nouns) > 1 else nouns[0]
    hints = _fields(noun)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{noun.__name__} has no {', '.join(sorted(unknown))}")
    return noun(**{name: _from_json(item, hints[name]) for name, item in fields.items()})


@cache
def _nouns(hint: Any) -> tuple[Any, ...]:
    """The dataclasses that a field of this type may have."""
    choices = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return tuple(choice for choice in choices if dataclasses.is_dataclass(choice))


@cache
def _fields(noun: Any) -> Mapping[str, Any]:
    """Field name → type."""
    hints = get_type_hints(noun)
    return {field.name: hints[field.name] for field in dataclasses.fields(noun)}
