"""The real PEFT loads an exported adapter on transformers' model, and computes the same as the trainer."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.models.adapters import ABOUT, AdapterSpec, Target, attach
from etude.models.checkpoint import load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.peft import write_peft
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ETUDE_PEFT_PYTHON", ROOT / ".venv-trl/bin/python"))
SCRIPT = """
import sys, torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    ids = torch.arange(30)[None]
    bare = model(ids).logits[0]
    adapted = PeftModel.from_pretrained(model, sys.argv[2])(ids).logits[0]
save_file({"bare": bare, "adapted": adapted}, sys.argv[3])
"""
CASES: dict[str, tuple[ModelSpec, tuple[Target, ...]]] = {
    "dense": (TINY_DENSE, ("attention", "feed_forward")),
    "latent": (TINY_LATENT, ("attention",)),
    "experts": (TINY, ("attention",)),
}
pytestmark = pytest.mark.heavy(
    "PEFT: make .venv-trl/stamp", missing=not [*(PYTHON.parents[1] / "lib").glob("*/site-packages/peft")]
)


@pytest.mark.parametrize("name", CASES)
def test_peft_computes_what_the_trainer_does(tmp_path: Path, name: str) -> None:
    spec, targets = CASES[name]
    model = Decoder(spec)
    model.initialise(0, std=0.2)
    save_checkpoint(tmp_path / "model", spec, state_of(model), end_id=1, pad_id=0)
    attach(model, AdapterSpec(rank=8, scale=2.0, targets=targets), base="00" * 16)
    generator = torch.Generator().manual_seed(1)
    moved = {key: torch.randn(each.shape, generator=generator) * 0.1 for key, each in state_of(model).items()}
    load_state(model, moved | {key: state_of(model)[key] for key in ABOUT})
    write_peft(tmp_path / "peft", state_of(model), spec, base_name="base")
    arguments = [str(tmp_path / each) for each in ("model", "peft", "logits")]
    subprocess.run([PYTHON, "-c", SCRIPT, *arguments], check=True, capture_output=True, timeout=300)
    theirs = load_file(tmp_path / "logits")
    with torch.inference_mode():
        ours = model.logits(model.forward_packed(torch.arange(30)))
    assert torch.allclose(ours, theirs["adapted"], atol=1e-4)
    assert not torch.allclose(ours, theirs["bare"], atol=0.1)
