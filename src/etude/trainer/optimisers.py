"""Which optimiser trains which parameter of a model.

Owns the choice and its groups. Steps, gradients and learning rates over time are their caller's; Muon itself is
:mod:`etude.trainer.muon`'s. What it returns is a ``torch.optim.Optimizer``: groups have an ``lr`` to set, ``state`` has
tensors to save.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from etude.config.training import OptimiserConfig
from etude.models.decoder import Decoder
from etude.trainer.muon import Muon, matrices_of


def build_optimiser(
    model: Decoder,
    config: OptimiserConfig,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimiser of ``config.kind`` over all parameters of ``model``, sharded or not.

    ``learning_rate`` is the peak, to be scaled group by group; ``betas`` are AdamW's. Matrices decay, gains and biases
    do not. With ``muon`` the matrices of the blocks are Muon's, everything else is AdamW's; the two share one rate.
    """
    matrices = matrices_of(model) if config.kind == "muon" else {}
    others = [parameter for parameter in model.parameters() if parameter not in matrices]
    groups = [
        {"params": group, "weight_decay": decay}
        for decay, chosen in (
            (weight_decay, [parameter for parameter in others if parameter.ndim > 1]),
            (0.0, [parameter for parameter in others if parameter.ndim <= 1]),
        )
        for group in _by_mesh(chosen)
    ]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    if config.kind == "adamw":
        return adamw
    return Muon(matrices, adamw, momentum=config.momentum, weight_decay=weight_decay)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters in groups that live on one mesh each: a fused kernel cannot take experts and the rest together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())
