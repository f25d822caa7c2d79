"""Whole runs of a few steps, of a tiny random model: a start for a recipe, and `etude run` in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from etude.config.loading import default_recipe
from etude.errors import ExitCode
from etude.run.launchers.fork_server import THREADING
from etude.run.phase_models import make_start

DEADLINE_S = 1700
"""Timeout for a hung run, long enough for a slow machine."""
FINISHED = (ExitCode.DONE, ExitCode.NOTHING_LEARNT)
"""Ends of a run that did all its steps: so small a model may learn nothing."""
SHAPE = ("hidden_size=32", "layers=1", "heads=2", "kv_heads=2", "head_dim=16", "experts=4", "expert_size=32")


def make_tiny_start(folder: Path) -> Path:
    """A checkpoint of étude's own kind, in ``folder``."""
    folder.mkdir()
    make_start(folder, default_recipe([f"model.shape.{key}" for key in SHAPE]))
    return folder


def run_etude(*arguments: object, statuses: Container[int] = (ExitCode.DONE,)) -> str:
    """Run a command of étude's to its end, which must have one of the statuses; returns what it printed."""
    command = [sys.executable, "-m", "etude", *map(str, arguments)]
    environment = {**THREADING, **os.environ}
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)
    assert result.returncode in statuses, result.stdout + result.stderr
    return result.stdout + result.stderr
