"""Checks before a run: each fault is one line with value, key and fix, and a working setup is tried once."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from chat_formats import TEMPLATES, make_tokenizer
from etude.cli.actions.compare_numerics import show_calls
from etude.config.loading import default_recipe, load_recipe
from etude.config.recipe import RunConfig
from etude.config.training import ModelShape
from etude.errors import ConfigError, UserError
from etude.models.checkpoint import spec_from_shape
from etude.models.decoder import Decoder
from etude.run.phase_models import save_model
from etude.run.preflight import (
    about_calls,
    about_numerics,
    about_rate,
    about_template,
    check_model,
    check_ready,
    check_session,
    check_texts,
    first_tasks,
)
from etude.run.task_plan import open_tasks
from etude.tokens.chat import ChatTemplate
from etude.types import Split
from harbor_folders import WHOLE, write_folder

END, R1_END = "<|im_end|>", "<｜end▁of▁sentence｜>"
MAKE_SILENT = (("<tool_call>", "@call "), ("</tool_call>", "@"))


def checkpoint(folder: Path, template: str, end: str = END) -> Path:
    """The files of a checkpoint that are checked before a run."""
    folder.mkdir()
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "chat_template": template}))
    return folder


def recipe(tmp_path: Path, model: Path, *settings: str) -> RunConfig:
    (tmp_path / "run.toml").write_text("[sandboxes]\nkind = 'ns'\n")
    return load_recipe(tmp_path, [f"model.checkpoint={model}", "midtrain.tokens=0", *settings])


AGENT = (
    "harness.kind=command",
    "harness.options.command=['agent', '{prompt}', '{temperature}']",
    "harness.options.timeout_s=60.0",
)


def test_calls_that_no_grammar_reads_refuse_a_run_whose_agent_may_need_them(tmp_path: Path) -> None:
    template = (TEMPLATES / "qwen.jinja").read_text()
    for mark, other in MAKE_SILENT:
        template = template.replace(mark, other)
    model = checkpoint(tmp_path / "model", template)
    with pytest.raises(ConfigError, match=r"no grammar reads.*chat_template\.jinja"):
        list(check_model(recipe(tmp_path, model, *AGENT)))
    assert about_calls(recipe(tmp_path, model)) == []  # the built-in agent calls nothing in this way
    assert not show_calls(model, Console(quiet=True))


def test_calls_that_are_read_in_part_are_a_warning(tmp_path: Path) -> None:
    template = (TEMPLATES / "coder.jinja").read_text().replace("value | string", "value | string | replace('<b>', '')")
    model = checkpoint(tmp_path / "model", template)
    config = recipe(tmp_path, model, *AGENT)
    (warning,) = about_calls(config)
    assert "text with quotes" in warning and str(model) in warning


def test_calls_that_are_read_raise_no_doubt(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "coder.jinja").read_text())
    assert about_calls(recipe(tmp_path, model, *AGENT)) == []
    console = Console(width=200)
    with console.capture() as capture:
        assert show_calls(model, console)
    assert "qwen-coder" in capture.get()


def test_a_model_that_another_server_would_show_something_else_is_told_of(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "r1.jinja").read_text(), R1_END)
    (line,) = about_template(model)
    assert "earlier thoughts are left out at the next user's message and at a tool's result" in line
    assert "docs/models.md" in line


def test_kwargs_that_no_template_reads_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "r1.jinja").read_text(), R1_END)
    kwargs = "gateway.chat_template_kwargs={enable_thinking=false, thinking=1}"
    with pytest.raises(UserError, match="does not read thinking; it reads enable_thinking"):
        list(check_model(default_recipe([f"model.checkpoint={model}", "midtrain.tokens=0", kwargs])))
    with pytest.raises(ConfigError, match="would have no effect without"):
        list(check_model(default_recipe([kwargs])))


def test_a_checkpoint_at_the_default_learning_rate_is_told_of() -> None:
    checkpoint = ["model.checkpoint=/models/8b", "midtrain.tokens=0"]
    (line,) = about_rate(default_recipe(checkpoint))
    assert line.startswith("trainer.learning_rate = 0.0005 is the default") and "Set 1e-6" in line
    assert about_rate(default_recipe([*checkpoint, "trainer.learning_rate=1e-6"])) == []
    assert about_rate(default_recipe([])) == []


def test_float32_on_a_gpu_is_told_of() -> None:
    cuda = ["engine.device=cuda", "trainer.device=cpu"]
    (line,) = about_numerics(default_recipe(cuda))
    assert "numerics.dtype = 'float32'" in line and "'bfloat16'" in line
    assert about_numerics(default_recipe([*cuda, "numerics.dtype=bfloat16"])) == []
    assert about_numerics(default_recipe(["engine.device=cpu", "trainer.device=cpu"])) == []


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that works, written by étude."""
    place = tmp_path_factory.mktemp("model")
    shape = default_recipe(["model.shape.hidden_size=32", "model.shape.layers=1"]).model.shape
    assert isinstance(shape, ModelShape)
    chat = ChatTemplate.train(["return total\n"] * 4, vocab_size=300)
    model = Decoder(spec_from_shape(shape, chat.vocab_size))
    model.initialise(0)
    chat.save(place)
    save_model(place, model, chat)
    return place


def changed(model: Path, place: Path, file: str, change: Callable[[bytes], bytes | None]) -> Path:
    """A copy of a model with one file changed or deleted."""
    shutil.copytree(model, place)
    content = change((place / file).read_bytes())
    (place / file).unlink()
    if content is not None:
        (place / file).write_bytes(content)
    return place


