"""A run with the engine ``sglang``, from recipe to report, with a substitute for SGLang's server."""

from pathlib import Path

import pytest

from etude.api.run import open_run
from sglang_server import stand_in
from tiny_runs import DEADLINE_S, make_tiny_start, run_etude

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
STEPS = 3
K3 = 1e-4
"""Largest mismatch of engine and trainer, whose sums are made in another order."""


@pytest.mark.heavy("minutes")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_is_sampled_by_sglang_and_its_routes_are_replayed(tmp_path: Path) -> None:
    settings = (
        f"model.checkpoint={make_tiny_start(tmp_path / 'checkpoint')}",
        "log.to=[]",
        "engine.kind=sglang",
        f"engine.options.python={stand_in(tmp_path)}",
        "engine.device=cpu",
        "trainer.device=cpu",
        "numerics.replay=full",
        "rollouts.max_staleness=0",  # so that each step is sampled with the weights of the one before
        "rollouts.concurrency=8",
    )
    arguments = [each for setting in settings for each in ("--set", setting)]
    run_etude("run", str(EXAMPLES), *arguments, "--out", str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    steps = run.steps()
    assert len(steps) == STEPS
    assert all(step.metrics["k3"] < K3 for step in steps)
    assert {rollout.last_version for rollout in run.rollouts()} == {0, 1, 2}
