"""The `tinker` package from PyPI, and the simplest loops of its cookbook, against étude's server.

The loops run as they are shipped. Their model and their data sets are folders here, of the names that they ask a hub
for: a tiny random model with Qwen's chat template, and a few rows of the same columns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.run.launchers.fork_server import THREADING
from own_checkpoint import make_checkpoint

PYTHON = Path(__file__).parents[2] / ".venv-tinker" / "bin" / "python"
MODEL = "Qwen/Qwen3-8B"
KEY = "tml-of-a-test"
DEADLINE_S = 900
QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(8)]
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(8)
]

pytestmark = pytest.mark.heavy("the Tinker SDK: make .venv-tinker/stamp", missing=not PYTHON.exists())
LONG = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which the names of model and data sets are folders."""
    folder = tmp_path_factory.mktemp("tinker")
    make_checkpoint(folder / MODEL, tokenizer_class="PreTrainedTokenizerFast")
    for name, config, rows in (("openai/gsm8k", "main", QUESTIONS), ("HuggingFaceH4/no_robots", "default", CHATS)):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        header = f"configs:\n- config_name: {config}\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        (folder / name / "README.md").write_text(f"---\n{header}---\n")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder) as address:
        yield address


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`etude tinker`, and its address."""
    command = [sys.executable, "-m", "etude", "tinker", "--model", MODEL, "--port", "0", "--folder", "saved"]
    environment = {**THREADING, **os.environ, "TINKER_API_KEY": KEY}
    with subprocess.Popen(
        [*command, "--device", "cpu", "--max-length", "4096"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().removeprefix("export TINKER_BASE_URL=")
        finally:
            process.terminate()


def run(folder: Path, url: str, *arguments: object, status: int = 0) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "TINKER_API_KEY": KEY,
        "TINKER_BASE_URL": url,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ended = subprocess.run(
        [PYTHON, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == status, ended.stdout[-3000:] + ended.stderr[-5000:]
    return ended.stdout + ended.stderr


def metrics(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def loop(folder: Path, url: str, name: str, **config: object) -> list[dict[str, float]]:
    log = folder / name
    given = {"base_url": url, "model_name": MODEL, "log_path": log, "batch_size": 2, **config}
    run(folder, url, "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in given.items()))
    return metrics(log)


@LONG
def test_the_cookbooks_loop_of_imitation_learns(folder: Path, url: str) -> None:
    rows = loop(folder, url, "sl_loop", learning_rate=1e-2, max_length=512, save_every=2)
    assert len(rows) == 4
    assert rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    (state,) = folder.glob("saved/*/weights/final.safetensors")
    assert (state.parents[1] / "sampler_weights" / "final" / "config.json").is_file()


@LONG
def test_the_cookbooks_loop_of_reinforcement_learning_goes_to_its_end(folder: Path, url: str) -> None:
    rows = loop(folder, url, "rl_loop", group_size=2, max_tokens=8, max_steps=2, loss_fn="gspo")
    assert [row["reward/total"] for row in rows] == [0.0, 0.0]  # random weights answer nothing: no step is taken


PROGRAM = """
import tinker
from tinker import types
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=8).result()
assert not client.get_info().is_lora
tokenizer = client.get_tokenizer()
prompt = types.ModelInput.from_ints(tokenizer.encode("fix edit"))
for step in range(2):
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=step)
    answer = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    data = []
    for sequence, advantage in zip(answer.sequences, (1.0, -1.0)):
        before, tokens = prompt.length - 1, list(sequence.tokens)
        inputs = {
            "target_tokens": types.TensorData(data=[0] * before + tokens, dtype="int64"),
            "logprobs": types.TensorData(data=[0.0] * before + list(sequence.logprobs), dtype="float32"),
            "advantages": types.TensorData(data=[0.0] * before + [advantage] * len(tokens), dtype="float32"),
        }
        read = prompt.append(types.EncodedTextChunk(tokens=tokens[:-1]))
        data.append(types.Datum(model_input=read, loss_fn_inputs=inputs))
    result = client.forward_backward(data, loss_fn="importance_sampling").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    for sequence, output in zip(answer.sequences, result.loss_fn_outputs):
        assert list(output["logprobs"].data[prompt.length - 1 :]) == list(sequence.logprobs), "not the same to the bit"
read = types.ModelInput.from_ints(prompt.to_ints() + list(sequence.tokens))
logprobs = sampler.compute_logprobs(read).result()
assert logprobs[0] is None and logprobs[prompt.length :] == list(sequence.logprobs), "not the same to the bit"
last = sampler.compute_logprobs(read, prompt_logprobs_last_n=2).result()
assert last == [None] * (read.length - 2) + logprobs[-2:]
params = types.SamplingParams(max_tokens=1)
scored = sampler.sample(read, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
assert scored.prompt_logprobs == logprobs and len(scored.sequences) == 2
first, *others = scored.topk_prompt_logprobs
assert first is None and [len(row) for row in others] == [3] * (read.length - 1)
for loss_fn, config, others in (
    ("ppo", None, []), ("cispo", None, []), ("dro", {"beta": 0.05}, []), ("gspo", None, ["sequence_ratio_mask"])
):
    masks = {name: [0.0] * (prompt.length - 1) + [1.0] * 6 for name in others}
    more = [types.Datum(one.model_input, {**one.loss_fn_inputs, **masks}) for one in data]
    print(loss_fn, client.forward_backward(more, loss_fn=loss_fn, loss_fn_config=config).result().metrics["loss:sum"])
client.forward_backward_custom(
    [types.Datum(one.model_input, {"target_tokens": one.loss_fn_inputs["target_tokens"]}) for one in data],
    lambda _, logprobs: (sum((values**2).sum() for values in logprobs), {}),
).result()
state = client.save_state("here").result().path
assert client.create_sampling_client(state).result().get_base_model() == "Qwen/Qwen3-8B"
restored = service.create_training_client_from_state_with_optimizer(state).result()
print("restored", restored.get_info().model_data.model_name)
try:
    client.forward_backward(data, loss_fn="stable_reinforce").result()
except tinker.TinkerError as error:
    print("refused", error)
try:
    service.create_lora_training_client(base_model="other/model").result()
except tinker.TinkerError as error:
    print("refused", error)
service.close("success").result()
"""


@LONG
def test_samples_and_trainer_agree_to_the_bit_over_the_wire_and_states_come_back(folder: Path, url: str) -> None:
    printed = run(folder, url, "-c", PROGRAM)
    assert f"restored {MODEL}" in printed
    assert "loss_fn='stable_reinforce' is not one of this server's" in printed
    assert f"base_model='other/model' is not here: this server has '{MODEL}'" in printed
    assert "there is no LoRA" in printed


@LONG
def test_a_wrong_key_is_refused(folder: Path, url: str) -> None:
    program = "import tinker; tinker.ServiceClient(api_key='tml-other').create_lora_training_client('m').result()"
    assert "is not this server's key" in run(folder, url, "-c", program, status=1)
