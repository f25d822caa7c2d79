"""A chaos run ends a run that makes no progress or fails, reports a finding, and leaves no process behind."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.audit import Wrong
from bench.faults.bench import recipe
from bench.faults.chaos_run import Bounds, ChaosRun, RunLog
from bench.faults.injector import LAUNCH_S, Injector, NoVictim, Site, damageable
from bench.faults.machine import Machine, compile_preload, missing
from bench.faults.schedule import Fault, FaultSchedule, Kind
from bench.faults.supervisor import Supervisor
from bench.usage import age_s, command_line, descendants
from etude.run.folder import RunFolder

pytestmark = pytest.mark.heavy("a C compiler", missing=missing() is not None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_preload(tmp_path_factory.mktemp("preload"))


@pytest.fixture
def site(library: Path, tmp_path: Path) -> Iterator[Site]:
    machine = Machine(tmp_path / "run", tmp_path / "run" / "store", tmp_path / "page", library)
    yield Site(machine=machine, links={}, database=None)
    machine.close()


def run_under_fire(folder: RunFolder, site: Site, bounds: Bounds) -> RunLog:
    supervisor = Supervisor(folder, folder.path.with_name("log"), site.machine.environment)
    injector = Injector(folder, site, supervisor)
    run_log = ChaosRun(FaultSchedule(number=0, faults=()), folder, supervisor, injector, bounds).run()
    assert not run_log.finished
    assert {finding.wrong for finding in run_log.findings} == {Wrong.UNBOUNDED_WAITS}
    return run_log


def test_a_run_that_stands_still_is_found_and_ended(site: Site, tmp_path: Path) -> None:
    """With a very short limit, a run counts as stuck while its processes still start."""
    folder = RunFolder.create(tmp_path / "run", recipe(0, 3))
    before = set(descendants(1))
    run_log = run_under_fire(folder, site, Bounds(still_s=0.1))
    assert "nothing happened" in run_log.findings[0].what
    assert run_log.resumes == 0
    assert not {pid for pid in set(descendants(1)) - before if str(folder.path) in " ".join(command_line(pid))}


def test_a_run_that_ends_again_and_again_is_found_with_its_last_error(site: Site, tmp_path: Path) -> None:
    run_log = run_under_fire(RunFolder(tmp_path / "run"), site, Bounds(vain_endings=1, again_s=0.0))
    assert "is not a run folder" in run_log.findings[0].what
    assert len(run_log.endings) == 2


def test_no_checkpoint_can_be_damaged_before_there_is_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipe(0, 3))
    newest = folder.checkpoints / "step-000002"
    (newest / "shards").mkdir(parents=True)
    (newest / "begun").write_bytes(b"1")
    assert damageable(folder, Kind.DAMAGE_CHECKPOINT) == []
    weights = newest / "shards" / "weights"
    weights.write_bytes(b"weights")
    (folder.checkpoints / "step-000001").mkdir()
    (folder.checkpoints / "step-000001" / "older").write_bytes(b"weights")
    assert damageable(folder, Kind.DAMAGE_CHECKPOINT) == [weights]


def test_a_process_is_frozen_once_it_has_given_a_sign_of_life(site: Site, tmp_path: Path) -> None:
    """Regression: one was frozen while it started, which may last, and was then found not to be replaced."""
    folder = RunFolder.create(tmp_path / "run", recipe(0, 3))
    supervisor = Supervisor(folder, tmp_path / "log", site.machine.environment)
    injector = Injector(folder, site, supervisor)
    freeze = Fault(number=0, kind=Kind.FREEZE, at=0, delay_s=0.0, hold_s=0.0, pick=0.0)
    refused, frozen_after_s, deadline_s = 0, None, time.monotonic() + 120
    while frozen_after_s is None and time.monotonic() < deadline_s:
        serving = [pid for pid in descendants(supervisor.pid) if "serve" in command_line(pid)]
        try:
            with injector.begin(freeze):
                frozen_after_s = age_s(serving[0])
        except NoVictim:
            refused += bool(serving)
            time.sleep(0.05)
    supervisor.stop_all()
    assert refused, "the engine was there, and had not beaten yet"
    assert frozen_after_s is not None
    assert frozen_after_s > LAUNCH_S
