"""How far the trainer's numbers are from the engine's: same token, same weights, two implementations.

In an asynchronous run the trainer has moved on when a token arrives, so comparing with its *current* weights would
measure learning. Instead the last few published states are kept, and a sample of each batch is scored again under the
very version that sampled it. A turn is comparable when one version sampled all of it: the engine never reuses a prefix
across versions, so then that version computed its whole context too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.models.checkpoint import load_state
from etude.models.qwen3_moe import Qwen3Moe
from etude.trainer.padding import pad_rows
from etude.types import Floats, Mask, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Statistics of d = log π_trainer − log π_engine over ``tokens`` sampled tokens.

    ``k1`` = mean(−d) and ``k3`` = mean(e^d − 1 − d) both estimate KL(engine ‖ trainer); k3 is never negative
    (J. Schulman, "Approximating KL divergence", 2020).
    """

    tokens: int
    k1: float
    k3: float
    p99: float
    """99th percentile of |d|."""


def summarise(differences_N: Floats) -> Mismatch:
    """The statistics of differences in logprob; all zero when there are none."""
    if not len(differences_N):
        return Mismatch(tokens=0, k1=0.0, k3=0.0, p99=0.0)
    d = differences_N.astype(np.float64)
    return Mismatch(
        tokens=len(d),
        k1=float(-d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        p99=float(np.percentile(np.abs(d), 99)),
    )


class MismatchProbe:
    """Keeps recent weight versions and scores trajectories under them."""

    def __init__(self, model: Qwen3Moe, *, versions: int) -> None:
        self._scorer = Qwen3Moe(model.spec).to(model.embedding.device)
        self._versions = versions
        self._states: dict[int, dict[str, torch.Tensor]] = {}

    def remember(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep a copy of a model's state as ``version``, forgetting the oldest beyond the bound."""
        self._states[version] = {name: tensor.clone() for name, tensor in state.items()}
        for old in sorted(self._states)[: -self._versions]:
            del self._states[old]

    def measure(self, trajectories: Sequence[Trajectory], *, max_tokens: int) -> Mismatch:
        """Compare every comparable turn of ``trajectories``, ``max_tokens`` padded tokens at a time."""
        differences: list[Floats] = []
        for version, state in self._states.items():
            rows = [(t, mask) for t in trajectories if (mask := comparable(t, version)).any()]
            if not rows:
                continue
            load_state(self._scorer, state)
            longest = max(len(trajectory.token_ids) for trajectory, _ in rows)
            size = max(1, max_tokens // longest)
            differences += [self._compare(rows[start : start + size]) for start in range(0, len(rows), size)]
        return summarise(np.concatenate(differences) if differences else np.zeros(0, np.float32))

    @torch.inference_mode()
    def _compare(self, rows: Sequence[tuple[Trajectory, Mask]]) -> Floats:
        device = self._scorer.embedding.device
        ids_BT = torch.from_numpy(pad_rows([t.token_ids for t, _ in rows])).to(device).long()
        masks_BT = torch.from_numpy(pad_rows([mask for _, mask in rows])).to(device)[:, 1:]
        engine_BT = torch.from_numpy(pad_rows([t.logprobs for t, _ in rows])).to(device)[:, 1:]
        hidden_NH = self._scorer.forward_padded(ids_BT)[:, :-1][masks_BT]
        logprobs_NV = self._scorer.logits(hidden_NH).log_softmax(-1)
        trainer_N = logprobs_NV.gather(1, ids_BT[:, 1:][masks_BT].unsqueeze(1)).squeeze(1)
        differences: Floats = (trainer_N - engine_BT[masks_BT]).cpu().numpy()
        return differences


def comparable(trajectory: Trajectory, version: int) -> Mask:
    """[L] tokens of the turns that ``version`` alone sampled."""
    mask = np.zeros(len(trajectory.token_ids), np.bool_)
    ends = (*trajectory.turn_starts[1:], len(trajectory.token_ids))
    for start, end in zip(trajectory.turn_starts, ends, strict=True):
        own = trajectory.loss_mask[start:end]
        if (trajectory.versions[start:end][own] == version).all():
            mask[start:end] = own
    return mask
