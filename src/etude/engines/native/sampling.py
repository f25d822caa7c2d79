"""Sampling: one token per request, with its log-probability under the sampled distribution and its sampling mask.

Owns the conversion between requests and arrays, and the draw on an accelerator; the draw on a CPU is
:mod:`etude.models.kernels.draws`. The log-probability is the arithmetic's function that the trainer also
differentiates, so with invariant arithmetic the two agree to the last bit. Knows no scheduler, no cache and no weights.

The draw on a device repeats that kernel in torch operations: the same integer weights, the same order of ties, the same
random numbers, so that a request samples the same tokens on either. The kernel selects by radix; here the limit is
found by bisection over the 32 bits of a key, which takes the same number of passes over the logits for any content and
no device synchronisation. It can be part of a CUDA graph.

Shape legend: R rows, one per request that samples in this step; V vocabulary; C tokens of a completion; L sparse
layers; k experts per token; 1 an axis kept for broadcasting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from etude.engines.native.transfer import fetch, place
from etude.errors import DivergedError
from etude.models.arithmetic import Arithmetic, MaskTensors
from etude.models.kernels.draws import FASTEST_FALL, NO_TOKEN, UNIT_BITS, draw, uniforms
from etude.protocols import SamplingParams
from etude.types import Floats, Ids, Routes, SamplingMask

Table: TypeAlias = npt.NDArray[np.float64]
"""[4, R] temperature, top-k, top-p and a random number of each row."""

_SEED_MASK = (1 << 64) - 1
"""Seeds have 64 bits; larger or negative ones are reduced to their low 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token for each of R requests."""

    token_ids: Ids
    """[R]"""
    logprobs: Floats
    """[R] natural log of each token's probability at its temperature and within its sampling mask; 0 if greedy."""
    sampling_mask: SamplingMask | None
    """[R] the sets after top-k and top-p; ``None`` if no row is truncated."""
    routes: Routes | None = None
    """[R,L,k] the experts of the preceding tokens, if requested."""

    def kept_row(self, row: int) -> Ids:
        """The set that one row was drawn from, ascending; empty if it is not truncated. Keeps no other row in
        memory.
        """
        if self.sampling_mask is None:
            return np.zeros(0, np.int32)
        return self.sampling_mask[row].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTensors:
    """One token for each of R requests, on the device."""

    token_ids_R: Tensor
    """int64."""
    logprobs_R: Tensor
    """float32."""
    kept_Rb: Tensor | None
    """uint8: the sampling masks, eight tokens per byte, the first in the lowest bit; ``None`` if no row may be
    truncated.
    """
    routes_RLk: Tensor | None
    """int16, the bits of uint16."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not ``None``."""
        every = (self.token_ids_R, self.logprobs_R, self.kept_Rb, self.routes_RLk)
        return [tensor for tensor in every if tensor is not None]

    def read(self, tensors: Sequence[Tensor], rows: int) -> Drawn:
        """The first rows of these tensors, copied to the host, as a result."""
        left = iter(tensor[:rows] for tensor in tensors)
        token_ids, logprobs = next(left).numpy().astype(np.int32), next(left).numpy()
        sets = None if self.kept_Rb is None else _unpacked(next(left).numpy())
        routes = None if self.routes_RLk is None else next(left).numpy().view(np.uint16).copy()
        return _checked(Drawn(token_ids=token_ids, logprobs=logprobs, sampling_mask=sets, routes=routes))


