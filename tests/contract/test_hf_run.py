"""A family that étude does not have, OLMo 2: trained by transformers, served by a real vLLM, from SFT to RL."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chat_formats import make_tokenizer
from etude.errors import ExitCode
from etude.models.checkpoint import INDEX_FILE, load_checkpoint
from own_checkpoint import END, with_tokenizer
from tiny_runs import run_etude

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ETUDE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
RECIPE = """
name = "hf-model"
heartbeat_timeout_s = 3000.0
[model]
checkpoint = "{checkpoint}"
impl = "hf"
[midtrain]
tokens = 0
[sft]
file = "{conversations}"
learning_rate = 1e-3
[tasks.options]
kinds = ["arith"]
[harness.options]
max_turns = 2
max_tokens_per_turn = 8
[rollouts]
groups_per_step = 1
group_size = 2
concurrency = 4
[engine]
kind = "vllm"
device = "cpu"
options = {{ python = "{python}" }}
[trainer]
device = "cpu"
steps = 2
[eval]
tasks = 2
"""

pytestmark = pytest.mark.heavy("vLLM: make .venv-vllm/stamp", missing=not PYTHON.exists())


def make_olmo(folder: Path) -> Path:
    """A tiny random OLMo 2 with a tokenizer and a chat template."""
    tokenizer = make_tokenizer()
    end_id = tokenizer.token_to_id(END)
    config = transformers.Olmo2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=2048,
        eos_token_id=end_id,
        pad_token_id=end_id,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    factory: Any = transformers.AutoModelForCausalLM
    factory.from_config(config).save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.mark.timeout(1800)
def test_a_model_of_transformers_goes_through_sft_the_gate_and_rl_with_vllm(tmp_path: Path) -> None:
    recipe, run, talks = (tmp_path / name for name in ("recipe.toml", "run", "talks.jsonl"))
    talk = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    talks.write_text("\n".join([json.dumps(talk)] * 8))
    checkpoint = make_olmo(tmp_path / "model")
    recipe.write_text(RECIPE.format(checkpoint=checkpoint, conversations=talks, python=PYTHON))
    run_etude("check", recipe)
    run_etude("run", recipe, "--out", run, statuses=(ExitCode.NOTHING_LEARNT,))  # random weights solve no task
    gate = (run / "logs" / "parity.log").read_text()
    assert "engine and trainer agree" in gate, gate[-2000:]
    run_etude("weights", "export", run, tmp_path / "out")
    start, end = load_checkpoint(checkpoint, "hf")[1], load_checkpoint(tmp_path / "out", "hf")[1]
    assert start.keys() == end.keys()
    assert not torch.equal(start["lm_head.weight"], end["lm_head.weight"])
    assert not (tmp_path / "out" / INDEX_FILE).exists()
