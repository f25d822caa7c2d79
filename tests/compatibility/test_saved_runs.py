"""Compatibility with files of earlier versions: ``tools/saved_run.py`` made each archive beside this file.

The archive of a version may be replaced until that version is released. After that it stays, and the code has to read
it.
"""

import re
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

import etude
from etude.cli.main import main
from etude.config.loading import load_fleet, load_recipe, load_suite
from etude.config.section import Section
from etude.dashboard.suite_results import read_results
from etude.errors import ConfigError
from etude.ledger.ledger import TRAIN
from etude.ledger.states import GroupState
from etude.run.folder import RunFolder
from etude.run.local import write_report
from etude.run.stores import open_ledger
from etude.run.weight_log import open_log
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventReader
from etude.weights.digest import state_digest
from etude.weights.pull import pull
from etude.weights.repair import verify
from tiny_runs import DEADLINE_S, run_etude

HERE = Path(__file__).parent
CHANGELOG = (HERE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
ARCHIVES = sorted(HERE.glob("*.tar.xz"))
STEPS, GROUPS, GROUP_SIZE = 3, 2, 4
"""Of the run in each."""
UNKNOWN_KEY = re.compile(r"unknown key '([^']+)'")


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.name.removesuffix(".tar.xz"))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An archive of an earlier version, unpacked in a temporary folder, because opening it may migrate it."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def folder(saved: Path) -> RunFolder:
    return RunFolder.open(saved / "run")


def test_each_release_left_an_archive() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+)(?!.*not released)", CHANGELOG, re.MULTILINE)
    assert ARCHIVES
    assert {f"{version}.tar.xz" for version in released} <= {archive.name for archive in ARCHIVES}


def leaves(tree: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, object]]:
    """The values of a tree by path; a table without keys is one."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{within}{key}.")
        else:
            yield within + key, value


def test_a_run_is_made_of_the_recipe_that_it_began_with(folder: RunFolder) -> None:
    then = tomllib.loads(folder.config_file.read_text(encoding="utf-8"))
    now = dict(leaves(folder.config().model_dump(mode="json")))
    changed = {key: (value, now.get(key)) for key, value in leaves(then) if key in now and now[key] != value}
    gone = [key for key, _ in leaves(then) if key not in now]
    assert changed == {}
    assert [key for key in gone if not is_announced(key)] == []


def test_the_ledger_has_its_batches_with_every_turn(folder: RunFolder) -> None:
    with open_ledger(folder) as ledger:
        assert ledger.progress().steps_done == STEPS
        for step in range(1, STEPS + 1):
            batch = ledger.batch(step)
            assert [len(group.rollouts) for group in batch] == [GROUP_SIZE] * GROUPS
            assert all(
                turn.completion_ids.size for group in batch for rollout in group.rollouts for turn in rollout.turns
            )
        assert len(list(ledger.groups(TRAIN, (GroupState.CONSUMED,)))) == STEPS * GROUPS
        assert len(ledger.rewards("before-greedy")) == len(ledger.rewards("after-sampled")) == 2


def test_the_weights_are_pulled_over_their_deltas_to_the_last_bit(folder: RunFolder) -> None:
    log = open_log(folder)
    assert log.versions() == list(range(STEPS + 1))
    assert {check.fault for check in verify(log)} == {None}
    records = [log.read(version) for version in log.versions()]
    assert len({record.digest for record in records if record is not None}) == STEPS + 1
    newest = pull(log)
    assert records[-1] is not None
    assert (newest.version, state_digest(newest.state)) == (STEPS, records[-1].digest)


def test_commands_and_the_python_api_read_it(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run = etude.open(folder.path)
    newest = run.rollouts(limit=1)
    for options in ((), ("--group", "0"), ("--rollout", newest[0].rollout_id)):
        assert main(["show", folder.name, *options]) == 0
    assert f"{STEPS} of {STEPS} steps committed" in capsys.readouterr().out
    assert len(run.steps()) == STEPS
    assert len(run.rollouts()) == STEPS * GROUPS * GROUP_SIZE
    assert all(turn.completion for turn in run.turns(newest))


def test_its_events_make_the_report_that_they_made(folder: RunFolder) -> None:
    steps = [logged.event for logged in EventReader(folder.events).new() if isinstance(logged.event, StepDone)]
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    before = orjson.loads(folder.report_json.read_bytes())
    folder.report_json.unlink()
    after = write_report(folder, folder.config())
    for part in ("finished", "steps", "learning", "tokens", "rollouts", "staleness"):
        assert after[part] == before[part]
    heldout = after["heldout"]
    assert isinstance(heldout, dict)
    assert before["heldout"].items() <= heldout.items()  # later versions have more figures of the same evaluations


def test_a_suite_goes_on_from_its_tries(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_results(saved / "results")
    assert load_suite(saved / "suite").name == before.suite
    assert main(["suite", "report", str(saved / "results")]) == 0
    run = ["--run", str(saved / "run"), "--tasks", "1", "--out", str(saved / "again")]
    assert main(["suite", "run", str(saved / "suite"), *run]) == 0
    capsys.readouterr()
    assert read_results(saved / "again").tries == before.tries


def is_announced(key: str) -> bool:
    """Return true if the changelog names a removed key."""
    return f"`{key}`" in CHANGELOG


def unannounced(load: Callable[[Path], Section], file: Path) -> list[str]:
    """Errors on loading an old file, without those whose keys the changelog names."""
    try:
        load(file)
    except ConfigError as error:
        return [line for line in str(error).splitlines()[1:] if not any(map(is_announced, UNKNOWN_KEY.findall(line)))]
    return []


def test_recipes_and_fleets_load_or_the_changelog_says_what_changed(saved: Path) -> None:
    recipes = {file: unannounced(load_recipe, file) for file in saved.glob("recipes/*/run.toml")}
    fleets = {file: unannounced(load_fleet, file) for file in saved.glob("fleets/*.toml")}
    assert recipes
    assert fleets
    assert {str(file): faults for file, faults in (recipes | fleets).items() if faults} == {}


@pytest.mark.heavy("the processes of a run")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_goes_on_by_another_step(folder: RunFolder) -> None:
    run_etude("run", "--resume", folder.path, "--set", f"trainer.steps={STEPS + 1}")
    with open_ledger(folder) as ledger:
        assert ledger.progress().steps_done == STEPS + 1
    log = open_log(folder)
    assert log.versions() == list(range(STEPS + 2))
    assert {check.fault for check in verify(log)} == {None}
