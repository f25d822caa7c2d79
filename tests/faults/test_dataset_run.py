"""A run of questions of a file, asked in a single turn: mathematics as a reward, tasks chosen, groups sampled again."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from etude.ledger.ledger import TRAIN
from etude.run.folder import RunFolder
from etude.run.stores import open_ledger

REPOSITORY = Path(__file__).parents[2]
STEPS = 3
DEADLINE_S = 600.0
"""A bound on what hangs, not on what a busy machine is slow at."""
SETTINGS = (
    *("model.shape.hidden_size=32", "model.shape.layers=1", "model.shape.heads=2", "model.shape.kv_heads=2"),
    *("model.shape.head_dim=16", "model.shape.experts=4", "model.shape.expert_size=32"),
    *("midtrain.tokens=4000", "midtrain.batch_tokens=400", f"trainer.steps={STEPS}", "eval.tasks=8"),
    *("rollouts.groups_per_step=2", "rollouts.group_size=4", "rollouts.concurrency=16", "rollouts.max_resamples=3"),
    *("tasks.options.match=math", "tasks.selection.kind=thompson"),
)

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.mark.heavy("a minute")
def test_ten_lines_and_a_file_train_a_model(tmp_path: Path) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    out = tmp_path / "run"
    command = [sys.executable, "-m", "etude", "run", "recipes/arithmetic", "--out", str(out), *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=REPOSITORY)
    assert result.returncode in (0, 3), result.stdout + result.stderr  # 3: nothing was learnt
    report = orjson.loads((out / "report.json").read_bytes())
    assert report["finished"] is True
    assert report["steps"] == STEPS
    assert report["heldout"]["n"] == 8
    assert report["learning"]["groups_resampled"] >= 0
    assert all(0 <= step["selection_distance"] <= 1 for step in report["curve"])
    folder = RunFolder.open(out)
    with open_ledger(folder) as ledger:
        groups = list(ledger.groups(TRAIN))
        left_out = [ledger.resampled(step) for step in range(1, STEPS + 1)]
    assert sum(left_out) == report["learning"]["groups_resampled"]
    assert len({(group.task.task_id, group.epoch) for group in groups}) == len(groups)
    assert all(0 < group.weight <= 5 for group in groups)
