"""Scores of sampled tokens by weights other than the current policy's: recent versions, a reference.

    one process       a model of its own gets a version's weights and scores
    several ranks     each stores its shards of every version in host memory; to score, all of them swap these in for
                      the policy's, compute together as in a training step, and swap the policy's back

So the device of a rank holds the policy's shards and never a second model. Owns the stored versions and the swap;
:mod:`etude.trainer.mismatch` and :mod:`etude.trainer.reference` choose version and tokens.

Shape legend: L tokens of a trajectory, N scored tokens.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeAlias, final

import torch
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.models.checkpoint import load_state
from etude.models.hf import CausalModel
from etude.trainer.checkpoint import Box, box_of
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.replay import routing_of
from etude.trainer.scores import by_trajectory, sampled_logprobs, sampled_tokens, score
from etude.trainer.sharded import is_sharded_module, local
from etude.types import Floats, Mask, Trajectory

Row: TypeAlias = tuple[Trajectory, Mask]
"""A trajectory and the mask [L] of its scored tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Scores of some rows by a version."""

    logprobs: tuple[Floats, ...]
    """[L] for each row: log-probabilities of the scored tokens, 0 elsewhere."""
    pairs: int = 0
    """Pairs of token and expert that were replayed."""
    flips: int = 0
    """Pairs among them that the router would not have chosen."""


class VersionScorer(Protocol):
    """Scores tokens under stored versions of the weights."""

    @property
    def versions(self) -> Collection[int]:
        """The versions that are remembered."""
        ...

    def remember(self, version: int, state: Mapping[str, Tensor] | None, *, most: int) -> None:
        """Store ``state`` as ``version`` (``None``: the current weights of the policy); drop the oldest beyond
        ``most``.
        """
        ...

    def score(self, version: int, rows: Sequence[Row], *, max_tokens: int, replays: bool) -> Rescored:
        """Score rows, ``max_tokens`` at a time on each device; with ``replays``, using the routes of the engine."""
        ...


@final
class WholeScorer:
    """A :class:`VersionScorer` of one process.

    ``model`` computes as the trainer does and is loaded with each version in turn, so nothing else may use it.
    """

    def __init__(self, model: CausalModel, config: NumericsConfig) -> None:
        self._model = model.eval().requires_grad_(False)
        self._floor = config.replay_floor
        self._states: dict[int, Mapping[str, Tensor]] = {}
        self._loaded: int | None = None

    @classmethod
    def holding(cls, version: int, state: Mapping[str, Tensor], model: CausalModel, config: NumericsConfig) -> Self:
        """A scorer that stores only ``version``, in the model itself."""
        scorer = cls(model, config)
        load_state(model, state)
        scorer._states[version], scorer._loaded = {}, version
        return scorer

    @property
    def versions(self) -> Collection[int]:
        """See the protocol."""
        return self._states

    def remember(self, version: int, state: Mapping[str, Tensor] | None, *, most: int) -> None:
        """See the protocol; the state is copied."""
        assert state is not None, "alone there is no policy but the one that is passed"
        self._states[version] = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        self._loaded = None
        for old in sorted(self._states)[:-most]:
            del self._states[old]

    @torch.inference_mode()
    def score(self, version: int, rows: Sequence[Row], *, max_tokens: int, replays: bool) -> Rescored:
        """See the protocol."""
        if self._loaded != version:
            load_state(self._model, self._states[version])
            self._loaded = version
        parts = [self._score(part, replays=replays) for part in _parts(rows, max_tokens)]
        return Rescored(
            logprobs=tuple(row for part in parts for row in part.logprobs),
            pairs=sum(part.pairs for part in parts),
            flips=sum(part.flips for part in parts),
        )

    def _score(self, rows: Sequence[Row], *, replays: bool) -> Rescored:
        masked = [replace(trajectory, loss_mask=mask) for trajectory, mask in rows]
        masks, device = [mask for _, mask in rows], self._model.embedding.device
        routing = routing_of(masked, "completion" if replays else "off", self._floor, device)
        logprobs_N = sampled_logprobs(self._model, sampled_tokens(masked, masks, device), routing)
        return Rescored(
            logprobs=tuple(by_trajectory(logprobs_N, masks)),
            pairs=routing.pairs if routing else 0,
            flips=routing.flips if routing else 0,
        )


@final
class RankVersions:
    """One rank's shards of stored versions of a sharded model."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._shards: dict[int, dict[str, Tensor]] = {}
        self._pinned: set[int] = set()

    @property
    def numbers(self) -> Collection[int]:
        """The versions that are remembered."""
        return self._shards.keys()

    def remember(self, version: int, state: Mapping[str, Tensor] | None, *, most: int) -> None:
        """Store a version of whole tensors as :meth:`VersionScorer.remember` does; with ``most`` 0 permanently."""
        if not most:
            self._pinned.add(version)
        self._shards[version] = self._policy() if state is None else self._parts(state)
        recent = sorted(self._shards.keys() - self._pinned)
        for old in recent[: len(recent) - most] if most else ():
            del self._shards[old]

    @contextlib.contextmanager
    def instead(self, version: int) -> Iterator[None]:
        """Context in which the model has the weights of ``version``; afterwards it has its own again, bit for bit."""
        own = self._policy()
        self._load(self._shards[version])
        try:
            yield
        finally:
            self._load(own)

    @torch.no_grad()
    def score(
        self, rows: Sequence[Trajectory], floor: float, context: ContextParallel | None, *, replays: bool
    ) -> Rescored:
        """Scores of the tokens in the rows' loss masks; every rank has to call it, even without rows."""
        device = self._model.embedding.device
        routing = routing_of(rows, "completion" if replays else "off", floor, device) if rows else None
        masks = [row.loss_mask for row in rows]
        logprobs_N = score(self._model, sampled_tokens(rows, masks, device), routing, context).logprobs_N
        return Rescored(
            logprobs=tuple(by_trajectory(logprobs_N, masks)) if rows else (),
            pairs=routing.pairs if routing else 0,
            flips=routing.flips if routing else 0,
        )

    def _policy(self) -> dict[str, Tensor]:
        return {name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in self._model.state_dict().items()}

    def _parts(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part_of(state[name], place).clone() for name, place in self._model.state_dict().items()}

    def _load(self, shards: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, place in self._model.state_dict().items():
                local(place).copy_(shards[name])
        if is_sharded_module(self._model):
            self._model.reshard()  # drop weights that were gathered before


def part_of(whole: Tensor, place: Tensor) -> Tensor:
    """A rank's view of a whole tensor that is sharded as ``place`` is."""
    return whole[box_of(place).inside(Box((0,) * place.ndim, tuple(place.shape)))]


def _parts(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows with at most ``max_tokens`` tokens together, but at least one row."""
    part, tokens = list[Row](), 0
    for row in rows:
        length = len(row[0].token_ids)
        if part and tokens + length > max_tokens:
            yield part
            part, tokens = [], 0
        part.append(row)
        tokens += length
    yield part
