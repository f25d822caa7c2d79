"""Mid-training and SFT: next-token prediction over packed documents, each token with a weight of its own.

Owns the loss of these phases and its measurements. The caller supplies the documents, batch by batch; the step itself
is in :mod:`etude.trainer.optimisation`, as in reinforcement learning.

Shape legend: N tokens of a micro-batch of concatenated documents, P predicted tokens of it, H hidden, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from etude.models.hf import CausalModel
from etude.trainer.optimisation import Optimisation
from etude.trainer.parallel import Grid
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.readout import in_chunks
from etude.trainer.scores import hidden_before
from etude.types import Document, Mask

MicroBatch: TypeAlias = Sequence[Document]
"""Documents that go through the model together; may be empty."""
MIN_TOKENS = 2
"""Least length of a document: a shorter one predicts nothing and is left out."""
PADDING = Document(token_ids=np.zeros(1, np.int32), weights=np.zeros(1, np.float32))
"""Placeholder in a pass without documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss sums over some tokens; they can be added over micro-batches and documents."""

    weighted: float = 0.0
    """Σ weight · nats."""
    weight: float = 0.0
    action: float = 0.0
    """Σ nats of the predicted tokens that an agent wrote."""
    actions: int = 0
    """Number of these tokens."""
    tokens: int = 0
    """All tokens, predicted or not."""

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(
            weighted=self.weighted + other.weighted,
            weight=self.weight + other.weight,
            action=self.action + other.action,
            actions=self.actions + other.actions,
            tokens=self.tokens + other.tokens,
        )

    @property
    def mean(self) -> float:
        """Nats per unit of weight; NaN without any weight."""
        return self.weighted / self.weight if self.weight else math.nan

    @property
    def action_mean(self) -> float:
        """Nats per token that an agent wrote; NaN without any."""
        return self.action / self.actions if self.actions else math.nan


@final
class ImitationTrainer:
    """Trains a model by next-token prediction on documents."""

    def __init__(self, optimisation: Optimisation, grid: Grid | None = None) -> None:
        """With a ``grid`` the model is sharded over its ranks, each of which has a share of every batch."""
        self._optimisation = optimisation
        self._model = optimisation.model
        self._grid = grid
        self._context = None if grid is None else grid.context

    def step(self, step: int, microbatches: Sequence[MicroBatch]) -> Loss:
        """Take step 1, 2, … on this rank's micro-batches, as many as on every other rank, and return the loss of the
        whole batch before the step.

            L = Σ_t w_t · −log π_θ(y_t) / Σ_t w_t        over the predicted tokens of the whole batch

        Raises :class:`~etude.errors.DivergedError` as :meth:`Optimisation.step` does, and ``ValueError`` for a batch in
        which all weights are 0.
        """
        total = sum(_weight(document) for microbatch in microbatches for document in microbatch)
        if self._grid is not None:  # ranks that share a context have the same documents
            total = self._grid.total([total])[0] * self._grid.shares / self._grid.world
        if not total > 0:
            raise ValueError(f"step {step}: no token of the batch has a weight, there is nothing to learn")
        losses: list[Loss] = []
        self._optimisation.step(step, self._losses(microbatches, total, losses))
        return self._of_all(losses)

    @torch.no_grad()
    def measure(self, microbatches: Sequence[MicroBatch]) -> Loss:
        """The loss of documents without training on them, over the micro-batches of all ranks."""
        losses: list[Loss] = []
        for _ in self._losses(microbatches, 1.0, losses):
            pass
        return self._of_all(losses)

    def _losses(self, microbatches: Sequence[MicroBatch], total: float, losses: list[Loss]) -> Iterator[Tensor]:
        """Each micro-batch's share of the loss, computed lazily; its sums are appended to ``losses``."""
        for microbatch in microbatches:
            documents = [document for document in microbatch if len(document.token_ids) >= MIN_TOKENS]
            losses_P, weights_P, acts_P = predict(self._model, documents, self._context)
            read = microbatch if self._context is None or self._context.rank == 0 else []
            losses.append(_measured(losses_P.detach(), weights_P, acts_P, read))
            yield (losses_P * weights_P).sum() / total

    def _of_all(self, losses: Sequence[Loss]) -> Loss:
        """The sum over micro-batches and ranks."""
        own = sum(losses, Loss())
        if self._grid is None:
            return own
        weighted, weight, action, actions, tokens = self._grid.total(astuple(own))
        return Loss(weighted=weighted, weight=weight, action=action, actions=round(actions), tokens=round(tokens))


def predict(
    model: CausalModel, documents: Sequence[Document], context: ContextParallel | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of the tokens with a weight, with gradient; their weights; and the mask of those that an agent wrote; all
    [P].

    Documents do not attend to each other, and the first token of each is not predicted. With a ``context`` the results
    cover the tokens that this rank computes. Without documents they are empty but still have a gradient, which other
    ranks wait for.
    """
    device = model.embedding.device
    documents = documents or [PADDING]
    lengths = [len(document.token_ids) for document in documents]
    ids_N = torch.from_numpy(np.concatenate([document.token_ids for document in documents])).to(device).long()
    weights_N = np.concatenate([np.append(np.float32(0), document.weights[1:]) for document in documents])
    acts_N = np.concatenate([_acts(document) for document in documents])
    places_P = torch.from_numpy(np.flatnonzero(weights_N))
    targets_P = places_P.to(device)
    hidden_PH, owners_P = hidden_before(model, ids_N, lengths, targets_P, context=context)
    if context is not None and owners_P is not None:
        mine_P = owners_P == context.rank
        targets_P, places_P = targets_P[mine_P], places_P[mine_P.cpu()]
    (losses_P,) = in_chunks(_nats, model, hidden_PH, ids_N[targets_P])
    weights_P = torch.from_numpy(weights_N[places_P.numpy()]).to(device)
    return losses_P, weights_P, torch.from_numpy(acts_N[places_P.numpy()]).to(device)


def _nats(model: CausalModel, hidden_nH: Tensor, ids_n: Tensor) -> tuple[Tensor]:
    logits_nV = model.logits(hidden_nH)
    exact_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    return (functional.cross_entropy(exact_nV, ids_n, reduction="none"),)


def _weight(document: Document) -> float:
    """Sum of the weights of its predicted tokens."""
    return float(document.weights[1:].sum(dtype=np.float64))


def _acts(document: Document) -> Mask:
    """[L] true where an agent wrote the token: it has full weight in a document in which others have less."""
    own: Mask = document.weights == 1
    return own & np.bool_(not own[1:].all())


def _measured(losses_P: Tensor, weights_P: Tensor, acts_P: Tensor, documents: MicroBatch) -> Loss:
    return Loss(
        weighted=float((losses_P * weights_P).sum()),
        weight=float(weights_P.sum()),
        action=float(losses_P[acts_P].sum()),
        actions=int(acts_P.sum()),
        tokens=sum(len(document.token_ids) for document in documents),
    )
