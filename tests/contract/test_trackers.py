"""Sinks for trackers with the real packages, offline: a run is interrupted, resumed, and read by the packages.

The packages are in their own Python environment.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from run_events import small_run, step, write

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-trackers" / "bin" / "python"
SUPPORT = REPOSITORY / "tests" / "support"


def call(script: str, *arguments: str, folder: Path) -> str:
    offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment = os.environ | offline | {"PYTHONPATH": str(REPOSITORY / "src"), "HOME": str(folder)}
    command = [str(PYTHON), str(SUPPORT / script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy("trackers: make .venv-trackers/stamp", missing=not PYTHON.exists())
@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_a_resumed_run_goes_on_in_the_same_run_of_its_tracker(kind: str, tmp_path: Path) -> None:
    options = {"url": f"sqlite:///{tmp_path}/ml.db"} if kind == "mlflow" else {}
    write(tmp_path / "events", list(small_run(2)))
    call("feed_tracker.py", kind, json.dumps(options), str(tmp_path), folder=tmp_path)
    write(tmp_path / "events", [("train", step(2)), ("train", step(3))])  # the second is done again
    (tmp_path / "report.html").write_text("<html>")
    call("feed_tracker.py", kind, json.dumps(options), str(tmp_path), folder=tmp_path)
    read = json.loads(call("read_tracker.py", kind, str(tmp_path), folder=tmp_path).splitlines()[-1])
    assert read["runs"] == 1
    assert read["rewards"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert read["seed"] == "7"
    assert "(hidden)" in read["hidden"][0]
    assert "sk-secret" not in json.dumps(read)
    assert len(set(read["tables"])) == 1
    assert read["texts"] == ["<script>text of rollout100", "<script>text of rollout0"]
    assert len(read["files"]) >= 1
    if kind != "trackio":  # which names artefacts by their content
        assert "report.html" in read["files"]
