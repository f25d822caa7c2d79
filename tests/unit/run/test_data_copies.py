"""Data named by a recipe: copied once to the run's URL, and to the working folder of each process that reads it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from etude.config.loading import load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, DamagedError, RunFolderError
from etude.objects import ObjectStore
from etude.run.data_copies import GIB, bring_data, plan_data
from etude.run.folder import RunFolder
from etude.run.resuming import change, changed_config
from etude.run.working_folder import WORK_VARIABLE, create_run, forget, open_run_folder

ROW = json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    return tmp_path / "work"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of a recipe: a data set, conversations, and a model folder with links into a cache, as hubs make them."""
    folder = tmp_path / "source"
    (folder / "model" / "deep").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "1f").write_bytes(b"weights")
    (folder / "model" / "model.safetensors").symlink_to("../blobs/1f")
    (folder / "model" / "same").symlink_to("deep/run.sh")
    (folder / "model" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "model" / "deep" / "run.sh").chmod(0o755)
    (folder / "rows.jsonl").write_text(ROW)
    (folder / "chats.jsonl").write_text("{}\n")
    return folder


def config_of(source: Path) -> RunConfig:
    return parse_config(
        {
            "ledger": {"url": "postgresql:///app"},
            "tasks": {"family": "dataset", "options": {"path": str(source / "rows.jsonl")}},
            "harness": {"kind": "single_turn"},
            "model": {"checkpoint": str(source / "model")},
            "midtrain": {"mixture": {f"text:{source / 'chats.jsonl'}": [1.0, 1.0]}},
            "sft": {"file": str(source / "chats.jsonl")},
        },
        source="test",
    )


def test_of_two_machines_that_create_a_run_at_one_url_only_one_succeeds(
    source: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: both started, each with the recipe and the weight log of one of them."""
    url, made = str(tmp_path / "shared" / "run"), list[RunFolder]()

    def create_elsewhere(line: str) -> None:
        if not made:
            monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "elsewhere"))
            made.append(create_run(url, parse_config({"ledger": {"url": "postgresql:///app"}}, source="test")))
            monkeypatch.setenv(WORK_VARIABLE, str(work))

    with pytest.raises(RunFolderError, match=f"created a run at {url} meanwhile: continue it with --resume {url}"):
        create_run(url, config_of(source), tell=create_elsewhere)
    assert list(work.glob("run-*")) == []
    assert open_run_folder(url).config().model_dump() == made[0].config().model_dump()


def test_another_machine_has_the_data_that_its_work_reads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, lines = str(tmp_path / "shared" / "run"), list[str]()
    made = create_run(url, config_of(source), tell=lines.append)
    assert [line.partition(" = ")[0] for line in lines] == [
        f"copied: {key}" for key in ("tasks.options.path", "model.checkpoint", "sft.file", "midtrain.mixture")
    ]
    assert str(source) not in made.config_file.read_text() and "@data/" in made.config_file.read_text()
    shutil.rmtree(source)
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "elsewhere"))
    folder = open_run_folder(url)
    bring_data(folder, "tasks")
    config = folder.config()
    assert Path(config.tasks.options.model_dump()["path"]).read_text() == ROW
    assert not Path(config.model.checkpoint).exists(), "who plays tasks has no use for it"
    bring_data(folder, "tasks", "midtrain", "sft", "model")
    model = Path(config.model.checkpoint)
    assert model.name == "model" and model.is_relative_to(folder.path)
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert os.access(model / "deep" / "run.sh", os.X_OK) and (model / "same").readlink() == Path("deep/run.sh")
    assert [f"text:{config.sft.file}"] == list(config.midtrain.mixture), "copied once"
    assert len(ObjectStore(f"{url}/data").list("parts")) == 3
    change(folder, changed_config(folder, ["trainer.steps=7"]))
    assert load_recipe(folder.config_file).sft.file == config.sft.file
    assert str(folder.path) not in folder.config_file.read_text()


def test_a_lost_copy_is_named(source: Path, tmp_path: Path) -> None:
    folder = create_run(str(tmp_path / "shared" / "run"), config_of(source))
    store = ObjectStore(f"{folder.url}/data")
    store.delete(*store.list("parts"))
    with pytest.raises(DamagedError, match=r"/data/parts/.*rows\.jsonl\) is missing: restore it"):
        bring_data(folder, "tasks")


def test_data_that_are_too_large_stay_and_are_missed_by_name(source: Path, tmp_path: Path) -> None:
    plan = plan_data(config_of(source), limit_gib=len(ROW) / 2 / GIB)
    assert [data.key for data in plan.left] == ["tasks.options.path"]
    assert any(line.startswith("too large to be copied (--copy-limit)") for line in plan.describe())
    folder = create_run(str(tmp_path / "shared" / "run"), config_of(source), plan)
    bring_data(folder, "tasks")
    (source / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"tasks\.options\.path = .*rows\.jsonl' is not on this machine.*too large"):
        bring_data(folder, "tasks")


def test_data_that_cannot_be_copied_are_refused_before_there_is_a_run(source: Path, tmp_path: Path) -> None:
    url = tmp_path / "shared" / "run"
    (source / "model" / "out").symlink_to("/etc")
    with pytest.raises(ConfigError, match=r"model\.checkpoint: the link .*out points outside of the folder"):
        create_run(str(url), config_of(source))
    (source / "model" / "out").unlink()
    os.mkfifo(source / "model" / "pipe")
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*pipe is not a file, folder or link"):
        create_run(str(url), config_of(source))
    (source / "model" / "pipe").unlink()
    (source / "chats.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"sft\.file: there is no .*chats\.jsonl' on this machine"):
        create_run(str(url), config_of(source))
    assert not (url / "files" / "manifests").exists() or not list((url / "files" / "manifests").iterdir())


def test_a_run_that_has_not_begun_leaves_no_data(source: Path, tmp_path: Path) -> None:
    folder = create_run(str(tmp_path / "shared" / "run"), config_of(source))
    forget(folder)
    assert ObjectStore(f"{folder.url}/data").list("") == []
