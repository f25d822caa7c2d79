"""Attacks by someone who can write to the bucket of a run: files of other runs, older files, paths that lead outside.

The attacker has no key, but has everything that was ever signed with it. Attacks on weights are in ``test_records.py``,
``test_weight_chain.py`` and ``test_object_store.py``.
"""

import json
import shutil
from pathlib import Path

import pytest

from etude.config.loading import default_recipe
from etude.errors import DamagedError
from etude.objects import ObjectStore
from etude.run.checkpoint_copies import copy_model, restore_model
from etude.run.event_copies import fetch_events
from etude.run.folder import LOG_ID, RunFolder
from etude.run.run_url import FILES, open_stored
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import StoredFile, StoredFiles
from etude.run.weight_log import KEY_VARIABLE
from etude.run.working_folder import keep, open_run_folder

PLACE = "phases/sft/model"


@pytest.fixture(autouse=True)
def _signed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret of the team")
    monkeypatch.setenv("ETUDE_WORK", str(tmp_path / "work"))


def _run(tmp_path: Path, name: str) -> RunFolder:
    """A run at a bucket, with the model of a phase."""
    folder = RunFolder.create(
        tmp_path / f"made-{name}", default_recipe([f"name={name}"]), at=str(tmp_path / "bucket" / name)
    )
    (folder.path / PLACE).mkdir(parents=True)
    (folder.path / PLACE / "model.json").write_text(f"of {name}")
    keep(folder, "run.toml", LOG_ID)
    copy_model(folder, PLACE, StoreOutages("the bucket", 1.0))
    return folder


def _exchange(tmp_path: Path, place: str) -> None:
    target = tmp_path / "bucket" / "mine" / place
    shutil.rmtree(target)
    shutil.copytree(tmp_path / "bucket" / "other" / place, target)


def test_to_have_a_run_go_on_from_the_model_of_another(tmp_path: Path) -> None:
    mine, _ = _run(tmp_path, "mine"), _run(tmp_path, "other")
    _exchange(tmp_path, PLACE)
    shutil.rmtree(mine.path / PLACE)
    with pytest.raises(DamagedError, match="is not signed"):
        restore_model(mine, PLACE)
    assert not (mine.path / PLACE).exists()


def test_to_give_a_machine_the_recipe_of_another_run(tmp_path: Path) -> None:
    mine, _ = _run(tmp_path, "mine"), _run(tmp_path, "other")
    folder = open_run_folder(mine.url)
    before = folder.config_file.read_bytes()
    _exchange(tmp_path, FILES)
    with pytest.raises(DamagedError, match="has another run than the one"):
        open_run_folder(mine.url)
    assert folder.config_file.read_bytes() == before


def test_to_add_a_plugin_to_a_run(tmp_path: Path) -> None:
    mine = _run(tmp_path, "mine")
    files = dict(open_stored(mine.url, FILES).read(1))
    evil = tmp_path / "evil.py"
    evil.write_text("import os; os.system('touch /tmp/pwned')")
    forged = StoredFiles(ObjectStore(f"{mine.url}/{FILES}"), FILES)
    from etude.run.stored_files import stored_file

    with evil.open("rb") as stream:
        forged.send(stream.fileno(), stored_file(evil))
    assert forged.put(2, {**files, "plugins/evil.py": stored_file(evil)})
    with pytest.raises(DamagedError, match="is not signed"):
        open_run_folder(mine.url)


@pytest.mark.parametrize(
    "path", ["../run.toml", "/etc/cron.d/x", "a/../../x", "a\\..\\x", "", ".", "a//b", "x\0", "./x", "a/./b"]
)
def test_to_write_outside_of_the_folder(tmp_path: Path, path: str) -> None:
    store = ObjectStore(str(tmp_path / "bucket"))
    file = {"sha256": "0" * 64, "size_bytes": 0}
    store.put_if_absent("manifests/00000001.json", json.dumps({"files": {path: file}}).encode())
    with pytest.raises(DamagedError, match="does not lie in the folder"):
        StoredFiles(store, FILES).read(1)
    with pytest.raises(ValueError, match="does not lie"):
        StoredFiles(store, FILES).fetch(path, StoredFile(**file), tmp_path / "target")  # type: ignore[arg-type]


def test_to_write_events_outside_of_their_folder(tmp_path: Path) -> None:
    store, folder = ObjectStore(str(tmp_path / "bucket")), tmp_path / "run" / "events"
    for name in ("..", "...", ".ssh", "a\\..\\b"):
        (tmp_path / "bucket" / f"{name}x").mkdir(parents=True)
        (tmp_path / "bucket" / f"{name}x" / "000000000000.jsonl").write_bytes(b"{}\n")
    fetch_events(store, folder)
    assert {path.parent for path in tmp_path.joinpath("run").rglob("*.jsonl")} == {folder}
