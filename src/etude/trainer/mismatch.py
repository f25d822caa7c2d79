"""Train–inference mismatch: log-probabilities of trainer and engine for the same tokens and weights.

In an asynchronous run the trainer has newer weights when a token arrives, so a comparison with its *current* weights
would measure learning. Instead the last few published states are stored, and a sample of each batch is scored again
under the version that sampled it. A turn is comparable if one version sampled all of it: the engine never reuses a
prefix across versions, so that version also computed the whole context. There is one exception, which shows as a larger
mismatch and changes no training: where running calls keep their context during a swap, an engine may have read part of
a prompt with the version before (the native engine after ``MAX_REREADS`` swaps during one prompt, vLLM for a prompt
that it has not begun to answer).

The scorer computes as the loss does, with the temperature, sampling mask and router replay of each token. Rows without
a comparable token use the trainer's own router: the engine computed them with other weights, or recorded no routes.

Shape legend: N compared tokens, L tokens of a trajectory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
import torch

from etude.config.inference import NumericsConfig
from etude.errors import DamagedError
from etude.models.hf import CausalModel
from etude.trainer.version_scores import Rescored, Row, VersionScorer, WholeScorer
from etude.types import Floats, Ids, Mask, Trajectory

POSITIONS = (0, 1, 8, 32, 128, 512)
"""First positions of the ranges of a completion. Mismatch that grows along it comes from the cache, mismatch at its
start from the prefill.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Statistics of d = log π_trainer − log π_engine over ``tokens`` sampled tokens.

    ``k1`` = mean(−d) and ``k3`` = mean(e^d − 1 − d) both estimate KL(engine ‖ trainer); k3 is never negative
    (J. Schulman, "Approximating KL divergence", 2020). All zero without tokens.
    """

    tokens: int
    k1: float
    k3: float
    p99: float
    """99th percentile of |d|."""
    max: float
    """Largest |d|."""
    equal: int
    """Tokens with d = 0."""
    pairs: int = 0
    """Pairs of token and expert, over all sparse layers, that the engine recorded."""
    flips: int = 0
    """Pairs among them that the trainer's own router would not have chosen."""


