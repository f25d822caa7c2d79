"""From logits to tokens: one per request, with the log-probability it was really drawn with and the set it came from.

Owns how requests become arrays and arrays become an answer. The draw itself is :mod:`etude.models.kernels.draws` on a
CPU and :mod:`etude.engines.native.sampling_kernels` elsewhere; the log-probability is the arithmetic's, the very
function that the trainer differentiates, so where the arithmetic is invariant the two agree to the last bit. Knows no
scheduler, no cache and no weights.

Shape legend: R rows, one per request that samples in this step; V vocabulary; C tokens of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.engines.native.sampling_kernels import Chances, draw_tensors
from etude.errors import DivergedError
from etude.models.arithmetic import Arithmetic, MaskTensors
from etude.models.kernels.draws import NO_TOKEN, draw, uniforms
from etude.protocols import SamplingParams
from etude.types import Floats, Ids, SamplingMask

Table: TypeAlias = npt.NDArray[np.float64]
"""[4, R] temperature, top-k, top-p and a random number of each row."""

_SEED_MASK = (1 << 64) - 1
"""Seeds are 64 bits; of larger ones, or negative ones, the low 64 bits count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token for each of R requests."""

    token_ids: Ids
    """[R]"""
    logprobs: Floats
    """[R] natural log of the probability each was drawn with: at its temperature, of its kept set; 0 if greedy."""
    sampling_mask: SamplingMask | None
    """[R] what top-k and top-p left to draw from; ``None`` where no row was cut."""

    def kept_row(self, row: int) -> Ids:
        """The set that one row was drawn from, ascending; empty where nothing was cut. Holds no other row in memory."""
        if self.sampling_mask is None:
            return np.zeros(0, np.int32)
        return self.sampling_mask[row].copy()


@final
class Sampler:
    """Draws tokens; a row's result depends on its logits, parameters, seed and position, and on nothing else."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    @torch.inference_mode()
    def sample(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
    ) -> Drawn:
        """Draw one token per row.

        ``positions`` count the tokens that each request has sampled before: with its seed, they name the random number.
        Off the CPU this waits for the device once, to fetch the result, and once more where a set may be cut: for its
        size.

        Raises :class:`~etude.errors.DivergedError` for logits without a finite maximum or with NaN among them, and for
        a temperature that is none.
        """
        table_4R = tabulated(params, seeds, positions)
        draw_rows = draw_on_host if logits_RV.device.type == "cpu" else draw_on_device
        token_ids_R, mask = draw_rows(logits_RV, table_4R)
        temperatures_R = torch.from_numpy(table_4R[0].astype(np.float32)).to(logits_RV.device, non_blocking=True)
        logprobs_R = self._arithmetic.logprobs(logits_RV, token_ids_R.clamp(min=0), temperatures_R, mask)
        return _fetched(token_ids_R, logprobs_R, mask)


def kept_sets(rows: Sequence[Ids]) -> SamplingMask:
    """[C] the sets of a completion's tokens, as :meth:`Drawn.kept_row` gave them one by one."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return SamplingMask(offsets=offsets, token_ids=np.concatenate([np.zeros(0, np.int32), *rows]))


def tabulated(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Table:
    """[4, R] temperature, top-k, top-p and a random number of each row.

    Temperatures are rounded to float32, in which the trainer will have them.
    """
    seeds_R = np.array([seed & _SEED_MASK for seed in seeds], np.uint64)
    return np.array(
        [
            np.array([one.temperature for one in params], np.float32),
            [one.top_k for one in params],
            [one.top_p for one in params],
            uniforms(seeds_R, np.array(positions, np.uint64)),
        ]
    )


def draw_on_host(logits_RV: Tensor, table_4R: Table) -> tuple[Tensor, MaskTensors | None]:
    """[R] int64 token ids and their kept sets, computed by the kernel; ``None`` where no row was cut."""
    temperatures_R, top_ks_R, top_ps_R, uniforms_R = table_4R
    logits = logits_RV.float().contiguous().numpy()
    choices = draw(logits, temperatures_R, top_ks_R.astype(np.int64), top_ps_R, uniforms_R)
    token_ids_R = torch.from_numpy(choices.token_ids).long()
    if not len(choices.sampling_mask):
        return token_ids_R, None
    return token_ids_R, MaskTensors(
        offsets_N1=torch.from_numpy(choices.offsets), token_ids=torch.from_numpy(choices.sampling_mask).long()
    )


def draw_on_device(logits_RV: Tensor, table_4R: Table) -> tuple[Tensor, MaskTensors | None]:
    """The same in torch operations, on the device of the logits."""
    temperatures_R, top_ks_R, top_ps_R, _ = table_4R
    table = torch.from_numpy(table_4R)
    if logits_RV.device.type == "cuda":
        table = table.pin_memory()
    table = table.to(logits_RV.device, non_blocking=True).unsqueeze(2)
    may_cut = (temperatures_R > 0) & ((top_ks_R > 0) | (top_ps_R < 1))
    chances = Chances(
        temperatures=table[0], top_ks=table[1], top_ps=table[2], uniforms=table[3], cuts=bool(may_cut.any())
    )
    token_ids_R, kept_RV = draw_tensors(logits_RV, chances)
    if kept_RV is None:
        return token_ids_R, None
    offsets = torch.zeros(len(kept_RV) + 1, dtype=torch.int64, device=kept_RV.device)
    offsets[1:] = kept_RV.sum(-1).cumsum(0)
    return token_ids_R, MaskTensors(offsets_N1=offsets, token_ids=kept_RV.nonzero()[:, 1])


def _fetched(token_ids_R: Tensor, logprobs_R: Tensor, mask: MaskTensors | None) -> Drawn:
    """Bring everything to the host at once; float64 holds each of the numbers exactly."""
    parts = [token_ids_R, logprobs_R, *((mask.offsets_N1, mask.token_ids) if mask is not None else ())]
    values = torch.cat([part.double() for part in parts]).cpu().numpy()
    rows = len(token_ids_R)
    token_ids = values[:rows].astype(np.int32)
    if (token_ids == NO_TOKEN).any():
        raise DivergedError(
            f"nothing can be drawn from row {int(np.argmax(token_ids == NO_TOKEN))} of {rows}: its logits are not "
            "finite (the weights that are being served are broken: go back to an earlier version), or its temperature "
            "is negative or not finite"
        )
    sets = None
    if mask is not None:
        offsets, ids = np.split(values[2 * rows :], [rows + 1])
        sets = SamplingMask(offsets=offsets.astype(np.int64), token_ids=ids.astype(np.int32))
    return Drawn(token_ids=token_ids, logprobs=values[rows : 2 * rows].astype(np.float32), sampling_mask=sets)
