"""One optimiser step, the same in every phase: gradients of all pieces, clipped, checked, applied at the step's rate.

    zero ──▶ loss, backward, loss, backward, … ──▶ norm, clip ──▶ finite? ──▶ rate ──▶ before_update ──▶ update

Owns the model's weights, the optimiser's moments, and all that the next step depends on by name. Not what is learnt
from: losses come from outside, one piece of the batch at a time, so that the graph of one is gone before the next is
built. Each is divided by the totals of the *whole* batch, so that their gradients only have to be added up.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from etude.errors import DamagedError, DivergedError
from etude.models.decoder import Decoder
from etude.trainer.parallel import clip_gradients
from etude.trainer.schedule import RateSchedule

MODEL, OPTIMISER = "model", "optimiser"
"""What names begin with: ``model/<parameter>`` and ``optimiser/<parameter>/<key>``."""


@final
class Optimisation:
    """A model and its optimiser, changed one whole step at a time.

    ``optimiser`` was built with the peak rate of each of its groups; ``schedule`` says which share of it a step takes.
    """

    def __init__(
        self,
        model: Decoder,
        optimiser: torch.optim.Optimizer,
        schedule: RateSchedule,
        *,
        clip_norm: float,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``progress`` is called behind each piece of a batch: a step may take long, and is alive all the while."""
        self.model = model
        self._optimiser = optimiser
        self._peaks = [float(group["lr"]) for group in optimiser.param_groups]
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._progress = progress

    def step(self, step: int, losses: Iterable[Tensor], before_update: Callable[[], None] = lambda: None) -> float:
        """Take step 1, 2, … and return the norm of its gradient before it was clipped.

        ``losses`` are the scalars of the batch's pieces, computed when they are asked for. ``before_update`` is called
        when the gradients are there and the weights are about to change. Raises
        :class:`~etude.errors.DivergedError`, before anything changed, when the gradient is not finite.
        """
        self._optimiser.zero_grad()
        for loss in losses:
            loss.backward()
            self._progress()
        norm = float(clip_gradients(self.model, self._clip_norm))
        if not norm < float("inf"):
            raise DivergedError(f"step {step}: the gradient's norm is {norm}; nothing was changed or published")
        share = self._schedule.share(step)
        for group, peak in zip(self._optimiser.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        before_update()
        self._optimiser.step()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, for :mod:`etude.trainer.checkpoint`; sharded if it is."""
        tensors = {f"{MODEL}/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"{OPTIMISER}/{name}/{key}"] = value
        return tensors

    def like(self, name: str) -> Tensor | None:
        """The model's tensor that a saved one of this name is, or belongs to as a moment of it."""
        phase, _, rest = name.partition("/")
        return self.model.state_dict().get(rest if phase == MODEL else rest.rpartition("/")[0])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` returned, sharded as the model is.

        Raises :class:`~etude.errors.DamagedError` on a missing or misshapen tensor, and on one of another model.
        """
        saved, places = _below(tensors, f"{MODEL}/"), self.model.state_dict()
        if strange := sorted(saved.keys() ^ places.keys()):
            raise DamagedError(f"tensor {strange[0]!r} is missing, or another model's: the state does not fit")
        for name, place in places.items():
            if saved[name].shape != place.shape:
                found, expected = list(saved[name].shape), list(place.shape)
                raise DamagedError(f"tensor {name!r} should be {expected}, it is {found}")
            with torch.no_grad():
                place.copy_(saved[name])
        for name, parameter in self.model.named_parameters():
            moments = _below(tensors, f"{OPTIMISER}/{name}/")
            if moments:
                self._optimiser.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in moments.items()
                }


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
