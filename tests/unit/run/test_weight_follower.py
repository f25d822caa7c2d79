"""An engine that follows a log holds every version bit for bit, however little or much changed."""

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch

from etude.config.inference import EngineConfig, NativeOptions, NumericsConfig
from etude.engines.native.opener import NativeUpdater, ResidentModel
from etude.errors import DamagedError, InfrastructureError
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.models.spec import TINY, TINY_LATENT, ModelSpec
from etude.objects import ObjectStore, RetryingStore
from etude.run.numerics import largest_state, load_published, published_state, serving_model, training_model
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import WeightFollower
from etude.telemetry.log import EventLog
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from etude.weights.records import commit_key, pack_key
from etude.weights.replica import PulledWeights
from etude.weights.tensors import to_stored
from waiting import until

SPARSE, DENSE = 0.01, 0.9
FLOAT32 = NumericsConfig(dtype="float32")
ALONE = PublishOptions(compact=False, anchor_every=0)
"""A chain in which no other way leads around a link."""
ExpertsFormat = Literal["fp8", "mxfp8", "nvfp4"]


def train(model: CausalModel, share: float, seed: int) -> None:
    """Change about ``share`` of the weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in state_of(model).values():
            chosen = torch.rand(weights.shape, generator=generator) < share
            weights.copy_(torch.where(chosen, weights * 1.02 + 1e-3, weights))


def numerics_of(dtype: torch.dtype) -> NumericsConfig:
    return NumericsConfig(dtype="float32" if dtype is torch.float32 else "bfloat16")


def open_engine(
    pulled: PulledWeights, *, spare: bool, numerics: NumericsConfig = FLOAT32, spec: ModelSpec = TINY
) -> NativeUpdater:
    config = EngineConfig(max_running=2, options=NativeOptions(spare_weights=spare))
    make_model, load = partial(serving_model, spec, numerics, "cpu"), partial(load_published, config=numerics)
    return NativeUpdater.open(pulled, config, make_model, load)


def test_a_named_version_is_served_and_an_older_one_again_when_that_is_named(tmp_path: Path) -> None:
    model, named, digests = training_model(TINY, FLOAT32, "cpu"), [1], []
    log = WeightLog(ObjectStore(str(tmp_path)))
    with Publisher(log, ALONE) as publisher:
        for version in range(3):
            train(model, SPARSE, version)
            state = to_stored(published_state(model, FLOAT32))
            digests.append(publisher.publish(state, version=version, step=version).result().digest)

    async def follow() -> None:
        with closing(WeightFollower(log, largest_state(TINY), lambda: named[0])) as follower:
            updater = open_engine(follower.start(), spare=True)
            for version in (1, 2, 1, 0):
                named[0] = version
                if updater.version != version:
                    await follower.update(updater)
                assert (updater.version, state_in(updater)) == (version, digests[version])

    asyncio.run(follow())


def state_in(updater: NativeUpdater) -> str:
    """The digest of the served weights, computed anew."""
    return state_digest(to_stored(state_of(updater.engine.weights.model)))


@pytest.mark.parametrize("spec", [TINY, TINY_LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare", [True, False])
def test_every_version_is_served_bit_for_bit(spare: bool, dtype: torch.dtype, spec: ModelSpec) -> None:
    trained = Decoder(spec)
    trained.initialise(0)
    trained = trained.to(dtype)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        follower = WeightFollower(log, largest_state(spec))
        updater = open_engine(follower.start(), spare=spare, numerics=numerics_of(dtype), spec=spec)
        for version, share in enumerate([SPARSE, SPARSE, DENSE, SPARSE, DENSE, DENSE, SPARSE, 0.0, SPARSE], start=1):
            train(trained, share, version)
            stored = to_stored(state_of(trained))
            publisher.publish(stored, version=version, step=version).result()
            stage_s, pause_s = asyncio.run(follower.update(updater))
            assert stage_s > 0 and pause_s >= 0
            if version % 2:
                updater.settle()
            assert updater.version == version
            assert updater.engine.weights.digest == state_in(updater) == state_digest(stored)
        follower.close()


def test_versions_that_were_skipped_are_caught_up_with() -> None:
    trained = Decoder(TINY)
    trained.initialise(0)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        follower = WeightFollower(log, largest_state(TINY))
        updater = open_engine(follower.start(), spare=True)
        for version in range(1, 10):
            train(trained, SPARSE, version)
            stored = to_stored(state_of(trained))
            publisher.publish(stored, version=version, step=version).result()
            if version % 3 == 0:
                asyncio.run(follower.update(updater))
                assert state_in(updater) == state_digest(stored)
        follower.close()


@pytest.mark.parametrize("spare", [True, False])
def test_a_store_that_fails_in_the_middle_of_the_way_costs_nothing_but_time(
    tmp_path: Path, spare: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Decoder(TINY)
    trained.initialise(0)
    log = WeightLog(RetryingStore(str(tmp_path), lambda: ObjectStore(str(tmp_path)), StoreOutages(str(tmp_path), 0.0)))

    async def play() -> None:
        follower = WeightFollower(log, largest_state(TINY))
        updater = open_engine(follower.start(), spare=spare)
        for version in (1, 2):
            train(trained, SPARSE, version)
            record = publisher.publish(to_stored(state_of(trained)), version=version, step=version).result()
        place = tmp_path / pack_key(record.packs[0].digest)
        data = place.read_bytes()
        place.unlink()
        place.symlink_to(place)  # cannot be read, and is not missing
        moving = asyncio.create_task(follower.update(updater))
        await until(lambda: "is unavailable, waiting for it" in caplog.text)
        assert updater.version == 0
        place.unlink()
        place.write_bytes(data)
        await moving
        assert updater.version == 2
        assert state_in(updater) == state_digest(to_stored(state_of(trained)))
        follower.close()

    with Publisher(log, ALONE) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        asyncio.run(play())


@pytest.mark.parametrize("broken", ["pack", "record"])
@pytest.mark.parametrize("spare", [True, False])
def test_behind_a_broken_chain_a_full_snapshot_is_requested_and_followed(
    tmp_path: Path, spare: bool, broken: str
) -> None:
    trained = Decoder(TINY)
    trained.initialise(0)
    log = WeightLog(ObjectStore(str(tmp_path / "store")))

    async def play() -> None:
        follower = WeightFollower(log, largest_state(TINY))
        updater = open_engine(follower.start(), spare=spare)
        train(trained, SPARSE, 1)
        record = publisher.publish(to_stored(state_of(trained)), version=1, step=1).result()
        key = pack_key(record.packs[0].digest) if broken == "pack" else commit_key(1)
        (tmp_path / "store" / key).write_bytes(b"not what was written")
        with EventLog(tmp_path / "events", "engine") as events:
            following = asyncio.create_task(follower.follow(updater, events))
            await until(lambda: following.done() or bool(log.store.list("full-requests")))
            assert not following.done(), following.exception()
            assert updater.version == 0
            train(trained, SPARSE, 2)
            stored = to_stored(state_of(trained))
            assert publisher.publish(stored, version=2, step=2).result().base is None, "a request is answered whole"
            await until(lambda: following.done() or updater.version == 2)
            assert state_in(updater) == state_digest(stored)
            following.cancel()
            await asyncio.wait([following])
        follower.close()

    with Publisher(log, ALONE) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
        asyncio.run(play())


def test_an_engine_does_not_start_on_a_broken_chain(tmp_path: Path) -> None:
    """Its version may be older than admission allows: no step would be trained, no full snapshot published."""
    trained = Decoder(TINY)
    trained.initialise(0)
    log = WeightLog(ObjectStore(str(tmp_path)))
    with Publisher(log, ALONE) as publisher:
        for version in range(4):
            train(trained, SPARSE, version)
            record = publisher.publish(to_stored(state_of(trained)), version=version, step=version).result()
            if version == 2:
                (tmp_path / pack_key(record.packs[0].digest)).unlink()
    refused = pytest.raises(DamagedError, match=r"version 3 cannot be reached.*run `etude weights verify`")
    with closing(WeightFollower(log, largest_state(TINY))) as follower, refused:
        follower.start()


def test_resident_weights_that_are_not_those_of_their_version_end_the_process_to_be_started_again() -> None:
    trained = Decoder(TINY)
    trained.initialise(0)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(state_of(trained)), version=0, step=0).result()
    model = serving_model(TINY, FLOAT32, "cpu")
    resident = ResidentModel(model, partial(load_published, model, config=FLOAT32), pull(log))
    with torch.no_grad():
        next(resident.model.parameters()).add_(1)
    with pytest.raises(InfrastructureError, match="loads it anew"):
        resident.prove(0, pull(log).digest)


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("spare", [True, False])
def test_quantised_experts_are_served_as_the_trainer_rounds_them(spare: bool, form: ExpertsFormat) -> None:
    numerics = NumericsConfig(dtype="bfloat16", experts=form)
    trained = training_model(TINY, numerics, "cpu")
    assert isinstance(trained, Decoder)
    trained.initialise(0)
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        publisher.publish(to_stored(published_state(trained, numerics)), version=0, step=0).result()
        follower = WeightFollower(log, largest_state(TINY))
        updater = open_engine(follower.start(), spare=spare, numerics=numerics)
        for version, share in enumerate([SPARSE, DENSE, SPARSE], start=1):
            train(trained, share, version)
            stored = to_stored(published_state(trained, numerics))
            publisher.publish(stored, version=version, step=version).result()
            asyncio.run(follower.update(updater))
            ids = torch.arange(40)
            with torch.no_grad():
                ours, theirs = (m.logits(m.forward_packed(ids)) for m in (trained, updater.engine.weights.model))
            assert torch.equal(ours, theirs)
        follower.close()
