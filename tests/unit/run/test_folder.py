"""A run folder: private, whole, and not taken twice."""

import stat
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier

import pytest

from etude.config.recipe import LedgerConfig, RunConfig
from etude.errors import ConfigError, RunFolderError
from etude.run.folder import RunFolder, exclusive
from etude.run.keys import KeyRole
from etude.run.local import create_default, default_out
from etude.run.resolve import resolve


def test_it_remembers_its_recipe_and_keeps_its_secrets(tmp_path: Path) -> None:
    config = RunConfig(seed=5)
    folder = RunFolder.create(tmp_path / "run", config)
    assert RunFolder.open(tmp_path / "run").config() == resolve(config)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "run.key").stat().st_mode) == 0o600
    assert len((folder.path / "run.key").read_text(encoding="utf-8").strip()) >= 32


def test_two_runs_have_two_keys(tmp_path: Path) -> None:
    one, other = (RunFolder.create(tmp_path / name, RunConfig()) for name in ("a", "b"))
    assert len({folder.key(role) for folder in (one, other) for role in KeyRole}) == 2 * len(KeyRole)


def test_a_second_process_of_a_kind_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    with exclusive(folder, "train"):
        with pytest.raises(RunFolderError, match="'train'"), exclusive(folder, "train"):
            raise AssertionError("two trainers")
        with exclusive(folder, "serve"):
            pass
    with exclusive(folder, "train"):
        pass


def test_the_ledger_is_a_file_or_a_schema_of_its_own_that_the_folder_remembers(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "file", RunConfig()).ledger == str(tmp_path / "file" / "ledger.db")
    server = "postgresql://me@db.example/runs"
    config = RunConfig(name="my-run", seed=7, ledger=LedgerConfig(url=server))
    one, other = (RunFolder.create(tmp_path / name, config) for name in ("a", "b"))
    assert one.ledger.startswith(f"{server}#etude_my_run_s7_")
    assert one.ledger != other.ledger
    assert RunFolder.open(tmp_path / "a").ledger == one.ledger
    assert RunFolder.create(tmp_path / "c", one.config()).ledger != one.ledger  # a run as the recipe of another


def test_of_two_processes_that_create_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    """Regression: both succeeded, with keys of the one and the recipe of the other."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with exclusive(folder, "create"):  # another process has checked that there is no run
            second = pool.submit(RunFolder.create, folder.path, RunConfig(seed=2))
            wait([second], timeout=1.0)  # it has checked, too
            folder.config_file.write_text("seed = 1\n")
        with pytest.raises(RunFolderError, match="already holds a run"):
            second.result()
    assert folder.config_file.read_text() == "seed = 1\n"
    assert not (folder.path / "run.key").exists()


def test_runs_that_start_at_once_get_default_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = Barrier(4)

    def create(seconds: int) -> Path:
        start.wait()
        return create_default(RunConfig(name="mine", heartbeat_timeout_s=seconds)).path

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(create, (100, 200, 300, 400)))
    assert {path.name for path in made} == {"mine-s0", "mine-s0-2", "mine-s0-3", "mine-s0-4"}
    assert [RunFolder.open(path).config().heartbeat_timeout_s for path in made] == [100, 200, 300, 400]


def test_a_recipe_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one without a recipe was left, and the next try chose another name."""
    config = RunConfig.model_validate({"numerics": {"arithmetic": "invariant", "replay": "full"}})
    with pytest.raises(ConfigError, match=r"numerics\.replay = 'full' has no effect"):
        RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"numerics\.replay = 'full' has no effect"):
        create_default(config)
    assert not default_out(config).exists()
