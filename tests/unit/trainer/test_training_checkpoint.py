"""Checkpoints of the trainer: whole or not there, verified, and read by other ranks than wrote them."""

import json
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from etude.errors import DamagedError, InfrastructureError
from etude.trainer.checkpoint import KEEP, MANIFEST, Box, Checkpoints
from trainer_ranks import run_ranks

TENSORS = {
    "model/a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "model/b": torch.tensor([0.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "optimiser/a/step": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
}


def test_what_is_saved_is_read_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, TENSORS)
    result = Checkpoints(tmp_path).load(3)
    assert result.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor)


def test_tensors_may_change_while_they_are_written(tmp_path: Path) -> None:
    checkpoints, tensors = Checkpoints(tmp_path), {name: tensor.clone() for name, tensor in TENSORS.items()}
    written = checkpoints.start(3, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    written.result()
    assert torch.equal(checkpoints.load(3)["model/a"], TENSORS["model/a"])


def write_as_two(rank: int, folder: Path) -> None:
    """Rank 0 has a whole checkpoint once rank 1 has its file, and none where that never comes."""
    checkpoints = Checkpoints(folder / "checkpoints", init_device_mesh("cpu", (2,)))
    written = checkpoints.start(1, TENSORS)
    written.result()
    checkpoints._meet()
    assert checkpoints.steps() == [1]
    if rank == 1:
        checkpoints._thread.shutdown()  # as if it had died as it wrote
        with pytest.raises(RuntimeError):
            checkpoints.start(2, TENSORS)
        return
    written = checkpoints.start(2, TENSORS)
    assert not wait([written], 0.3).done
    checkpoints.abandon()
    with pytest.raises(InfrastructureError, match=r"rank-00001\.safetensors was not written"):
        written.result()
    assert checkpoints.steps() == [1]


def test_a_checkpoint_is_whole_when_every_rank_has_written(tmp_path: Path) -> None:
    run_ranks(2, write_as_two, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").load(1).keys() == TENSORS.keys()


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, TENSORS)
    assert checkpoints.steps() == [9, 10]
    assert len(list(tmp_path.iterdir())) == KEEP


def test_saving_again_replaces_and_sweeps_up_what_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.partial").mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    checkpoints.save(2, TENSORS)
    checkpoints.save(2, {"other": torch.ones(2)})
    assert checkpoints.load(2).keys() == {"other"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("file", [MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["change", "flip", "cut", "remove"])
def test_damage_is_named(tmp_path: Path, file: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TENSORS)
    path = tmp_path / "step-00000001" / file
    payload = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        middle = len(payload) // 2
        flipped = payload[:-9] + bytes([payload[-9] ^ 1]) + payload[-8:]
        damaged = {"cut": payload[:middle], "change": payload.replace(b"0", b"1", 5), "flip": flipped}[damage]
        path.write_bytes(bytes(damaged))
    with pytest.raises(DamagedError, match=r"step-00000001.*new run from the last published weights"):
        checkpoints.load(1)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, TENSORS)
    manifest = tmp_path / "checkpoints" / "step-00000001" / MANIFEST
    manifest.write_text(json.dumps({"step": 1, "files": {"../../elsewhere": "00"}}))
    with pytest.raises(DamagedError, match="elsewhere"):
        checkpoints.load(1)


def test_a_missing_part_is_missed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TENSORS)
    manifest = tmp_path / "step-00000001" / MANIFEST
    manifest.write_text(json.dumps({"step": 1, "files": {}}))
    assert checkpoints.load(1) == {}, "what no file has is not there; whoever restores will miss it"


boxes = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 2).map(
    lambda axes: Box(tuple(start for start, _ in axes), tuple(size for _, size in axes))
)


@given(boxes, boxes)
def test_an_overlap_is_what_lies_in_both(a: Box, b: Box) -> None:
    def marked(box: Box) -> torch.Tensor:
        field = torch.zeros(10, 10, dtype=torch.bool)
        field[box.inside(Box((0, 0), (10, 10)))] = True
        return field

    common = a.overlap(b)
    assert int((marked(a) & marked(b)).sum()) == common.count
    if common.count:
        assert torch.equal(marked(common), marked(a) & marked(b))
        assert int(marked(a)[a.inside(Box((0, 0), (10, 10)))].sum()) == a.count
