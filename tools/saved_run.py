"""What this version of étude writes, for later ones to open: `python tools/saved_run.py tests/compatibility`.

    VERSION.tar.xz    run/      a run of three steps: recipe, ledger, weight log, checkpoints, payloads, events, report
                      suite/    a suite that it was tried at          results/  these tries
                      recipes/  every recipe that is shipped, with the files that it names; fleets/ likewise

A release leaves one behind (CONTRIBUTING.md), and `tests/compatibility` opens all that there are. The run is as small
as one can be that has every kind of file: its model has seven thousand parameters.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from etude.config.loading import shipped_recipes

ROOT = Path(__file__).parents[1]
RECIPE = """
name = "saved"
tasks.options.kinds = ["arith"]
engine.max_length = 1536
log.page = false
midtrain = { tokens = 4000, batch_tokens = 1000, warmup_steps = 1, mixture = { code = 0.34, sessions = 0.66 } }
rollouts = { groups_per_step = 2, group_size = 4, max_staleness = 1, concurrency = 8 }
trainer = { steps = 3, mismatch_share = 1.0 }
effort = { weight = 1.0, prices = { call_tokens = 0.01, final_tokens = 0.01 } }
eval.tasks = 2
harness.options = { max_turns = 2, max_tokens_per_turn = 128 }

[model.shape]
vocab_size = 300
hidden_size = 16
layers = 1
heads = 1
kv_heads = 1
head_dim = 8
experts = 2
expert_size = 16
"""
"""The model solves nothing; only the reward's price of effort gives a training signal, so that versions differ."""
SUITE = """
name = "saved"
version = "1"
split = "heldout"
tasks = { family = "bugfix", options = { kinds = ["arith"] } }
sandboxes.kind = "local"
"""
LEFT_OUT = (".*.lock", ".*.beat", "*-shm", "endpoints.json", "logs", "step-00000004", "step-00000002")
"""Files that are of no use once their processes have ended; the last are checkpoints that newer ones have replaced."""
BESIDE = ("*.toml", "*.py", "*.yaml", "*.calibration.json")
"""Files that a shipped recipe may name."""


def write(out: Path) -> Path:
    """Play the run and write what it left into a new archive in ``out``; returns its path."""
    archive = out / f"{version('etude')}.tar.xz"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "saved"
        place.mkdir()
        _play(Path(scratch), place)
        _copy_recipes(place)
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for part in sorted(place.iterdir()):
                tar.add(part, arcname=part.name, filter=_anonymous)
    return archive


def _play(scratch: Path, place: Path) -> None:
    """Run the recipe, and try the suite at its last version; both as a user does."""
    recipe = scratch / "recipe.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    (place / "suite").mkdir()
    (place / "suite/suite.toml").write_text(SUITE, encoding="utf-8")
    run = scratch / "run"
    _etude("run", recipe, "--out", run)
    _etude("suite", "run", place / "suite", "--run", run, "--tasks", 1, "--out", place / "results")
    shutil.copytree(run, place / "run", ignore=shutil.ignore_patterns(*LEFT_OUT))


def _etude(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "etude", *map(str, arguments)], check=True)


def _copy_recipes(place: Path) -> None:
    for name, recipe in shipped_recipes().items():
        _copy_beside(recipe.parent, place / "recipes" / name)
    _copy_beside(ROOT / "examples/fleet", place / "fleets")


def _copy_beside(folder: Path, to: Path) -> None:
    to.mkdir(parents=True)
    for pattern in BESIDE:
        for file in folder.glob(pattern):
            shutil.copy(file, to)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry without the user who made it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    written = write(Path(sys.argv[1]))
    print(f"{written}: {written.stat().st_size:,} bytes")
