"""A run on another project's checkpoint, with its tokenizer and chat template, from the phases to an export.

The weights are random, so nothing is learnt. The test shows that every process, and every reader of a run, supports
tokens that étude did not make.
"""

from pathlib import Path

import pytest

from etude.tokens.jinja import load_format
from own_checkpoint import make_checkpoint
from tiny_runs import FINISHED, run_etude

RECIPE = """
name = "own-model"
[model]
checkpoint = "{checkpoint}"
[midtrain]
tokens = 0
[tasks.options]
kinds = ["arith"]
[harness.options]
max_turns = 2
max_tokens_per_turn = 8
[hints]
weight = 0.1
[rollouts]
groups_per_step = 1
group_size = 2
concurrency = 4
[engine]
device = "cpu"
[trainer]
device = "cpu"
steps = 2
[eval]
tasks = 2
"""

pytestmark = pytest.mark.timeout(600)


@pytest.mark.heavy("a minute")
def test_a_foreign_checkpoint_goes_through_the_whole_loop(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(checkpoint=make_checkpoint(tmp_path / "model")))
    # Random weights solve no task, but may write a call that fails: its hint teaches a few tokens.
    run_etude("run", recipe, "--out", run, statuses=FINISHED)
    shown = run_etude("show", run, "--group", 0)
    assert "<|im_start|>" not in shown
    run_etude("weights", "export", run, tmp_path / "hf")
    assert load_format(tmp_path / "hf").stop_ids == load_format(tmp_path / "model").stop_ids
