"""A run whose engine is ``sglang``, from recipe to report, with a stand-in for SGLang's server."""

from pathlib import Path

import pytest

from etude.api.run import open_run
from sglang_server import stand_in
from tiny_runs import DEADLINE_S, make_tiny_start, run_etude

STEPS = 2
K3 = 1e-4
"""Largest mismatch of engine and trainer, whose sums are made in another order."""
RECIPE = """
[midtrain]
tokens = 0

[harness.options]
max_turns = 2
max_tokens_per_turn = 8

[rollouts]
groups_per_step = 2
group_size = 4
concurrency = 8

[trainer]
steps = 2

[eval]
enabled = false
"""


@pytest.mark.heavy("minutes")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_is_sampled_by_sglang_and_its_routes_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE, encoding="utf-8")
    settings = (
        f"model.checkpoint={make_tiny_start(tmp_path / 'checkpoint')}",
        "engine.kind=sglang",
        f"engine.options.python={stand_in(tmp_path)}",
        "engine.device=cpu",
        "trainer.device=cpu",
        "numerics.replay=full",
    )
    arguments = [each for setting in settings for each in ("--set", setting)]
    run_etude("run", str(tmp_path / "run.toml"), *arguments, "--out", str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert len(run.steps()) == STEPS
    assert all(step.metrics["k3"] < K3 for step in run.steps())
    assert all(rollout.reward is not None for rollout in run.rollouts())
