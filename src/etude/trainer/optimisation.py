"""One optimiser step for every phase: accumulate gradients, clip, check, apply the scheduled rate.

    zero ──▶ loss, backward, loss, backward, … ──▶ norm, clip ──▶ finite? ──▶ rate ──▶ before_update ──▶ update

Owns the model's weights, the optimiser's moments, and the named state that the next step depends on. The caller
supplies the losses, one micro-batch at a time, so that the graph of one is freed before the next is built. Each loss is
divided by the totals of the *whole* batch, so that their gradients only have to be summed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from etude.config.training import OptimiserConfig
from etude.errors import DamagedError, DivergedError
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.trainer.eager import EagerAdamW
from etude.trainer.moments import MOMENTS, InFloat32, KeptAdamW, Moments
from etude.trainer.muon import Matrices, Muon, matrices_of
from etude.trainer.parallel import Grid, add_gradients, clip_gradients
from etude.trainer.sharded import is_sharded

MODEL, OPTIMISER = "model", "optimiser"
"""Prefixes of names: ``model/<parameter>`` and ``optimiser/<parameter>/<key>``."""


FINAL_RATE_SHARE = 0.05
"""Share of its peak rate at which a phase ends: with a lower rate the last steps would have no effect."""

RateShape: TypeAlias = Literal["wsd", "cosine", "constant"]
"""Shape after the warm-up: a plateau and a linear decay, half a cosine, or a plateau alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """The learning rate of ``steps`` steps, as a share of its peak.

    - ``wsd``: a plateau, and over the last ``decay_share`` of the steps a linear decay (warmup-stable-decay, arXiv
      2404.06395)
    - ``cosine``: half a cosine from the end of the warm-up to the last step (arXiv 1608.03983, without restarts)
    - ``constant``: a plateau

    A decaying schedule reaches :data:`FINAL_RATE_SHARE` at the last step.
    """

    steps: int
    warmup_steps: int
    """Linear warm-up."""
    decay_share: float = 0.0
    """Share of the steps that decay; only for ``wsd``."""
    shape: RateShape = "wsd"

    def share(self, step: int) -> float:
        """The share at step 1 … ``steps``."""
        warm = min(1.0, step / self.warmup_steps)
        match self.shape:
            case "wsd":
                decay_steps, left = self.decay_share * self.steps, self.steps - step
                if left >= decay_steps:
                    return warm
                return min(warm, FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * left / decay_steps)
            case "cosine":
                done = max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
                return warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * done)) / 2)
            case "constant":
                return warm


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The tokens of each step of a phase: a linear ramp in the tokens read so far, then a plateau.

    Small batches use the first tokens better, when all gradients point the same way; large batches average out the
    noise at the end (the critical batch size grows as the loss falls: arXiv 1812.06162, section 2).
    """

    tokens: int
    """Tokens of the whole phase."""
    first: int
    """Tokens of the first step."""
    last: int
    """Tokens of every step after the ramp."""
    ramp_share: float = 0.0
    """Share of the phase's tokens that the ramp takes."""

    def budgets(self) -> tuple[int, ...]:
        """Tokens of each step, ``tokens`` in total; a remainder too small for its own step is added to the last one."""
        budgets: list[int] = []
        left = self.tokens
        while left:
            budget = self._budget(self.tokens - left)
            if budgets and left < budget:
                budgets[-1] += left
                break
            budgets.append(min(budget, left))
            left -= budgets[-1]
        return tuple(budgets)

    def _budget(self, done: int) -> int:
        """Tokens of the step that begins after ``done`` tokens."""
        ramp = self.ramp_share * self.tokens
        return self.last if done >= ramp else round(self.first + (self.last - self.first) * done / ramp)


