"""Rotary position tables: cosines and sines of every position, for every supported scaling of a checkpoint.

Owns the tables; :meth:`~etude.models.arithmetic.Arithmetic.rotate` applies them. numpy computes them on the host,
through correctly rounded float64, so that trainer and engine have the same bits on different machines; they are within
one unit in the last place of transformers' tables.

Shape legend: P positions, F frequencies (half the width of what is turned), D that width.
"""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.models.spec import LinearScaling, Llama3Scaling, ModelSpec, RopeSpec, YarnScaling

Frequencies: TypeAlias = npt.NDArray[np.float32]
"""[F] radians per position."""


def rotary_tables(spec: ModelSpec, rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the layers of ``spec`` that have this ``rope``, [P,D] float32 each.

    The second half of a row repeats the first.
    """
    rates_F = frequencies(rope, spec.attention.rotary_width)
    # The product is rounded to float32 as the models were trained with; from there on nothing more is lost.
    angles_PF = np.outer(np.arange(spec.max_positions, dtype=np.float32), rates_F).astype(np.float64)
    cosines_PD, sines_PD = (np.tile(rope.amplitude * x_PF, 2) for x_PF in (np.cos(angles_PF), np.sin(angles_PF)))
    return torch.from_numpy(cosines_PD.astype(np.float32)), torch.from_numpy(sines_PD.astype(np.float32))


def frequencies(rope: RopeSpec, width: int) -> Frequencies:
    """[F] the angle by which each pair turns per position, of ``width`` rotated columns."""
    exponents_F = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    wavelengths_F = np.power(rope.theta, exponents_F.astype(np.float64)).astype(np.float32)
    rates_F: Frequencies = np.float32(1) / wavelengths_F
    match rope.scaling:
        case None:
            return rates_F
        case LinearScaling(factor=factor):
            return rates_F / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(rates_F, scaling)
        case YarnScaling() as scaling:
            return _yarn(rates_F, scaling, rope.theta)


def _llama3(rates_F: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """Blend each frequency with its slowed-down one, weighted by its number of turns in the original context."""
    turns_F = scaling.original_positions * rates_F / np.float32(2 * math.pi)
    kept_F = (turns_F - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return _blended(rates_F, scaling.factor, kept_F)


def _yarn(rates_F: Frequencies, scaling: YarnScaling, theta: float) -> Frequencies:
    """Blend by the index of a frequency: a ramp between those of ``fast_turns`` and of ``slow_turns``."""
    width = 2 * len(rates_F)

    def index_of(turns: float) -> float:
        """Index of the frequency that turns so often in the original context (inverse of its formula)."""
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.fast_turns), index_of(scaling.slow_turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    step = high - low if high != low else 0.001  # the reference's way around a division by zero
    indices_F = np.arange(len(rates_F), dtype=np.float32)
    return _blended(rates_F, scaling.factor, 1 - np.clip((indices_F - np.float32(low)) / np.float32(step), 0, 1))


def _blended(rates_F: Frequencies, factor: float, kept_F: npt.NDArray[np.floating]) -> Frequencies:
    """Frequencies divided by ``factor``, except for the share ``kept_F`` of each, which is clipped to 0 … 1."""
    share_F = np.clip(kept_F, 0, 1).astype(np.float32)
    blended_F: Frequencies = (1 - share_F) * rates_F / np.float32(factor) + share_F * rates_F
    return blended_F
