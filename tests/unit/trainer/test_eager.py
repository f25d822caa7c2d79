"""The start of a training process: torch's compiler and sharding stay out of it, and numbers are those of torch."""

import subprocess
import sys

import torch

from etude.trainer.eager import EagerAdamW

STEP = """
import sys
import torch
from etude.config.loading import default_recipe
from etude.models.checkpoint import spec_from_shape
from etude.models.decoder import Decoder
from etude.run.phases import run_phase
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser

config = default_recipe(["model.shape.hidden_size=32", "model.shape.layers=1", "model.shape.heads=2",
                         "model.shape.kv_heads=2", "model.shape.head_dim=16"])
model = Decoder(spec_from_shape(config.model.shape, 300))
model.initialise(0)
for kind in ("adamw", "muon"):
    for state in ("fp32", "8bit"):
        settings = config.optimiser.model_copy(update={"kind": kind, "state": state})
        optimiser = build_optimiser(model, settings, learning_rate=0.1, betas=(0.9, 0.99))
        optimisation = Optimisation(model, optimiser, RateSchedule(steps=1, warmup_steps=1), clip_norm=1.0)
        optimisation.step(1, [sum(parameter.square().sum() for parameter in model.parameters())])
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules])
"""
"""A process with all imports of a phase, and one step of each optimiser."""


def test_a_step_loads_neither_compiler_nor_sharding() -> None:
    result = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_steps_are_those_of_torch() -> None:
    ended = []
    for kind in (EagerAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(20, 20))
        optimiser = kind([parameter], lr=0.1, fused=True)
        for _ in range(3):
            optimiser.zero_grad()
            parameter.pow(3).sum().backward()
            optimiser.step()
        ended.append(parameter.detach())
    assert torch.equal(*ended)
