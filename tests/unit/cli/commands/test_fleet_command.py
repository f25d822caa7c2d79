"""`etude fleet`: files for clusters are written, nothing else; a drained process ends, and comes back when it may."""

from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.recipe import RunConfig
from etude.fleet.specs import ProcessSpec
from etude.run.folder import RunFolder
from etude.run.placement import RunPlacement, drained_of, fleet_of, place_here, place_on, remember_fleet, run_id
from etude.run.supervision import Supervisor
from etude.telemetry.log import EventLog

EXAMPLES = Path(__file__).parents[4] / "examples" / "fleet"
QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart"


def render(fleet: str, out: Path, *options: str) -> int:
    return main(["fleet", "render", str(EXAMPLES / fleet), str(QUICKSTART), "--out", str(out), *options])


def test_files_are_written_for_the_launcher_that_keeps_processes_itself(tmp_path: Path) -> None:
    out = tmp_path / "manifests"
    assert render("thousand-machines.toml", out, "--set", "parallel.dp=1024") == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "ap-south.yaml", "eu-west.yaml", "phases.yaml", "us-east.yaml", "us-west.yaml",
    ]  # fmt: skip
    assert render("slurm.toml", tmp_path / "job", "--set", "parallel.dp=16") == 0
    assert next((tmp_path / "job").iterdir()).suffix == ".sbatch"


@pytest.mark.parametrize(
    ("fleet", "options", "fault"),
    [
        ("four-machines.toml", ["--set", "parallel.dp=16"], "launcher = 'ray' has no files: choose one by --launcher"),
        ("four-machines.toml", ["--launcher", "kubernetes", "--set", "parallel.dp=16"], "kubernetes.image is missing"),
        ("slurm.toml", [], "trainer.nodes = 2 of the fleet does not divide the recipe's parallel.dp * parallel.cp = 1"),
        ("one-machine.toml", ["--launcher", "slurm"], "here has no store"),
    ],
)
def test_what_cannot_be_rendered_is_told(
    fleet: str, options: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render(fleet, tmp_path / "out", *options) == 2
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_drained_process_ends_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.run.placement.DRAINED_POLL_S", 0.0)
    folder, config = RunFolder.create(tmp_path / "run", RunConfig()), RunConfig()
    here = place_here(folder, config)
    placement = RunPlacement(fleet=here.fleet, region="home", launcher=here.launcher, drained=drained_of(folder))
    specs = [ProcessSpec(name=name, command=("sleep", "600"), region="home") for name in ("serve", "serve-1")]
    with EventLog(folder.events, "supervisor") as events:
        supervisor = Supervisor(specs, placement, folder, events, heartbeat_timeout_s=900.0)
        try:
            supervisor.check()
            assert main(["fleet", "drain", "serve-1", "--run", str(folder.path)]) == 0
            supervisor.check()
            assert [*placement.launcher.look()] == ["serve"]
            assert main(["fleet", "drain", "serve-1", "--run", str(folder.path), "--undo"]) == 0
            supervisor.check()
            assert [*placement.launcher.look()] == ["serve", "serve-1"]
        finally:
            supervisor.stop()


def test_who_may_not_be_drained_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    assert main(["fleet", "drain", "train", "--run", str(folder.path)]) == 2
    assert "a run without its trainer stands still" in capsys.readouterr().err
    assert main(["fleet", "drain", "Engine 3", "--run", str(folder.path)]) == 2
    assert "'Engine 3' is no name of a process" in capsys.readouterr().err


def test_a_run_remembers_its_fleet(tmp_path: Path) -> None:
    from etude.config.loading import load_fleet

    folder = RunFolder.create(tmp_path / "run", RunConfig())
    assert fleet_of(folder) is None
    for example in sorted(EXAMPLES.glob("*.toml")):
        fleet = load_fleet(example)
        remember_fleet(folder, fleet)
        assert fleet_of(folder) == fleet


def test_a_launcher_of_ones_own_is_made_and_a_broken_one_is_named(tmp_path: Path) -> None:
    from etude.config.loading import load_fleet
    from etude.errors import ConfigError

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
    with pytest.raises(ConfigError, match="write them with `etude fleet render"):
        place_on(load_fleet(EXAMPLES / "slurm.toml"), folder)


def test_names_of_runs_are_short_and_differ() -> None:
    assert run_id("s3://acme/runs/Fix_7").startswith("fix-7-")
    assert run_id("s3://acme/runs/fix-7") != run_id("s3://other/runs/fix-7")
    assert len(run_id("s3://acme/" + "x" * 200)) <= 41
