"""An engine that follows a log holds every version bit for bit, however little or much changed."""

import pytest
import torch

from etude.config import EngineConfig
from etude.engines.native import NativeEngine
from etude.models.checkpoint import state_of
from etude.models.qwen3_moe import TINY, Qwen3Moe
from etude.run.following import WeightFollower
from etude.run.states import to_stored
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.store import ObjectStore

SPARSE, DENSE = 0.01, 0.9


def train(model: Qwen3Moe, share: float, seed: int) -> None:
    """Change about ``share`` of the weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.copy_(torch.where(chosen, parameter * 1.02 + 1e-3, parameter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare", [True, False])
def test_every_version_is_served_bit_for_bit(spare: bool, dtype: torch.dtype) -> None:
    trained = Qwen3Moe(TINY)
    trained.initialise(0)
    trained = trained.to(dtype)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        follower = WeightFollower(log, TINY, "cpu", spare=spare)
        engine = NativeEngine(follower.start(), EngineConfig(slots=2), seed=0)
        for version, share in enumerate([SPARSE, SPARSE, DENSE, SPARSE, DENSE, DENSE, SPARSE, 0.0, SPARSE], start=1):
            train(trained, share, version)
            stored = to_stored(state_of(trained))
            publication = publisher.publish(stored, version=version, step=version)
            publication.result()
            weights, scatters = follower.stage()
            assert bool(scatters) is not spare, "with a spare there is nothing to write in the pause"
            assert follower.swap_into(engine, weights, scatters) >= 0
            if version % 2:
                follower.settle()
            assert engine.weights.version == version
            assert engine.weights.digest == state_digest(stored)
            assert state_digest(to_stored(state_of(engine.weights.model))) == state_digest(stored)
        follower.close()


def test_versions_that_were_skipped_are_caught_up_with() -> None:
    trained = Qwen3Moe(TINY)
    trained.initialise(0)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        follower = WeightFollower(log, TINY, "cpu", spare=True)
        engine = NativeEngine(follower.start(), EngineConfig(slots=2), seed=0)
        for version in range(1, 10):
            train(trained, SPARSE, version)
            stored = to_stored(state_of(trained))
            publisher.publish(stored, version=version, step=version).result()
            if version % 3 == 0:
                follower.swap_into(engine, *follower.stage())
                assert state_digest(to_stored(state_of(engine.weights.model))) == state_digest(stored)
        follower.close()
