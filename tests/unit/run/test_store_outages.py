"""A run whose weight store is away: all processes wait, report it, and continue with the same bits."""

import asyncio
import os
from contextlib import closing
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from etude.config.loading import default_recipe
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.text import outage_lines
from etude.engines.native.opener import NativeUpdater
from etude.errors import InfrastructureError, UserError
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.run.engine import serve
from etude.run.folder import RunFolder
from etude.run.heartbeat import HEARTBEAT_VARIABLE
from etude.run.numerics import largest_state, load_published, published_state, serving_model
from etude.run.process_name import ENGINE
from etude.run.publishing import WeightPublishing
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import WeightFollower
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog, EventReader
from etude.weights.digest import state_digest
from etude.weights.pull import pull
from etude.weights.tensors import to_stored
from waiting import until

AWAY = InfrastructureError("the store is away")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = default_recipe(["trainer.device=cpu", "engine.device=cpu", "engine.max_running=2"])
    return RunFolder.create(tmp_path / "run", config)


def make_model(seed: int) -> Decoder:
    model = Decoder(TINY)
    model.initialise(seed, std=0.2)
    return model


def messages(folder: RunFolder) -> list[str]:
    """The messages about outages so far."""
    run = RunMetrics()
    for logged in EventReader(folder.events).new():
        run.add(logged)
    return outage_lines(run, 0.0)


def publish(folder: RunFolder, model: Decoder, version: int) -> None:
    save_checkpoint(folder.model, TINY, state_of(model), end_id=1, pad_id=0)
    with (
        EventLog(folder.events, "sft") as events,
        WeightPublishing(open_log(folder), folder.config().name, events) as publishing,
    ):
        publishing.start(published_state(model, folder.config().numerics), version)
        publishing.land()


def test_trainer_and_engine_wait_for_their_store_and_go_on_with_the_same_bits(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = tmp_path / "beats"
    beats.touch()
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(beats))
    os.utime(beats, (1, 1))
    config, model = folder.config(), make_model(0)
    publish(folder, model, 0)
    store, away = Path(folder.store), tmp_path / "away"

    async def play(publishing: WeightPublishing, follower: WeightFollower) -> None:
        with ours, theirs:  # a test that fails is to end
            build = partial(serving_model, TINY, config.numerics, "cpu")
            load = partial(load_published, config=config.numerics)
            updater = NativeUpdater.open(follower.start(), config.engine, build, load)
            store.rename(away)  # noqa: ASYNC240
            publishing.start(published_state(make_model(1), config.numerics), 1)
            following = asyncio.create_task(follower.update(updater))
            await until(lambda: {line.split()[0] for line in messages(folder)} == {"trainer", "engine"})
            assert all(f"waits for {store}" in line for line in messages(folder))
            assert beats.stat().st_mtime > 1, "who waits is alive"
            assert not publishing.is_visible
            assert not following.done()
            assert updater.version == 0, "it serves what it has"
            assert not os.path.lexists(store), "nothing is begun in its place"  # noqa: ASYNC240
            assert await asyncio.to_thread(publishing.land, lambda: _bring_back(away, store)) == 1
            await following
            expected = state_digest(to_stored(published_state(make_model(1), config.numerics)))
            assert (updater.version, updater.engine.weights.digest) == (1, expected)

    with (
        EventLog(folder.events, "trainer") as trainer,
        EventLog(folder.events, "engine") as engine,
        StoreOutages(folder.store, 0.0, trainer) as ours,
        StoreOutages(folder.store, 0.0, engine) as theirs,
        WeightPublishing(open_log(folder, ours), config.name, trainer) as publishing,
        closing(WeightFollower(open_log(folder, theirs), largest_state(TINY))) as follower,
    ):
        asyncio.run(play(publishing, follower))
    assert messages(folder) == [], "everybody knows that it is over"
    assert pull(open_log(folder)).version == 1


def _bring_back(away: Path, store: Path) -> None:
    if away.exists():
        away.rename(store)


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_engine_that_starts_while_the_store_is_away_waits_for_it(
    folder: RunFolder, tmp_path: Path, comes_back: bool
) -> None:
    publish(folder, make_model(0), 0)
    config, store, away = folder.config(), Path(folder.store), tmp_path / "away"
    folder.endpoints.reserve(config)
    store.rename(away)

    async def play() -> None:
        serving = asyncio.create_task(serve(folder, config))
        await until(lambda: serving.done() or bool(messages(folder)))
        assert not serving.done(), serving.exception()
        if comes_back:
            away.rename(store)
            async with aiohttp.ClientSession() as http:
                await until(lambda: serving.done() or not messages(folder))
                assert await _is_served(http, folder.endpoints.url(ENGINE), serving)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled(), "who is told to stop waits no longer"

    asyncio.run(play())


async def _is_served(http: aiohttp.ClientSession, url: str, serving: "asyncio.Task[None]") -> bool:
    """Return true when an engine answers at the URL; false if the server ended."""
    while not serving.done():
        try:
            async with http.get(f"{url}/health"):
                return True
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)
    return False


def test_an_outage_that_a_recipe_bounds_ends_the_run_with_what_is_wrong(folder: RunFolder) -> None:
    Path(folder.store).rmdir()
    with (
        StoreOutages(folder.store, 0.3) as outages,
        pytest.raises(UserError, match=r"has been unavailable for .* \(rollouts.max_outage_s = 0.3\): .*no folder"),
    ):
        open_log(folder, outages).latest()
    with pytest.raises(UserError, match="there is no folder"):
        open_log(folder)  # a person's command waits for nothing


def test_no_one_waits_any_more_once_a_process_ends(folder: RunFolder) -> None:
    outages = StoreOutages(folder.store, 0.0)
    outages.close()
    with pytest.raises(InfrastructureError, match="is away"):
        outages.failed(AWAY, again=False)


def test_an_outage_lasts_for_as_long_as_any_call_waits(folder: RunFolder) -> None:
    """A store that can be read and not written answers some calls all the time."""
    signs = list[None]()
    with (
        EventLog(folder.events, "trainer") as events,
        StoreOutages(folder.store, 0.0, events, lambda: signs.append(None)) as outages,
    ):
        outages.failed(AWAY, again=False)
        assert not messages(folder), "one failed try is no outage"
        outages.failed(AWAY, again=False)
        outages.succeeded()
        assert len(messages(folder)) == 1
        outages.succeeded()
        assert not messages(folder)
    assert len(signs) == 2
