"""What a run is refused for, or warned of, before there is one: tool calls that could not be read."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from chat_formats import TEMPLATES, make_tokenizer
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.run.doctor import show_calls
from etude.run.readiness import check_ready

END = "<|im_end|>"
MAKE_SILENT = (("<tool_call>", "@call "), ("</tool_call>", "@"))


def checkpoint(folder: Path, template: str) -> Path:
    folder.mkdir()
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    return folder


def recipe(tmp_path: Path, model: Path, *settings: str) -> RunConfig:
    (tmp_path / "run.toml").write_text("[sandboxes]\nkind = 'ns'\n")
    return load_recipe(tmp_path, [f"model.checkpoint={model}", "midtrain.tokens=0", *settings])


AGENT = ("harness.kind=command", "harness.command=['agent', '{prompt}', '{temperature}']", "harness.timeout_s=60.0")


def test_calls_that_no_grammar_reads_refuse_a_run_whose_agent_may_need_them(tmp_path: Path) -> None:
    template = (TEMPLATES / "qwen.jinja").read_text()
    for mark, other in MAKE_SILENT:
        template = template.replace(mark, other)
    model = checkpoint(tmp_path / "model", template)
    with pytest.raises(ConfigError, match=r"no grammar reads.*chat_template\.jinja"):
        check_ready(recipe(tmp_path, model, *AGENT))
    assert check_ready(recipe(tmp_path, model)) == ()  # the built-in agent calls nothing in this way
    assert not show_calls(model, Console(quiet=True))


def test_calls_that_are_read_in_part_are_a_warning(tmp_path: Path) -> None:
    template = (TEMPLATES / "coder.jinja").read_text().replace("value | string", "value | string | replace('<b>', '')")
    model = checkpoint(tmp_path / "model", template)
    doubts = check_ready(recipe(tmp_path, model, *AGENT))
    assert len(doubts) == 1 and "text with quotes" in doubts[0] and str(model) in doubts[0]


def test_calls_that_are_read_raise_no_doubt(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", (TEMPLATES / "coder.jinja").read_text())
    assert check_ready(recipe(tmp_path, model, *AGENT)) == ()
    console = Console(width=200)
    with console.capture() as capture:
        assert show_calls(model, console)
    assert "qwen-coder" in capture.get()