@final
class Sampler:
    """Draws tokens; a row's result depends only on its logits, parameters, seed and position."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    @torch.inference_mode()
    def sample(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        routes_RLk: Tensor | None = None,
    ) -> Drawn:
        """Draw one token per row.

        ``positions`` are the numbers of tokens that each request has sampled before: with the seed, they determine the
        random number. Off the CPU this waits for the device once, to fetch the result, and ``routes_RLk`` with it.

        Raises :class:`~etude.errors.DivergedError` for logits without a finite maximum or with a NaN, and for an
        invalid temperature.
        """
        table_4R = tabulated(params, seeds, positions)
        if logits_RV.device.type == "cpu":
            return self._sample_on_host(logits_RV, table_4R, routes_RLk)
        (table,) = place([torch.from_numpy(table_4R)], logits_RV.device)
        drawn = self.draw(logits_RV, table, routes_RLk, truncates=may_truncate(table_4R))
        return drawn.read(fetch(drawn.tensors), len(logits_RV))

    def draw(self, logits_RV: Tensor, table_4R: Tensor, routes_RLk: Tensor | None, *, truncates: bool) -> DrawnTensors:
        """Draw one token per row on the device, without synchronisation; set ``truncates`` if any row may be
        truncated.
        """
        token_ids_R, kept_RV = draw_on_device(logits_RV, table_4R, truncates=truncates)
        if kept_RV is not None:  # a row without a set may draw any token
            logits_RV = logits_RV.masked_fill(~(kept_RV | ~kept_RV.any(-1, keepdim=True)), -torch.inf)
        logprobs_R = self._arithmetic.logprobs(logits_RV, token_ids_R.clamp(min=0), table_4R[0].float(), None)
        kept_Rb = None if kept_RV is None else _packed(kept_RV)
        return DrawnTensors(token_ids_R=token_ids_R, logprobs_R=logprobs_R, kept_Rb=kept_Rb, routes_RLk=routes_RLk)

    def _sample_on_host(self, logits_RV: Tensor, table_4R: Table, routes_RLk: Tensor | None) -> Drawn:
        token_ids_R, mask = draw_on_host(logits_RV, table_4R)
        temperatures_R = torch.from_numpy(table_4R[0].astype(np.float32))
        logprobs_R = self._arithmetic.logprobs(logits_RV, token_ids_R.clamp(min=0), temperatures_R, mask)
        sets = None
        if mask is not None:
            sets = SamplingMask(offsets=mask.offsets_N1.numpy(), token_ids=mask.token_ids.numpy().astype(np.int32))
        routes = None if routes_RLk is None else routes_RLk.numpy().view(np.uint16)
        token_ids = token_ids_R.numpy().astype(np.int32)
        return _checked(Drawn(token_ids=token_ids, logprobs=logprobs_R.numpy(), sampling_mask=sets, routes=routes))


def choose(
    logits_RV: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """[R] int64, on the device of the logits: the tokens that :meth:`Sampler.sample` would draw; any id if none can be
    drawn.
    """
    table_4R = tabulated(params, seeds, positions)
    if logits_RV.device.type == "cpu":
        return draw_on_host(logits_RV, table_4R)[0].clamp(min=0)
    (table,) = place([torch.from_numpy(table_4R)], logits_RV.device)
    return draw_on_device(logits_RV, table, truncates=may_truncate(table_4R))[0].clamp(min=0)


def tabulated(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Table:
    """[4, R] temperature, top-k, top-p and random number of each row, as one array.

    Temperatures are rounded to float32, as in the trainer.
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
    """[R] int64 token ids and their sampling masks, computed by the kernel; ``None`` where no row is truncated."""
    temperatures_R, top_ks_R, top_ps_R, uniforms_R = table_4R
    logits = logits_RV.float().contiguous().numpy()
    choices = draw(logits, temperatures_R, top_ks_R.astype(np.int64), top_ps_R, uniforms_R)
    token_ids_R = torch.from_numpy(choices.token_ids).long()
    if not len(choices.sampling_mask):
        return token_ids_R, None
    return token_ids_R, MaskTensors(
        offsets_N1=torch.from_numpy(choices.offsets), token_ids=torch.from_numpy(choices.sampling_mask).long()
    )


def may_truncate(table_4R: Table) -> bool:
    """Report whether top-k or top-p may truncate any row."""
    temperatures_R, top_ks_R, top_ps_R, _ = table_4R
    return bool(((temperatures_R > 0) & ((top_ks_R > 0) | (top_ps_R < 1))).any())


