"""Encoding of trajectories as bytes, bit for bit, for other processes of the trainer.

A safetensors file in memory: one array per field and trajectory; other values are in the header. Owns only the format;
the caller transfers the bytes.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from etude.types import SamplingMask, Trajectory

ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions", "temperatures", "advantages")
MAYBE = ("routes", "old_logprobs", "reference_logprobs")
"""Arrays that not every trajectory has."""
HEADER = "header"
"""Key of all values that are not arrays, as JSON in bytes."""


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Encode trajectories, in order."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    rows = []
    for index, trajectory in enumerate(trajectories):
        rows.append({"rollout_id": trajectory.rollout_id, "turn_starts": list(trajectory.turn_starts)})
        encoded: dict[str, npt.NDArray[Any]] = {name: getattr(trajectory, name) for name in ARRAYS}
        encoded |= {name: array for name in MAYBE if (array := getattr(trajectory, name)) is not None}
        if trajectory.sampling_mask is not None:
            encoded |= {"offsets": trajectory.sampling_mask.offsets, "kept_ids": trajectory.sampling_mask.token_ids}
        arrays |= {f"{index}/{name}": np.ascontiguousarray(array) for name, array in encoded.items()}
    arrays[HEADER] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    return save(arrays)


def decode_trajectories(payload: bytes) -> tuple[Trajectory, ...]:
    """Decode the bytes of :func:`encode_trajectories`."""
    arrays = load(payload)
    rows = json.loads(arrays[HEADER].tobytes())
    return tuple(_trajectory(arrays, index, row) for index, row in enumerate(rows))


def _trajectory(arrays: dict[str, npt.NDArray[Any]], index: int, row: dict[str, Any]) -> Trajectory:
    offsets = arrays.get(f"{index}/offsets")
    return Trajectory(
        rollout_id=row["rollout_id"],
        turn_starts=tuple(row["turn_starts"]),
        sampling_mask=None if offsets is None else SamplingMask(offsets=offsets, token_ids=arrays[f"{index}/kept_ids"]),
        routes=arrays.get(f"{index}/routes"),
        old_logprobs=arrays.get(f"{index}/old_logprobs"),
        reference_logprobs=arrays.get(f"{index}/reference_logprobs"),
        **{name: arrays[f"{index}/{name}"] for name in ARRAYS},
    )