@final
class Optimisation:
    """A model with its optimiser, changed one whole step at a time.

    ``optimiser`` is built with the peak rate of each of its groups; ``schedule`` gives the share of it for each step.
    """

    def __init__(
        self,
        model: CausalModel,
        optimiser: torch.optim.Optimizer,
        schedule: RateSchedule,
        *,
        clip_norm: float,
        progress: Callable[[], None] = lambda: None,
        grid: Grid | None = None,
    ) -> None:
        """``progress`` is called after each micro-batch, as a sign of life in a long step. ``grid`` is the device mesh
        that trains the model.
        """
        self.model = model
        self._optimiser = optimiser
        self._moments: Moments = optimiser.moments if isinstance(optimiser, KeptAdamW | Muon) else InFloat32()
        self._peaks = [float(group["lr"]) for group in optimiser.param_groups]
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._progress = progress
        self._copies = grid if grid is not None and not grid.is_sharded else None

    def step(self, step: int, losses: Iterable[Tensor], before_update: Callable[[], None] = lambda: None) -> float:
        """Take step 1, 2, … and return the norm of its gradient before it was clipped.

        ``losses`` are the scalars of the micro-batches, computed lazily. ``before_update`` is called once the gradients
        are complete, right before the weights change. Raises :class:`~etude.errors.DivergedError`, before anything
        changes, if the gradient is not finite.
        """
        self._optimiser.zero_grad()
        for loss in losses:
            loss.backward()
            self._progress()
        if self._copies is not None:
            add_gradients(self.model, self._copies)
        head = self.model.draft
        norm = float(clip_gradients(self.model, self._clip_norm, without=head))
        # A draft head is clipped separately: the policy's step is the same with and without it.
        learnt = head is not None and head.join.grad is not None
        head_norm = float(clip_gradients(head, self._clip_norm)) if head is not None and learnt else 0.0
        if not norm + head_norm < float("inf"):
            raise DivergedError(f"step {step}: the gradient's norm is {norm}; nothing was changed or published")
        share = self._schedule.share(step)
        for group, peak in zip(self._optimiser.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        before_update()
        self._optimiser.step()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, for :mod:`etude.trainer.checkpoint`; sharded as the model
        is.
        """
        tensors = {f"{MODEL}/{name}": tensor for name, tensor in trained_state(self.model).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"{OPTIMISER}/{name}/{key}"] = value
        return tensors

    def reset(self) -> None:
        """Reset the optimiser's moments, after the weights were changed by something other than its steps."""
        self._optimiser.state.clear()

    def like(self, name: str) -> Tensor | None:
        """A tensor with the sharding and device that the saved tensor of this name shall have: the model's, or a
        moment.
        """
        phase, _, rest = name.partition("/")
        owner, _, key = rest.rpartition("/")
        tensor = self.model.state_dict().get(rest if phase == MODEL else owner)
        return tensor if phase == MODEL or tensor is None else self._moments.like(key, tensor)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that :meth:`tensors` returned, sharded as the model is; moments that it lacks are dropped.

        Raises :class:`~etude.errors.DamagedError` if a tensor is missing, has the wrong shape or belongs to another
        model.
        """
        saved, places = _below(tensors, f"{MODEL}/"), trained_state(self.model)
        if strange := sorted(saved.keys() ^ places.keys()):
            raise DamagedError(f"tensor {strange[0]!r} is missing, or another model's: the state does not fit")
        for name, place in places.items():
            if saved[name].shape != place.shape:
                norm, expected = list(saved[name].shape), list(place.shape)
                raise DamagedError(f"tensor {name!r} should be {expected}, it is {norm}")
            with torch.no_grad():
                place.copy_(saved[name])
        self.reset()
        for name, parameter in self.model.named_parameters():
            moments = _below(tensors, f"{OPTIMISER}/{name}/")
            if moments:
                self._optimiser.state[parameter] = {
                    key: self._restored(f"{name}/{key}", value, parameter) for key, value in moments.items()
                }

    def _restored(self, name: str, value: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a saved moment on the device where this optimiser stores it."""
        if value.ndim == 0:
            return value.to(parameter.device, copy=True)  # the count of steps
        place = self._moments.like(name.rpartition("/")[2], parameter)
        if place is None or place.dtype != value.dtype or place.shape != value.shape:
            raise DamagedError(
                f"optimiser tensor {name!r} is {value.dtype} {list(value.shape)}, which this optimiser does not keep: "
                f"continue with the optimiser.state that it was saved with"
            )
        if place.device != parameter.device:
            return place.copy_(value)  # of pinned memory, made for it
        return value.to(parameter.device, copy=True)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name, except frozen ones."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, with the prefix removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def build_optimiser(
    model: CausalModel,
    config: OptimiserConfig,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    draft_learning_rate: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimiser of ``config.kind`` over all trained parameters of ``model``, sharded or not.

    ``learning_rate`` is the peak, scaled group by group; ``betas`` are AdamW's. Weight decay applies to matrices, not
    to gains and biases. With ``muon``, Muon updates the matrices of the blocks and AdamW everything else, at one shared
    rate. AdamW updates a draft head, at its own rate ``draft_learning_rate``. ``config.state`` selects how both store
    their moments.
    """
    matrices: Matrices = {}
    if config.kind == "muon":
        assert isinstance(model, Decoder), "refused with the recipe"
        matrices = matrices_of(model)
    others = [each for each in model.parameters() if each.requires_grad and each not in matrices]
    head = {id(each) for each in model.draft.parameters()} if model.draft is not None else set()
    groups = [
        {"params": group, "weight_decay": decay, "lr": rate}
        for rate, of_head in ((learning_rate, False), (draft_learning_rate, True))
        for decay, is_matrix in ((weight_decay, True), (0.0, False))
        for group in _by_mesh(each for each in others if (each.ndim > 1) is is_matrix and (id(each) in head) is of_head)
    ]
    kind, moments = EagerAdamW if config.state == "fp32" else KeptAdamW, MOMENTS[config.state]()
    adamw = kind(groups, lr=learning_rate, betas=betas, fused=True)
    if isinstance(adamw, KeptAdamW):
        adamw.moments = moments
    if config.kind == "adamw":
        return adamw
    return Muon(matrices, adamw, moments, momentum=config.momentum, weight_decay=weight_decay)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters grouped by their mesh: a fused kernel cannot take experts and other parameters together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    return list(groups.values())