def draw_on_device(logits_RV: Tensor, table_4R: Tensor, *, truncates: bool) -> tuple[Tensor, Tensor | None]:
    """[R] int64 token ids and the sampling masks [R,V] bool, on the device of the logits and of the table.

    A mask is all false if its row is not truncated; without ``truncates`` there are no masks.
    """
    table = table_4R.unsqueeze(2)
    params = RowParams(temperatures=table[0], top_ks=table[1], top_ps=table[2], uniforms=table[3], truncates=truncates)
    if logits_RV.is_cuda and not truncates:
        return _draw_by_kernel(logits_RV, params), None
    return draw_tensors(logits_RV, params)


def _draw_by_kernel(logits_RV: Tensor, params: "RowParams") -> Tensor:
    """[R] int64: the result of :func:`draw_tensors` without truncation, in one launch instead of seventy."""
    from etude.models.kernels.gpu import vocabulary

    return vocabulary.draw(
        logits_RV,
        params.temperatures.flatten(),
        params.uniforms.flatten(),
        unit_bits=UNIT_BITS,
        fastest_fall=FASTEST_FALL,
        nothing=_NOTHING,
    )


def _checked(drawn: Drawn) -> Drawn:
    broken = drawn.token_ids == NO_TOKEN
    if broken.any():
        raise DivergedError(
            f"nothing can be drawn from row {int(np.argmax(broken))} of {len(broken)}: its logits are not "
            "finite (the weights that are being served are broken: go back to an earlier version), or its temperature "
            "is negative or not finite"
        )
    return drawn


def _packed(kept_RV: Tensor) -> Tensor:
    """[R,b] uint8: eight booleans per byte."""
    rows, vocabulary = kept_RV.shape
    bits_Rb8 = functional.pad(kept_RV.to(torch.uint8), (0, -vocabulary % 8)).view(rows, -1, 8)
    return (bits_Rb8 << torch.arange(8, dtype=torch.uint8, device=kept_RV.device)).sum(-1, dtype=torch.uint8)


def _unpacked(kept_Rb: npt.NDArray[np.uint8]) -> SamplingMask | None:
    """The sets of packed masks; almost all bytes are 0 and need not be unpacked."""
    rows, places = kept_Rb.nonzero()
    which, bits = np.unpackbits(kept_Rb[rows, places, None], axis=1, bitorder="little").nonzero()
    if not len(which):
        return None
    offsets = np.zeros(len(kept_Rb) + 1, np.int64)
    np.cumsum(np.bincount(rows[which], minlength=len(kept_Rb)), out=offsets[1:])
    return SamplingMask(offsets=offsets, token_ids=(places[which] * 8 + bits).astype(np.int32))