CUT = b"\xff" * 8
"""The length of a header that no file has."""


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", lambda text: text.replace(b"qwen3_moe", b"mamba"), "mamba"),
        ("config.json", lambda text: text.replace(b'"hidden_size": 32', b'"hidden_size": 64'), "should be"),
        ("config.json", lambda _: None, "no Hugging Face checkpoint there"),
        ("model.safetensors", lambda data: CUT + data[8:], "is missing or damaged"),
        ("model.safetensors", lambda _: None, "is missing or damaged"),
        ("tokenizer_config.json", lambda _: b'{"eos_token": "<|end|>"}', "no chat template"),
        ("tokenizer.json", lambda _: b"{", "not a tokenizer"),
    ],
    ids=["model_type", "shapes", "no config", "damaged header", "no weights", "no template", "no tokenizer"],
)
def test_a_checkpoint_that_cannot_be_used_is_one_line_with_its_key(
    file: str, change: Callable[[bytes], bytes | None], words: str, small_model: Path, tmp_path: Path
) -> None:
    model = changed(small_model, tmp_path / "model", file, change)
    with pytest.raises(ConfigError, match=re.escape(f"model.checkpoint = '{model}'")) as refused:
        list(check_model(default_recipe([f"model.checkpoint={model}", "midtrain.tokens=0"])))
    assert words in str(refused.value)


def test_a_checkpoint_that_fits_is_told_of_and_answers_a_session(small_model: Path) -> None:
    config = default_recipe([f"model.checkpoint={small_model}", "midtrain.tokens=0", "trainer.learning_rate=1e-5"])
    (finding,) = check_model(config)
    assert finding.works and "are complete and match" in finding.words
    (task, heldout) = first_tasks(config, open_tasks(config))
    assert (task.split, heldout.split) == (Split.TRAIN, Split.HELDOUT)
    assert "coding harness on a fake engine" in check_session(config, task).words


def test_a_recipe_that_can_run_is_ready_from_devices_to_a_session(tmp_path: Path) -> None:
    names = [finding.name for finding in check_ready(default_recipe(), tmp_path / "run")]
    assert [name for name in names if name != "memory"] == ["devices", "ports", "model", "disk", "tasks", "session"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-agent"], "there is no program 'no-such-agent' in a sandbox"),
        (["python3", "-c", "import nowhere"], "ModuleNotFoundError: No module named 'nowhere'"),
    ],
    ids=["missing", "dies"],
)
def test_an_agent_that_cannot_work_is_found_out_by_one_session(command: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[sandboxes]\nkind = 'ns'\n")
    agent = f"harness.options.command={[*command, '{prompt}', '{temperature}']}"
    config = load_recipe(tmp_path, ["harness.kind=command", agent, "harness.options.timeout_s=60.0"])
    with pytest.raises(ConfigError, match=r"harness\.options\.command") as refused:
        check_session(config, first_tasks(config, open_tasks(config))[0])
    assert words in str(refused.value)


def test_a_run_that_measures_nothing_needs_no_held_out_task(tmp_path: Path) -> None:
    split = "[metadata.etude]\nsplit = 'train'\n"
    write_folder(tmp_path / "tasks" / "one", {"task.toml": WHOLE["task.toml"] + split})
    settings = ["tasks.family=harbor", f"tasks.folder={tmp_path / 'tasks'}", "sandboxes.kind=ns"]
    config = default_recipe([*settings, "eval.enabled=false"])
    (task,) = first_tasks(config, open_tasks(config))
    assert task.split is Split.TRAIN


EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
FAMILY = """
from etude.types import NamedChecks, Task

print("opened")

class Ones:
    def __init__(self, options, context):
        print("made")

    def size(self, split):
        return 1

    def task(self, split, index):
        checks = NamedChecks(grader="mine", options={"sise": 1})
        return Task(task_id="1", family="f", template="t", split=split, prompt="p", files={}, checks=checks)
"""


def test_a_family_is_opened_once_and_the_grader_of_its_tasks_looked_for(
    tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "family.py").write_text(FAMILY, encoding="utf-8")
    (tmp_path / "run.toml").write_text("[tasks]\nfamily = '@family.py:Ones'\n", encoding="utf-8")
    settings = [f"model.checkpoint={small_model}", "midtrain.tokens=0"]
    with pytest.raises(ConfigError, match=r"task '1' is graded by 'mine': tasks\.graders = 'mine' is no grader"):
        list(check_ready(load_recipe(tmp_path, settings), tmp_path / "run"))
    assert capsys.readouterr().out.split() == ["opened", "made"]
    near = f"tasks.graders={{mine='@{EXAMPLES}/grader.py:Near'}}"
    with pytest.raises(ConfigError, match="whose options are right, tolerance: right: Field required; sise: Extra"):
        list(check_ready(load_recipe(tmp_path, [*settings, near]), tmp_path / "run"))


def test_a_corpus_that_is_no_text_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ConfigError, match=r"image\.png is not text in UTF-8, from byte 0 on"):
        check_texts(default_recipe([f"midtrain.mixture={{'text:{tmp_path}' = 1.0}}"]))


@pytest.mark.parametrize(
    ("setting", "key"),
    [("sft.file=nowhere.jsonl", "sft.file"), ("midtrain.mixture={'text:nowhere' = 1.0}", "midtrain.mixture")],
)
def test_texts_that_are_not_here_are_named(setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*there is no 'nowhere"):
        check_texts(default_recipe([setting]))
