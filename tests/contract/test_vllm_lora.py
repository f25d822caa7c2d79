"""Real vLLM with adapters: each published adapter is loaded while it serves, and samples as the trainer computes."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config.loading import parse_config
from etude.engines.kinds import WeightUpdate
from etude.engines.vllm.opener import open_vllm
from etude.models.adapters import ABOUT
from etude.models.checkpoint import load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import GroupedSpec, ModelSpec
from etude.protocols import SamplingParams
from etude.run.numerics import FrozenBase, engine_context, published_state, training_model
from etude.telemetry.log import EventLog
from etude.types import Floats
from etude.weights.digest import state_digest
from etude.weights.replica import PulledWeights
from etude.weights.tensors import to_stored

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ETUDE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
TOLERANCE = 1e-4
"""Largest difference of two float32 logprobs whose sums were made in another order."""
PROMPT = [5, 6, 7, 8]
DENSE = ModelSpec(
    vocab_size=320,
    hidden_size=64,
    layers=2,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=32, normed=True),
    dense_size=96,
)
pytestmark = pytest.mark.heavy("vLLM: make .venv-vllm/stamp", missing=not PYTHON.exists())


def test_vllm_serves_each_published_adapter_while_it_serves(tmp_path: Path) -> None:
    spec = DENSE
    model = Decoder(spec)
    model.initialise(0, std=0.2)
    save_checkpoint(tmp_path / "model", spec, state_of(model), end_id=0, pad_id=0)
    recipe = {
        "model": {"checkpoint": str(tmp_path / "model")},
        "midtrain": {"tokens": 0},
        "numerics": {"dtype": "float32", "arithmetic": "fast", "replay": "off"},
        "engine": {"kind": "vllm", "device": "cpu", "max_length": 256, "max_running": 8},
        "lora": {"rank": 8, "alpha": 16.0},
    }
    config = parse_config(recipe, source="test")
    base = FrozenBase(tmp_path / "model", config)
    policy = training_model(spec, config.numerics, "cpu", base)
    events = EventLog(tmp_path / "events", "engine")
    context = engine_context(config, spec, model_folder=tmp_path / "model", logs=tmp_path, events=events, base=base)

    def version(number: int) -> PulledWeights:
        """The adapter of a version; 0 changes nothing."""
        generator = torch.Generator().manual_seed(number)
        state = state_of(policy)
        if number:
            moved = {key: torch.randn(each.shape, generator=generator) * 0.1 for key, each in state.items()}
            load_state(policy, moved | {key: state[key] for key in ABOUT})
        stored = to_stored({key: each.clone() for key, each in published_state(policy, config.numerics).items()})
        return PulledWeights(version=number, digest=state_digest(stored), state=stored)

    def expected(token_ids: list[int]) -> Floats:
        ids = torch.tensor([*PROMPT, *token_ids])
        with torch.inference_mode():
            logprobs = policy.logits(policy.forward_packed(ids)).log_softmax(-1)
        scores: Floats = logprobs[:-1].gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0].numpy()
        return scores

    async def play() -> None:
        first = version(0)
        params = SamplingParams(max_tokens=24, seed=1)
        async with open_vllm(context, first) as served:
            for number in range(3):
                if number:
                    update = WeightUpdate(weights=version(number), changed=None)
                    early = asyncio.create_task(served.engine.generate(PROMPT, params, session=""))
                    await asyncio.sleep(0)
                    await served.updater.stage(update)()
                    assert len(set((await early).versions.tolist())) == 1
                completion = await served.engine.generate(PROMPT, params, session="")
                assert set(completion.versions.tolist()) == {number}
                difference = np.abs(completion.logprobs - expected(completion.token_ids.tolist())).max()
                assert difference < TOLERANCE, f"version {number}"
                assert (await served.engine.health()).version == number

    asyncio.run(play())
