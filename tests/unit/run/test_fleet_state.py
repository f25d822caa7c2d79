"""A fleet's state in stores: the newest signed generation counts, and a region without a link uses its copy."""

from dataclasses import replace
from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.config.training import ParallelConfig
from etude.errors import InfrastructureError, RunFolderError
from etude.fleet.specs import ProcessStatus
from etude.fleet.state import Desired, Observed, lasting_changes
from etude.objects import ObjectStore
from etude.run import fleet_state
from etude.run.fleet_plan import plan_loop
from etude.run.fleet_state import FleetObjects, FleetState
from faulty_store import Failure, FaultyStore
from waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "fleet" / "thousand-machines.toml"
SEEN = Observed(generation=1, host="m", statuses={"serve": ProcessStatus(incarnation="a", pid=1, memory_bytes=5)})


def fleet(engines: int) -> FleetConfig:
    whole = load_fleet(EXAMPLE)
    home, first, *others = whole.regions
    return whole.model_copy(update={"regions": (home, first.model_copy(update={"engines": engines}), *others)})


def desired(engines: int) -> Desired:
    config = RunConfig(parallel=ParallelConfig(dp=1024))
    return Desired(fleet=fleet(engines), specs=plan_loop(config, fleet(engines), "s3://acme/run"))


def objects(store: FaultyStore | None = None, key: str = "key") -> FleetObjects:
    return FleetObjects(store or FaultyStore(ObjectStore("memory://")), key)


def test_what_is_written_is_read_again() -> None:
    state = desired(100)
    assert len(state.specs) > 500
    assert Desired.parse(state.dump()) == state
    assert Observed.parse(SEEN.dump()) == SEEN
    for parse in (Desired.parse, Observed.parse):
        with pytest.raises(ValueError, match=r"no (desired|observed) state"):
            parse(b"{}")


def test_a_state_is_declared_once_and_counts_only_if_the_run_signed_it() -> None:
    store = FaultyStore(ObjectStore("memory://"))
    home = objects(store)
    assert [home.declare(desired(engines)) for engines in (100, 100, 101, 101)] == [1, 1, 2, 2]
    assert home.desired(2) == desired(101)
    objects(store, "another key").copy(3, desired(102))
    region = FleetState(objects(), home)
    with pytest.raises(RunFolderError, match="00000003 is not signed with the key of this run"):
        region.follow_desired()
    assert region.changed() is None


def test_a_region_that_is_cut_off_begins_with_its_copy_and_follows_when_it_is_back() -> None:
    far, own = FaultyStore(ObjectStore("memory://")), objects()
    home = objects(far)
    home.declare(desired(100))
    first = FleetState(own, home)
    first.follow_desired()
    assert first.changed() == desired(100) and first.changed() is None
    far.fail({0: Failure.GONE})
    successor = FleetState(own, home)
    with pytest.raises(InfrastructureError):
        successor.follow_desired()
    assert successor.changed() == desired(100)
    far.fail({})
    home.declare(desired(101))
    successor.follow_desired()
    assert successor.changed() == desired(101)
    assert own.generation() == 2


def test_stray_objects_stop_no_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a stray object in the store, the supervisor never saw a change or a drained process again."""
    monkeypatch.setattr(fleet_state, "FOLLOW_S", 0.01)
    store = FaultyStore(ObjectStore("memory://"))
    for key in ("desired/notes.txt", "observed/x.tmp", "observed/zz"):
        store.put_if_absent(key, b"")
    own = objects(store)
    with FleetState(own) as state:
        state.report(SEEN.statuses)
        state.start()
        own.declare(desired(100))
        own.drain("serve-1")
        wait_until(lambda: state.desired == desired(100) and state.drained == {"serve-1"})
        wait_until(lambda: own.observed() is not None)
    seen = own.observed()
    assert seen is not None and seen[0].statuses == SEEN.statuses
    assert store.exists("observed/x.tmp")


def test_observed_state_is_written_when_something_changed() -> None:
    own = objects()
    state = FleetState(own)
    own.declare(desired(100))
    state.follow_desired()
    state.changed()
    assert own.observed() is None
    for memory_bytes, pid in ((5, 1), (6, 1), (7, 2)):
        status = ProcessStatus(incarnation=str(pid), pid=pid, memory_bytes=memory_bytes)
        state.report({"serve": status})
        state.follow_near()
    observed = own.observed()
    assert observed is not None and observed[0].statuses["serve"].memory_bytes == 7 and observed[1] < 60
    assert own.objects.list("observed") == ["observed/000000000002"]


def test_what_cannot_change_while_a_run_lives_is_named() -> None:
    before = fleet(100)
    assert lasting_changes(before, fleet(200)) == []
    moved = before.regions[1].model_copy(update={"store": "s3://elsewhere"})
    changed = before.model_copy(update={"regions": (before.regions[0], moved, *before.regions[2:]), "launcher": "ray"})
    assert lasting_changes(before, changed) == ["launcher", "regions[].name and .store"]
    assert replace(SEEN, statuses={}).shape != SEEN.shape