_KEY_BITS = 32
_LOWEST = -(1 << 31)
_NOTHING = -52.0
"""Exponent at and below which a weight is certainly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters of each row, [R, 1] float64 on the device of the logits."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    uniforms: Tensor
    truncates: bool
    """True if top-k or top-p may truncate any row; known on the host."""


def draw_tensors(logits_RV: Tensor, params: RowParams) -> tuple[Tensor, Tensor | None]:
    """Draw one token per row: ids [R] int64, and the sampling mask [R, V] bool, all false where nothing is truncated.

    The id is ``NO_TOKEN`` if nothing can be drawn. The mask is ``None`` if no row may be truncated.
    """
    logits_RV = logits_RV.float()
    peaks_R1 = logits_RV.amax(-1, keepdim=True)
    fit_R1 = peaks_R1.isfinite() & params.temperatures.isfinite() & (params.temperatures >= 0)
    logits_RV = torch.where(fit_R1, logits_RV, 0.0)
    keys_RV = _keys(logits_RV)
    weights_RV = _weights(logits_RV, torch.where(fit_R1, peaks_R1, 0.0), params.temperatures)
    kept_RV = None
    if params.truncates:
        kept_RV = _truncated(keys_RV, weights_RV, params)
        weights_RV = weights_RV * kept_RV
        kept_RV &= ~kept_RV.all(-1, keepdim=True)
    sums_RV = weights_RV.cumsum(-1)
    totals_R1 = sums_RV[:, -1:]
    targets_R1 = torch.minimum((params.uniforms * totals_R1).long(), totals_R1 - 1)
    drawn_R = (sums_RV <= targets_R1).sum(-1)
    drawn_R = torch.where(params.temperatures.squeeze(1) == 0, _first_largest(keys_RV), drawn_R)
    return torch.where(fit_R1.squeeze(1), drawn_R, NO_TOKEN), kept_RV


def _keys(logits_RV: Tensor) -> Tensor:
    """[R, V] int32 keys in the order of the logits; −0 and 0 have the same key."""
    bits_RV = logits_RV.contiguous().view(torch.int32)
    return torch.where(bits_RV >= 0, bits_RV, _LOWEST - bits_RV)


def _weights(logits_RV: Tensor, peaks_R1: Tensor, temperatures_R1: Tensor) -> Tensor:
    """[R, V] int64: ⌊2⁴⁰ · exp((logit − peak) / temperature)⌋."""
    rises_R1 = (1.0 / (temperatures_R1 * math.log(2.0))).clamp(max=FASTEST_FALL)
    exponents_RV = ((logits_RV.double() - peaks_R1) * rises_R1).clamp(min=_NOTHING)
    return (exponents_RV.exp2() * 2.0**UNIT_BITS).long()


def _truncated(keys_RV: Tensor, weights_RV: Tensor, params: RowParams) -> Tensor:
    """[R, V] bool: the tokens that remain after top-k and then top-p; all of a greedy row."""
    vocabulary = keys_RV.shape[1]
    limits_R1 = params.top_ks.long().clamp(max=vocabulary)
    limits_R1 = torch.where((limits_R1 == 0) | (params.temperatures == 0), vocabulary, limits_R1)
    kept_RV = _leading(keys_RV, torch.ones_like(weights_RV), limits_R1)
    weights_RV = weights_RV * kept_RV
    totals_R1 = weights_RV.sum(-1, keepdim=True)
    needed_R1 = torch.minimum((totals_R1 * params.top_ps).ceil().long(), totals_R1).clamp(min=1)
    whole_R1 = (params.top_ps >= 1) | (params.temperatures == 0)
    return kept_RV & (whole_R1 | _leading(keys_RV, weights_RV, needed_R1))


def _leading(keys_RV: Tensor, amounts_RV: Tensor, needed_R1: Tensor) -> Tensor:
    """[R, V] bool: the smallest set of the largest keys whose amounts add up to ``needed_R1``; of equal keys, the
    first.
    """
    limits_R1 = torch.full_like(needed_R1, _LOWEST)
    for bit in reversed(range(_KEY_BITS)):
        trials_R1 = limits_R1 + (1 << bit)
        enough_R1 = (amounts_RV * (keys_RV >= trials_R1)).sum(-1, keepdim=True) >= needed_R1
        limits_R1 = torch.where(enough_R1, trials_R1, limits_R1)
    above_RV = keys_RV > limits_R1
    missing_R1 = needed_R1 - (amounts_RV * above_RV).sum(-1, keepdim=True)
    ties_RV = amounts_RV * (keys_RV == limits_R1)
    return above_RV | ((ties_RV > 0) & (ties_RV.cumsum(-1) - ties_RV < missing_R1))


def _first_largest(keys_RV: Tensor) -> Tensor:
    """[R] int64: the column of the largest key, the lowest of equals; ``argmax`` guarantees no order."""
    vocabulary = keys_RV.shape[1]
    columns_V = torch.arange(vocabulary, device=keys_RV.device)
    return torch.where(keys_RV == keys_RV.amax(-1, keepdim=True), columns_V, vocabulary).amin(-1)
