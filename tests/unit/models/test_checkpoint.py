"""Damaged checkpoints are named, never half-loaded."""

from pathlib import Path

import pytest
import torch

from etude.errors import DamagedError
from etude.models.checkpoint import WEIGHTS_FILE, load_checkpoint, load_spec, load_state, save_checkpoint, state_of
from etude.models.qwen3_moe import TINY, Qwen3Moe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Qwen3Moe(TINY)
    model.initialise(0)
    save_checkpoint(tmp_path, TINY, state_of(model), end_id=2, pad_id=0)
    return tmp_path


def test_a_truncated_weights_file_is_named(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedError, match=WEIGHTS_FILE):
        load_checkpoint(folder)


def test_a_foreign_model_is_refused_by_name(folder: Path) -> None:
    config = (folder / "config.json").read_text().replace("qwen3_moe", "llama")
    (folder / "config.json").write_text(config)
    with pytest.raises(DamagedError, match="llama"):
        load_spec(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    del state["model.norm.weight"]
    with pytest.raises(DamagedError, match=r"model\.norm\.weight"):
        load_state(Qwen3Moe(TINY), state)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    _, state = load_checkpoint(folder)
    state["model.norm.weight"] = torch.ones(9)
    with pytest.raises(DamagedError, match=r"should be \[32\], it is \[9\]"):
        load_state(Qwen3Moe(TINY), state)
