"""Router replay: the engine's routes of a micro-batch, for one forward pass of the trainer.

Owns the choice of tokens to replay. :class:`~etude.models.experts.Routing` applies it in the router, including floor
and gates.

Completion-only replay fixes the routes of the tokens that predicted sampled ones, which the loss depends on, and uses
the live router for their context. Full replay (R3, arXiv 2510.11370) also fixes the context, and needs all of its
routes.

Shape legend: T tokens of a micro-batch, L of one trajectory, S sparse layers, k experts per token.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.models.experts import Routing
from etude.types import NO_ROUTE, Mask, Trajectory

ReplayMode: TypeAlias = Literal["off", "completion", "full"]


def replayed_rows(trajectory: Trajectory, mode: ReplayMode) -> Mask:
    """[L] mask of tokens whose routes are replayed; excludes tokens without recorded routes."""
    length = len(trajectory.token_ids)
    match mode:
        case "off":
            return np.zeros(length, np.bool_)
        case "completion":
            return producers(trajectory.loss_mask)
        case "full":
            return np.ones(length, np.bool_)


def producers(sampled_L: Mask) -> Mask:
    """[L] mask of the tokens before sampled ones: their forward passes gave the logits of these."""
    return np.append(sampled_L[1:], False)


def routing_of(
    trajectories: Sequence[Trajectory], mode: ReplayMode, floor: float, device: torch.device
) -> Routing | None:
    """Routing of a forward pass of ``trajectories``; ``None``: the live router. Raises as :func:`replay` does."""
    if mode == "off":
        return None
    routes = replay([(trajectory, replayed_rows(trajectory, mode)) for trajectory in trajectories], device)
    return Routing(replay=routes, floor=floor)


def replay(rows: Sequence[tuple[Trajectory, Mask]], device: torch.device) -> Tensor | None:
    """int64 [T,S,k], trajectory by trajectory: the routes of the tokens whose mask is true, else ``NO_ROUTE``.

    ``None`` if no trajectory has routes. Raises ``ValueError`` if they have routes of different shapes.
    """
    shapes = {trajectory.routes.shape[1:] for trajectory, _ in rows if trajectory.routes is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"a micro-batch has routes of different shapes {shapes}: of which model?")
    routes_TSk = np.full((sum(len(mask_L) for _, mask_L in rows), *shapes.pop()), NO_ROUTE, np.uint16)
    start = 0
    for trajectory, mask_L in rows:
        if trajectory.routes is not None:
            routes_TSk[start : start + len(mask_L)][mask_L] = trajectory.routes[mask_L]
        start += len(mask_L)
    # They are sent with two bytes per expert, as int16 because torch hardly supports uint16.
    narrow = torch.from_numpy(routes_TSk.view(np.int16)).to(device)
    return narrow.long() & NO_ROUTE
