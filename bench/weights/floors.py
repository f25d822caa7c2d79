"""How small a change of weights can get: the entropy of what a lossless codec has to say.

Two floors, for two things that a codec may know. Without context a change is a gap and a step, each drawn from the
histogram of all gaps and all steps. With the receiver's old exponents as context (``weights/classes.py`` says why),
each weight changes or not with the probability of its exponent, and steps have a histogram per exponent.
Nothing else was found to tell where changes fall, so that a codec's distance from its floor is what coding still loses.

This file owns that arithmetic, over a pair of bfloat16 states. It is an estimate from one pair's own histograms, which
are given away free; no code reaches it quite.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.sync.rehearsal import PublishedPair
from etude.weights import frames
from etude.weights.state import ELEMENTS

_BF16 = ELEMENTS["BF16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Bytes that a pair's change takes at least."""

    changed: int
    """Weights that differ."""
    gaps_bytes: float
    """Size if coded as gaps and steps."""
    context_bytes: float
    """Size if coded with the old exponents as context."""


def floors_of(pair: PublishedPair) -> Floors:
    """Both floors of a pair."""
    changes = frames.scan([pair.old], [pair.new], _BF16)
    places = np.concatenate([np.array([-1], np.int64), changes.positions])
    gaps = places[1:] - places[:-1]
    gap_bits = _histogram_bits(gaps) + _histogram_bits(changes.steps)
    exponents = pair.old >> _BF16.mantissa_bits & ((1 << _BF16.exponent_bits) - 1)
    changed_exponents = exponents[changes.positions]
    members = np.bincount(exponents)
    changed = np.bincount(changed_exponents, minlength=len(members))
    context_bits = sum(_coin_bits(int(n), int(k)) for n, k in zip(members, changed, strict=True))
    context_bits += sum(_histogram_bits(changes.steps[changed_exponents == one]) for one in np.flatnonzero(changed))
    return Floors(changed=len(changes), gaps_bytes=gap_bits / 8, context_bytes=context_bits / 8)


def _histogram_bits(values: npt.NDArray[np.integer[Any]]) -> float:
    """Bits of all values under their own histogram."""
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log2(counts / max(1, len(values)))).sum())


def _coin_bits(tosses: int, heads: int) -> float:
    """Bits of coin flips if their share of heads is known."""
    if heads in (0, tosses):
        return 0.0
    share = heads / tosses
    return -tosses * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
