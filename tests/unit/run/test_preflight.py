"""What whoever starts a run should know, or has to change first."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from chat_formats import TEMPLATES, make_tokenizer
from etude.cli.commands.doctor import show_calls
from etude.config.loading import default_recipe, load_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, UserError
from etude.run.preflight import about_calls, about_numerics, about_template, check_ready

END, R1_END = "<|im_end|>", "<｜end▁of▁sentence｜>"
MAKE_SILENT = (("<tool_call>", "@call "), ("</tool_call>", "@"))


def checkpoint(folder: Path, template: str, end: str = END) -> Path:
    """As much of one as is looked at before a run."""
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
        check_ready(recipe(tmp_path, model, *AGENT))
    check_ready(recipe(tmp_path, model))  # the built-in agent calls nothing in this way
    assert not show_calls(model, Console(quiet=True))


def test_calls_that_are_read_in_part_are_a_warning(tmp_path: Path) -> None:
    template = (TEMPLATES / "coder.jinja").read_text().replace("value | string", "value | string | replace('<b>', '')")
    model = checkpoint(tmp_path / "model", template)
    config = recipe(tmp_path, model, *AGENT)
    (warning,) = about_calls(config)
    assert "text with quotes" in warning and str(model) in warning
    assert warning in check_ready(config)


def test_calls_that_are_read_raise_no_doubt(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "coder.jinja").read_text())
    assert about_calls(recipe(tmp_path, model, *AGENT)) == []
    console = Console(width=200)
    with console.capture() as capture:
        assert show_calls(model, console)
    assert "qwen-coder" in capture.get()


def test_a_model_that_another_server_would_show_something_else_is_told_of(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "r1.jinja").read_text(), R1_END)
    config = default_recipe([f"model.checkpoint={model}", "midtrain.tokens=0"])
    (line,) = check_ready(config)
    assert "earlier thoughts are left out at the next user's message and at a tool's result" in line
    assert "docs/models.md" in line and about_template(model) == [line]


def test_kwargs_that_no_template_reads_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "r1.jinja").read_text(), R1_END)
    kwargs = "gateway.chat_template_kwargs={enable_thinking=false, thinking=1}"
    with pytest.raises(UserError, match="does not read thinking; it reads enable_thinking"):
        check_ready(default_recipe([f"model.checkpoint={model}", "midtrain.tokens=0", kwargs]))
    with pytest.raises(ConfigError, match="would have no effect without"):
        check_ready(default_recipe([kwargs]))


def test_float32_on_a_gpu_is_told_of() -> None:
    cuda = ["engine.device=cuda", "trainer.device=cpu"]
    (line,) = about_numerics(default_recipe(cuda))
    assert "numerics.dtype = 'float32'" in line and "'bfloat16'" in line
    assert about_numerics(default_recipe([*cuda, "numerics.dtype=bfloat16"])) == []
    assert about_numerics(default_recipe(["engine.device=cpu", "trainer.device=cpu"])) == []
