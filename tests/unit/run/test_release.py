"""The release process and its command: it is killed after every look, and a successor continues."""

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.errors import UserError
from etude.ledger.changes import LOAD
from etude.ledger.ledger import Ledger
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.releases.controller import LoadFacts
from etude.releases.gate import Against, GateFacts, Interval
from etude.releases.states import Release, ReleaseState
from etude.releases.store import ReleaseStore
from etude.routing_table import RoutingTable
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.release import ReleaseProcess
from etude.run.routing_tables import LIST_LOOKS, ROUTING, RoutingTables
from etude.run.weight_log import open_log
from etude.weights.publish import Publisher
from etude.weights.tensors import to_stored

SAME = Interval(value=0.0, low=-0.01, high=0.01)
LESS = Interval(value=-1.0, low=-2.0, high=-0.5)
GOOD = Interval(value=0.5, low=0.4, high=0.6)
SETTINGS = ("release.every_steps=1", "release.canary_shares=[0.5]", "release.min_sessions=20", "release.min_users=10")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", default_recipe([*SETTINGS, "engine.device=cpu", "trainer.device=cpu"]))
    model = Decoder(TINY)
    model.initialise(0, std=0.2)
    save_checkpoint(folder.model, TINY, state_of(model), end_id=1, pad_id=0)
    return folder


def publish(folder: RunFolder, *versions: int, seed: int | None = None) -> None:
    """Publish versions, each with the weights of its own seed."""
    with Publisher(open_log(folder)) as publisher:
        for version in versions:
            model = Decoder(TINY)
            model.initialise(version if seed is None else seed, std=0.2)
            state = to_stored(published_state(model, folder.config().numerics))
            publisher.publish(state, version=version, step=version).result()


async def measured(candidate: Release, live: Release | None) -> GateFacts:
    against = None if live is None else Against(reward=SAME, cost_excess=LESS, latency_excess=LESS)
    return GateFacts(reward=GOOD, tries=10, cheats=0, against=against)


async def unmeasurable(candidate: Release, live: Release | None) -> GateFacts:
    raise UserError("the gate could not measure it")


def look(folder: RunFolder, times: int = 1, measure: object = measured) -> RoutingTable | None:
    """Look ``times`` times, each time with a new process, as if each were killed after its look."""

    async def once() -> None:
        with closing(ReleaseStore.open(folder.ledger)) as store:
            process = ReleaseProcess(folder, store, open_log(folder), store, measure)  # type: ignore[arg-type]
            await process.look()
            await asyncio.sleep(0)  # a measurement is made beside
            await process.look()
            await process.close()

    for _ in range(times):
        asyncio.run(once())
    return RoutingTables.open(folder).newest()


def states(folder: RunFolder) -> dict[int, str]:
    with closing(ReleaseStore.open(folder.ledger)) as store:
        return {release.version: str(release.state) for release in store.releases()}


def tell(folder: RunFolder, table: RoutingTable, control: float, treatment: float) -> None:
    """Record the feedback of 100 users of each arm."""
    assert table.canary is not None
    with closing(ReleaseStore.open(folder.ledger)) as store:
        for arm, mean in ((table.live, control), (table.canary, treatment)):
            for user, value in enumerate(np.linspace(mean - 0.1, mean + 0.1, 100)):
                name = f"{arm.name}-{user}"
                store.add_session(f"{table.generation}-{name}", table.label(arm), name, {"reward": float(value)})


def test_a_version_goes_to_users_and_back_though_the_process_dies_all_the_time(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(run, 0)
    table = look(run, 4)
    assert table is not None
    assert (table.generation, table.live.version, table.canary) == (1, 0, None)
    publish(run, 1)
    table = look(run, 4)
    assert table is not None
    assert table.canary is not None
    assert (table.generation, table.canary.version) == (2, 1)
    tell(run, table, 0.5, 0.6)
    table = look(run)
    assert table is not None
    assert table.fallback is not None
    assert (table.live.version, table.fallback.version) == (1, 0)

    assert main(["release", "rollback", str(run.path), "--by", "ann"]) == 0
    table = look(run)
    assert table is not None
    assert (table.live.version, states(run)) == (0, {0: "released", 1: "rolled_back"})
    assert main(["release", "status", str(run.path)]) == 0
    assert "ann" in capsys.readouterr().out
    assert look(run, 2) == table, "a request is answered once"
    with Ledger.open(run.ledger) as ledger:
        assert '"version": 0' in (ledger.facts.get(LOAD) or "")
    publish(run, 2)
    assert states(run).get(2) is None, "it descends from what was taken back"
    with Ledger.open(run.ledger) as ledger:
        ledger.loads.claim(1)
        ledger.commit_step(1)
    with closing(ReleaseStore.open(run.ledger)) as store:
        assert store.loads() == LoadFacts(version=1)


def test_an_object_that_is_no_table_does_not_stop_a_rollback(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the table could never be written, silently, while the ledger said that the version was taken back."""
    publish(run, 0)
    before = look(run, 4)
    assert before is not None
    tables = RoutingTables.open(run)
    tables.objects.put_if_absent(f"{ROUTING}/{before.generation + 1:012d}", b"half a ta")
    publish(run, 1)
    table = look(run, 4)
    assert table is not None and table.canary is not None
    assert table.generation == before.generation + 2
    assert "000000000002 is not a routing table of this run: look who wrote it, and remove it" in caplog.text
    assert table in [tables.after(before) for _ in range(LIST_LOOKS)]


def test_a_move_without_its_table_is_made_good(run: RunFolder) -> None:
    publish(run, 0)
    look(run, 4)
    publish(run, 1)
    table = look(run, 4)
    assert table is not None
    tables = RoutingTables.open(run)
    tables.objects.delete(*tables.objects.list("routing"))
    again = look(run)
    assert again is not None
    assert again.arms == table.arms


def test_a_candidate_that_cannot_be_measured_meets_no_user(run: RunFolder) -> None:
    publish(run, 0)
    assert look(run, 3, unmeasurable) is None
    assert states(run) == {0: "rejected"}


def test_a_proposal_is_checked_copied_and_loaded_by_the_trainer(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["release", "propose", str(run.path), str(run.model)]) == 0
    look(run)
    with Ledger.open(run.ledger) as ledger:
        load = ledger.loads.claim(1)
    assert load is not None
    assert (Path(str(load["checkpoint"])) / "model.safetensors").is_file()
    assert main(["release", "propose", str(run.path), str(tmp_path)]) == 2
    assert main(["release", "approve", str(run.path), "1"]) == 2
    assert "need no approval" in capsys.readouterr().err
    assert ReleaseState.CANDIDATE not in states(run).values()
