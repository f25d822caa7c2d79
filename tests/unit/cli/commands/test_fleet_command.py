"""`etude fleet`: files for clusters are written, nothing else; a drained process ends, and comes back when it may."""

from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.fleet.state import Observed
from etude.run.folder import RunFolder
from etude.run.placement import (
    RunPlacement,
    desired_of,
    fleet_objects,
    fleet_of,
    open_state,
    place_here,
    place_on,
    remember_fleet,
    run_id,
)
from etude.run.supervision import Supervisor
from etude.telemetry.log import EventLog

EXAMPLES = Path(__file__).parents[4] / "examples" / "fleet"
QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart"


def render(fleet: str, out: Path, *options: str) -> int:
    return main(["fleet", "render", str(EXAMPLES / fleet), str(QUICKSTART), "--out", str(out), *options])


def test_files_are_written_for_the_launcher_that_keeps_processes_itself(tmp_path: Path) -> None:
    out = tmp_path / "manifests"
    assert render("thousand-machines.toml", out, "--set", "parallel.dp=1024") == 0
    bases = ("ap-south", "eu-west", "phases", "us-east", "us-west")
    assert sorted(str(file.relative_to(out)) for file in out.glob("*/*")) == [
        f"{base}/{file}" for base in bases for file in ("kustomization.yaml", "processes.yaml")
    ]
    assert render("slurm.toml", tmp_path / "job", "--set", "parallel.dp=16") == 0
    assert next((tmp_path / "job").iterdir()).suffix == ".sbatch"


@pytest.mark.parametrize(
    ("fleet", "options", "fault"),
    [
        ("four-machines.toml", ["--set", "parallel.dp=16"], "launcher = 'ray' has no files: choose one by --launcher"),
        ("four-machines.toml", ["--launcher", "kubernetes", "--set", "parallel.dp=16"], "kubernetes.image is missing"),
        ("slurm.toml", [], "trainer.nodes = 2 of the fleet does not divide the ranks of `etude train`, 1"),
        ("one-machine.toml", ["--launcher", "slurm"], "here has no store"),
    ],
)
def test_what_cannot_be_rendered_is_told(
    fleet: str, options: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render(fleet, tmp_path / "out", *options) == 2
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_for_a_cluster_needs_a_database_before_anything_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, recipe = tmp_path / "fleet.toml", tmp_path / "recipe.toml"
    store = tmp_path / "store"
    fleet.write_text(f'home = "here"\n[[regions]]\nname = "here"\nstore = "{store}"\nengines = 1\n')
    recipe.write_text('name = "r"\n')
    assert main(["fleet", "create", str(fleet), str(recipe)]) == 2
    assert "--ledger postgresql://USER@HOST/DATABASE" in capsys.readouterr().err
    assert not store.exists()


def test_a_drained_process_ends_and_comes_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    here, state = place_here(folder, RunConfig()), open_state(folder)
    placement = RunPlacement(fleet=here.fleet, region="home", launcher=here.launcher, state=state)
    specs = [ProcessSpec(name=name, command=("sleep", "600"), region="home") for name in ("serve", "serve-1")]
    with EventLog(folder.events, "supervisor") as events:
        supervisor = Supervisor(specs, placement, folder, events, heartbeat_timeout_s=900.0)

        def running() -> list[str]:
            state.follow_near()
            supervisor.check()
            return [*placement.launcher.look()]

        try:
            assert running() == ["serve", "serve-1"]
            assert main(["fleet", "drain", "serve-1", "--run", str(folder.path)]) == 0
            assert running() == ["serve"]
            assert main(["fleet", "drain", "serve-1", "--run", str(folder.path), "--undo"]) == 0
            assert running() == ["serve", "serve-1"]
        finally:
            supervisor.stop()


def test_a_change_of_the_fleet_is_applied_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    text = 'home = "here"\n[[regions]]\nname = "here"\nengines = 1\n'
    assert main(["fleet", "status", "--run", str(folder.path)]) == 2
    assert "has no fleet, or has not started it yet" in capsys.readouterr().err
    one = write_fleet(tmp_path, text)
    remember_fleet(folder, one)
    assert main(["fleet", "apply", str(tmp_path / "fleet.toml"), "--run", str(folder.path)]) == 2
    assert "start after mid-training" in capsys.readouterr().err
    fleet_objects(folder).declare(desired_of(folder, one))
    assert main(["fleet", "apply", str(tmp_path / "fleet.toml"), "--run", str(folder.path)]) == 0
    more = write_fleet(tmp_path, text.replace("engines = 1", "engines = 2"))
    assert main(["fleet", "apply", str(tmp_path / "fleet.toml"), "--run", str(folder.path)]) == 0
    assert "generation 2 of the fleet: 5 processes in 1 regions" in capsys.readouterr().out
    assert fleet_of(folder) == more
    serve = ProcessStatus(incarnation="1", host="m1", pid=17)
    fleet_objects(folder).observe(Observed(generation=1, host="m1", statuses={"serve": serve}))
    assert main(["fleet", "status", "--run", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    assert "generation 2" in shown and "still at generation 1" in shown and "not placed" in shown and "17" in shown
    write_fleet(tmp_path, text.replace("here", "there"))
    assert main(["fleet", "apply", str(tmp_path / "fleet.toml"), "--run", str(folder.path)]) == 2
    assert "home, regions[].name and .store of the fleet cannot change while the run lives" in capsys.readouterr().err


def write_fleet(place: Path, text: str) -> FleetConfig:
    (place / "fleet.toml").write_text(text)
    return load_fleet(place / "fleet.toml")


def test_who_may_not_be_drained_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    assert main(["fleet", "drain", "train", "--run", str(folder.path)]) == 2
    assert "a run makes no progress without its trainer" in capsys.readouterr().err
    assert main(["fleet", "drain", "Engine 3", "--run", str(folder.path)]) == 2
    assert "'Engine 3' is not a valid process name" in capsys.readouterr().err


def test_a_run_remembers_its_fleet(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    assert fleet_of(folder) is None
    for example in sorted(EXAMPLES.glob("*.toml")):
        fleet = load_fleet(example)
        remember_fleet(folder, fleet)
        assert fleet_of(folder) == fleet


def test_a_launcher_of_ones_own_is_made_and_a_broken_one_is_named(tmp_path: Path) -> None:

    (tmp_path / "mine.py").write_text(
        "from etude.run.launchers.local import LocalLauncher\n"
        "def broken(options, context):\n    raise KeyError('no cluster')\n"
    )
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    text = (EXAMPLES / "one-machine.toml").read_text()
    (tmp_path / "fleet.toml").write_text(text.replace('"local"', '"@mine.py:LocalLauncher"'))
    assert place_on(load_fleet(tmp_path / "fleet.toml"), folder).launcher.spans_regions
    (tmp_path / "fleet.toml").write_text(text.replace('"local"', '"@mine.py:broken"'))
    with pytest.raises(ConfigError, match=r"'@mine\.py:broken' cannot be made: KeyError: 'no cluster'"):
        place_on(load_fleet(tmp_path / "fleet.toml"), folder)
    with pytest.raises(ConfigError, match="the files with `etude fleet render"):
        place_on(load_fleet(EXAMPLES / "slurm.toml"), folder)


def test_names_of_runs_are_short_and_differ() -> None:
    assert run_id("s3://acme/runs/Fix_7").startswith("fix-7-")
    assert run_id("s3://acme/runs/fix-7") != run_id("s3://other/runs/fix-7")
    assert len(run_id("s3://acme/" + "x" * 200)) <= 41
