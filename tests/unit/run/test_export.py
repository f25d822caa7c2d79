"""``etude weights export``: a run's weights as an ordinary Hugging Face checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.config.loading import parse_config
from etude.config.training import ModelShape
from etude.models.checkpoint import save_checkpoint, spec_from_shape, state_of
from etude.models.decoder import Decoder
from etude.run.export import export_run
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate

MODEL = ModelShape(vocab_size=300, hidden_size=32, layers=1, heads=1, kv_heads=1, experts=2, expert_size=16)


def published(path: Path, experts: str) -> RunFolder:
    """A run that has published version 0."""
    config = parse_config({"numerics": {"dtype": "bfloat16", "experts": experts}}, source="test")
    folder = RunFolder.create(path, config)
    chat = ChatTemplate.train(["def f(a):\n    return a\n"], MODEL.vocab_size)
    spec = spec_from_shape(MODEL, chat.vocab_size)
    model = Decoder(spec)
    model.initialise(0)
    save_checkpoint(folder.model, spec, state_of(model), end_id=chat.end_id, pad_id=chat.pad_id)
    chat.save(folder.model)
    with (
        EventLog(folder.events, "test") as events,
        WeightPublishing(open_log(folder), config.name, events) as publishing,
    ):
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()
    return folder


@pytest.mark.parametrize(("experts", "method"), [("plain", None), ("fp8", "fp8"), ("nvfp4", "modelopt")])
def test_an_export_says_how_its_experts_are_quantised(tmp_path: Path, experts: str, method: str | None) -> None:
    export_run(published(tmp_path / "run", experts), tmp_path / "hf", None)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    quantisation = config.get("quantization_config")
    assert (quantisation and quantisation["quant_method"]) == method
    kinds = {tensor.dtype for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items()
             if name.endswith("experts.0.up_proj.weight")}  # fmt: skip
    assert len(kinds) == 1
    assert (kinds == {torch.bfloat16}) == (method is None)
