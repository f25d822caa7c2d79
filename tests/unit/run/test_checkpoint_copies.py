"""Copies of checkpoints at the URL of a run: made beside other work, and restored where they are newer."""

from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest
import torch

from etude.config.recipe import RunConfig
from etude.errors import DamagedError
from etude.objects import ObjectStore
from etude.run.checkpoint_copies import CheckpointCopies, restore_checkpoint
from etude.run.folder import RunFolder
from etude.run.store_outages import StoreOutages
from etude.trainer.checkpoint import Checkpoints
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.tensors import to_stored


def make_folder(path: Path, url: Path) -> RunFolder:
    return RunFolder.create(path, RunConfig(), at=str(url), ledger=str(path.parent / "ledger.db"))


def save(folder: RunFolder, step: int, value: float) -> None:
    Checkpoints(folder.checkpoints).save(step, {"w": torch.full((3,), value)})


def copy(folder: RunFolder, *steps: int) -> None:
    with StoreOutages(folder.store, 0.0) as outages, CheckpointCopies(folder, outages) as copies:
        for step in steps:
            save(folder, step, float(step))
            copies.start(step)
            copies.finish()
            assert copies.is_complete


def restored(folder: RunFolder) -> list[tuple[int, float]]:
    restore_checkpoint(folder)
    checkpoints = Checkpoints(folder.checkpoints)
    return [(step, float(checkpoints.load(step)["w"][0])) for step in checkpoints.steps()]


def test_the_newest_copy_is_restored_unless_the_disk_has_it(tmp_path: Path) -> None:
    first, second = (make_folder(tmp_path / name, tmp_path / "url") for name in ("a", "b"))
    assert restored(second) == []
    copy(first, 1, 2, 3)
    assert restored(second) == [(3, 3.0)]
    copy(second, 4)
    save(first, 4, 40.0)
    assert restored(first)[-1] == (4, 40.0), "what this disk has saved was not copied yet"
    copy(second, 5)
    assert restored(first)[-1] == (5, 5.0)
    store = ObjectStore(f"{first.url}/checkpoints")
    assert store.list("manifests") == ["manifests/00000004.json", "manifests/00000005.json"]
    assert len(store.list("parts")) == 4


def test_a_checkpoint_can_be_restored_when_it_is_written_and_copied(tmp_path: Path) -> None:
    folder, written = make_folder(tmp_path / "a", tmp_path / "url"), Future[None]()
    with StoreOutages(folder.store, 0.0) as outages, CheckpointCopies(folder, outages) as copies:
        copies.start(1, written)
        assert not copies.is_complete
        save(folder, 1, 1.0)
        written.set_result(None)
        copies.finish()
        assert copies.restorable == 1
    assert restored(make_folder(tmp_path / "b", tmp_path / "url")) == [(1, 1.0)]


def test_a_step_that_another_trainer_has_copied_with_other_bits_ends_this_one(tmp_path: Path) -> None:
    first, second = (make_folder(tmp_path / name, tmp_path / "url") for name in ("a", "b"))
    copy(first, 1)
    copy(second, 1)  # the same bits
    with StoreOutages(second.store, 0.0) as outages, CheckpointCopies(second, outages) as copies:
        save(second, 1, 7.0)
        copies.start(1)
        with pytest.raises(DamagedError, match="the copy of checkpoint 1 has other bytes"):
            copies.finish()


def test_a_run_without_a_url_has_no_copies(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    copy(folder, 1)
    assert restored(folder) == [(1, 1.0)]
    assert not (tmp_path / "checkpoints").exists()


def test_a_version_becomes_visible_when_what_it_waits_for_has_come() -> None:
    log, gate = WeightLog(ObjectStore("memory://")), Event()
    with Publisher(log) as publisher:
        state = to_stored({"w": torch.ones(3)})

        def wait() -> None:
            assert gate.wait(30)

        publication = publisher.publish(state, version=0, step=0, before_commit=wait)
        publication.wait_read()
        assert log.latest() is None
        gate.set()
        assert publication.result(30).version == 0
    assert log.latest() == 0
