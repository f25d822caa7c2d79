"""The choice of an optimiser: by default AdamW over everything, to the last bit as torch has it."""

import torch

from etude.config.training import OptimiserConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.trainer.optimisation import build_optimiser


def test_adamw_is_torchs_with_gains_that_do_not_decay() -> None:
    ours, theirs = Decoder(TINY), Decoder(TINY)
    for model in (ours, theirs):
        model.initialise(0)
    mine = build_optimiser(ours, OptimiserConfig(), learning_rate=1e-2, betas=(0.9, 0.98), weight_decay=0.05)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    gains = [p for p in theirs.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), fused=True)
    for step in range(3):
        for model, optimiser in ((ours, mine), (theirs, torchs)):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