MIN_TOKENS = 100
"""Least number of compared tokens for a warning or a stop: a mean of fewer says little."""
NOTHING_COMPARED = Mismatch(tokens=0, k1=0.0, k3=0.0, p99=0.0, max=0.0, equal=0)
"""The mismatch of no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """One mismatch measurement, in total and broken down."""

    total: Mismatch
    versions: tuple[tuple[int, Mismatch], ...]
    """By the weight version that sampled, ascending."""
    positions: tuple[tuple[int, Mismatch], ...]
    """By the first position of a range of ``POSITIONS``, ascending; without flips, which are counted per forward pass.
    """


class MismatchLevel(StrEnum):
    """Level of a mismatch: continue, warn or stop."""

    CLEAR = "clear"
    WARN = "warn"
    STOP = "stop"


def mismatch_level(mismatch: Mismatch, config: NumericsConfig, before: MismatchLevel) -> MismatchLevel:
    """The level of a mismatch; with too few tokens the level ``before``. NaN is a stop."""
    if mismatch.tokens < MIN_TOKENS:
        return before
    if not mismatch.k3 <= config.stop_k3:
        return MismatchLevel.STOP
    return MismatchLevel.WARN if mismatch.k3 > config.warn_k3 else MismatchLevel.CLEAR


def summarise(differences_N: Floats, *, pairs: int = 0, flips: int = 0) -> Mismatch:
    """Statistics of differences in logprob; all zero when there are none."""
    if not len(differences_N):
        return NOTHING_COMPARED
    d = differences_N.astype(np.float64)
    return Mismatch(
        tokens=len(d),
        k1=float(-d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        p99=float(np.percentile(np.abs(d), 99)),
        max=float(np.abs(d).max()),
        equal=int((d == 0).sum()),
        pairs=pairs,
        flips=flips,
    )


class MismatchProbe:
    """Stores ``versions`` recent weight versions and scores trajectories under them.

    ``config`` says whether routes are replayed; ``auto`` must have been resolved for the device.
    """

    def __init__(self, scorer: VersionScorer, config: NumericsConfig, *, versions: int) -> None:
        self._scorer = scorer
        self._config = config
        self._versions = versions

    @classmethod
    def alone(cls, model: CausalModel, config: NumericsConfig, *, versions: int) -> Self:
        """The probe of one process, which scores with ``model``."""
        return cls(WholeScorer(model, config), config, versions=versions)

    def remember(self, version: int, state: Mapping[str, torch.Tensor] | None) -> None:
        """Store a model's state as ``version`` in host memory and drop the oldest beyond the limit. With several ranks
        ``state`` is ``None``: each stores its part of the policy.
        """
        self._scorer.remember(version, state, most=self._versions)

    def measure(self, trajectories: Sequence[Trajectory], *, max_tokens: int) -> MismatchReport:
        """Compare every comparable turn of ``trajectories``, ``max_tokens`` tokens at a time."""
        by_version: dict[int, _ComparedTokens] = {}
        for version in sorted(self._scorer.versions):
            rows = [(t, mask) for t in trajectories if (mask := comparable(t, version)).any()]
            if rows:
                by_version[version] = _compared(rows, self._score(version, rows, max_tokens))
        everything = list(by_version.values())
        return MismatchReport(
            total=_summary(everything),
            versions=tuple((version, _summary([compared])) for version, compared in by_version.items()),
            positions=_by_position(everything),
        )

    def old_logprobs(self, trajectories: Sequence[Trajectory], *, max_tokens: int) -> list[Floats]:
        """[L] for each trajectory: every sampled token's logprob under the weights that sampled it, 0 elsewhere.

        Takes one forward pass for each version that sampled a part of a trajectory. Raises
        :class:`~etude.errors.DamagedError` if a version is not stored.
        """
        logprobs = [np.zeros(len(t.token_ids), np.float32) for t in trajectories]
        for version in sorted({int(version) for t in trajectories for version in np.unique(t.versions[t.loss_mask])}):
            if version not in self._scorer.versions:
                raise DamagedError(
                    f"weight version {version} sampled tokens of this batch and cannot score them again: it is missing "
                    f"from the weight log; set loss.options.old_policy = 'engine'"
                )
            rows = [(t, t.loss_mask & (t.versions == version)) for t in trajectories]
            chosen = [index for index, (_, mask) in enumerate(rows) if mask.any()]
            scored = self._score(version, [rows[index] for index in chosen], max_tokens)
            for index, row in zip(chosen, scored.logprobs, strict=True):
                logprobs[index] += row
        return logprobs

    def _score(self, version: int, rows: Sequence[Row], max_tokens: int) -> Rescored:
        return self._scorer.score(version, rows, max_tokens=max_tokens, replays=self._config.replay != "off")


def comparable(trajectory: Trajectory, version: int) -> Mask:
    """[L] mask of the tokens in turns that ``version`` alone sampled."""
    mask = np.zeros(len(trajectory.token_ids), np.bool_)
    for start, end in _turns(trajectory):
        own = trajectory.loss_mask[start:end]
        if (trajectory.versions[start:end][own] == version).all():
            mask[start:end] = own
    return mask


def positions(trajectory: Trajectory) -> Ids:
    """[L] position of each token in its completion, from 0; meaningless where not sampled."""
    places = np.zeros(len(trajectory.token_ids), np.int32)
    for start, end in _turns(trajectory):
        places[start:end] = np.arange(end - start)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedTokens:
    """The compared tokens of one version."""

    differences_N: Floats
    positions_N: Ids
    pairs: int
    flips: int


def _compared(rows: Sequence[Row], scored: Rescored) -> _ComparedTokens:
    masks = [mask[1:] for _, mask in rows]  # a first token is never predicted
    differences = [(row - t.logprobs)[1:] for (t, _), row in zip(rows, scored.logprobs, strict=True)]
    return _ComparedTokens(
        differences_N=np.concatenate([row[mask] for row, mask in zip(differences, masks, strict=True)]),
        positions_N=np.concatenate([positions(t)[1:][mask] for (t, _), mask in zip(rows, masks, strict=True)]),
        pairs=scored.pairs,
        flips=scored.flips,
    )


def _turns(trajectory: Trajectory) -> Iterable[tuple[int, int]]:
    """Ranges from each turn's first sampled token to that of the next turn."""
    ends = (*trajectory.turn_starts[1:], len(trajectory.token_ids))
    return zip(trajectory.turn_starts, ends, strict=True)


def _summary(chunks: Sequence[_ComparedTokens]) -> Mismatch:
    return summarise(
        np.concatenate([np.zeros(0, np.float32), *(chunk.differences_N for chunk in chunks)]),
        pairs=sum(chunk.pairs for chunk in chunks),
        flips=sum(chunk.flips for chunk in chunks),
    )


def _by_position(chunks: Sequence[_ComparedTokens]) -> tuple[tuple[int, Mismatch], ...]:
    differences_N = np.concatenate([np.zeros(0, np.float32), *(chunk.differences_N for chunk in chunks)])
    places_N = np.concatenate([np.zeros(0, np.int32), *(chunk.positions_N for chunk in chunks)])
    ranges_N = np.searchsorted(POSITIONS, places_N, side="right") - 1
    by_position = ((first, differences_N[ranges_N == index]) for index, first in enumerate(POSITIONS))
    return tuple((first, summarise(differences)) for first, differences in by_position if len(differences))
