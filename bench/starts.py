"""Models that RL starts from, mid-trained once for each recipe and kept in the user's cache.

    recipe ──its keys that mid-training reads──▶ digest ──▶ ~/.cache/etude/starts/DIGEST/, made if it is not there

Mid-training takes minutes and the same recipe comes to the same bits: a bench of what follows need not do it again.
Remove the folder to have it made anew, by other code perhaps.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from bench.loop.runs import run_midtraining
from etude.config.recipe import RunConfig
from etude.run.folder import RunFolder

READ = ("seed", "tasks", "harness", "model", "midtrain", "sft", "optimiser", "numerics")
"""Keys and sections of a recipe that decide which model mid-training ends with."""


def prepared_start(config: RunConfig) -> Path:
    """The Hugging Face folder of the model that mid-training of ``config`` ends with.

    Raises :class:`~etude.errors.InfrastructureError` if mid-training fails.
    """
    place = _cache() / digest_of(config)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as scratch:
            folder = run_midtraining(RunFolder.create(Path(scratch) / "run", config))
            shutil.move(folder.model, place)
    return place


def starting_from(model: Path) -> tuple[str, ...]:
    """``SECTION.KEY=VALUE`` that let a run of the same recipe begin with a prepared model."""
    return f"model.checkpoint={model}", "midtrain.tokens=0"


def digest_of(config: RunConfig) -> str:
    """Key of a prepared start in the cache: equal for recipes that differ only in the phases after mid-training."""
    tree = config.model_dump(mode="json")
    read = json.dumps({name: tree[name] for name in READ}, sort_keys=True)
    return hashlib.sha256(read.encode()).hexdigest()[:16]


def _cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "etude" / "starts"
