"""Two processes train a model of transformers as one does, and publish the same tensors."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from etude.config.training import OptimiserConfig, ParallelConfig
from etude.models.checkpoint import StoredCheckpoint, fill, state_of
from etude.models.hf import make_causal_model
from etude.trainer.parallel import Grid, materialise, parallelise
from trainer_ranks import run_ranks, train, whole_model

pytestmark = pytest.mark.heavy("several processes that import transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gemma2": partial(transformers.Gemma2Config, **SIZES, sliding_window=4),  # tied, padded rows
    "mixtral": partial(transformers.MixtralConfig, **SIZES, num_local_experts=4, num_experts_per_tok=2),
}
STEPS = 3


def curves(rank: int, folder: Path) -> None:
    """Train on two ranks, which gather at most one block at a time, and write the losses and weights."""
    for family in CONFIGS:
        stored = StoredCheckpoint(folder / family, "hf")
        with torch.device("meta"):
            model = make_causal_model(stored.spec)
        grid = Grid.open(ParallelConfig(dp=2), "cpu")

        def fill_in(part: torch.nn.Module, stored: StoredCheckpoint = stored) -> None:
            materialise(part, "cpu")
            fill(part, stored.read)

        parallelise(model, grid, fill_in)
        model.recompute = family == "mixtral"
        curve = train(model, grid, OptimiserConfig(), STEPS)
        whole = whole_model(model, keep=rank == 0)
        if whole is not None:
            (folder / f"{family}.json").write_text(json.dumps(curve))
            torch.save(state_of(whole), folder / f"{family}.pt")


def test_two_ranks_are_one(tmp_path: Path) -> None:
    for family, config in CONFIGS.items():
        torch.manual_seed(0)
        factory: Any = transformers.AutoModelForCausalLM
        factory.from_config(config(initializer_range=0.2)).save_pretrained(tmp_path / family)
    run_ranks(2, curves, tmp_path)
    for family in CONFIGS:
        stored = StoredCheckpoint(tmp_path / family, "hf")
        model = make_causal_model(stored.spec)
        stored.load(model)
        curve = train(model, None, OptimiserConfig(), STEPS)
        torch.testing.assert_close(
            torch.tensor(curve),
            torch.tensor(json.loads((tmp_path / f"{family}.json").read_text())),
            atol=1e-4,
            rtol=1e-4,
        )
        published = torch.load(tmp_path / f"{family}.pt")
        assert published.keys() == state_of(model).keys()
        for name, tensor in state_of(model).items():
            torch.testing.assert_close(published[name], tensor, atol=2e-3, rtol=1e-3)
