"""Rollouts as bytes, and back, without pickle.

    ┌─────────────┬────────┬───────────────────────────────────────┐
    │ header size │ header │ turns                                 │
    │ uint32      │ JSON   │ as :mod:`etude.ledger.turns` has them │
    └─────────────┴────────┴───────────────────────────────────────┘

Routes and kept sets of a turn are not in here but in a file that the turn refers to (:mod:`etude.ledger.payloads`).

In a record of the first form the header lists the turns, and behind it lie the raw arrays of all of them, end to end,
little-endian: prompt ids int32 [ΣP], completion ids int32 [ΣC], logprobs float32 [ΣC], versions int32 [ΣC]. It is still
read.

Array legend: P prompt tokens of a turn, C sampled tokens of a turn.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import DamagedError
from etude.ledger.turns import decode_turns, encode_turns
from etude.types import Branch, Disposition, Finish, Hint, PayloadRef, Rollout, RolloutStatus, Turn, Verdict

HEADER_SIZE = struct.Struct("<I")
INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")


def encode_rollout(rollout: Rollout) -> bytes:
    """A rollout with all its turns; the size is that of their blob plus a few hundred bytes.

    Raises ``ValueError`` for a turn whose routes or kept sets were not written to a file before.
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
        "verdict": None if rollout.verdict is None else asdict(rollout.verdict) | {"reward": rollout.reward},
        "turn_rewards": rollout.turn_rewards,
        "hints": [asdict(hint) for hint in rollout.hints],
        "branch": None if rollout.branch is None else asdict(rollout.branch),
    }
    text = json.dumps(header).encode()
    return b"".join((HEADER_SIZE.pack(len(text)), text, encode_turns(rollout.turns)))


def decode_rollout(data: bytes) -> Rollout:
    """The rollout that :func:`encode_rollout` was given; its arrays are read-only and share memory.

    Raises :class:`~etude.errors.DamagedError`.
    """
    try:
        (size,) = HEADER_SIZE.unpack_from(data)
        body = HEADER_SIZE.size + size
        header = json.loads(data[HEADER_SIZE.size : body])
        listed = header.pop("turns", None)
        turns = decode_turns(data[body:]) if listed is None else _listed_turns(listed, data, body)
        branch = header.pop("branch", None)
        return Rollout(
            status=RolloutStatus(header.pop("status")),
            turns=turns,
            verdict=_decode_verdict(header.pop("verdict")),
            turn_rewards=tuple(header.pop("turn_rewards", ())),
            hints=tuple(Hint(**hint) for hint in header.pop("hints", ())),
            branch=None if branch is None else Branch(**branch),
            **header,
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"unreadable rollout record of {len(data)} bytes: {error}") from error


def _decode_verdict(fields: dict[str, Any] | None) -> Verdict | None:
    if fields is None:
        return None
    disposition, flags = Disposition(fields.pop("disposition")), tuple(fields.pop("flags"))
    fields.pop("reward", None)  # the rollout's own
    return Verdict(disposition=disposition, flags=flags, **fields)


def _listed_turns(headers: Sequence[dict[str, Any]], data: bytes, offset: int) -> tuple[Turn, ...]:
    """The turns of a record of the first form, whose arrays begin at ``offset``: views of ``data``."""
    prompts = [header["prompt"] for header in headers]
    completions = [header["completion"] for header in headers]
    if len(data) != (expected := offset + 4 * (sum(prompts) + 3 * sum(completions))):
        raise ValueError(f"expected {expected} bytes")
    prompt_ids = _split(data, INT32, offset, prompts)
    offset += 4 * sum(prompts)
    token_ids, logprobs, versions = (
        _split(data, dtype, offset + 4 * i * sum(completions), completions)
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


def _split(data: bytes, dtype: np.dtype[Any], offset: int, lengths: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Cut the array at ``offset`` into pieces of ``lengths``."""
    whole = np.frombuffer(data, dtype, count=sum(lengths), offset=offset)
    ends = np.cumsum(lengths)
    return np.split(whole, ends[:-1]) if lengths else []
