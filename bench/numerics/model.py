"""The model of `bench numerics`: trained for a minute, for routers of random weights choose unlike real ones.

Reads the Python standard library byte by byte, and is kept between calls under the digest of what it read and of how.
"""

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson

from bench.engine.models import END_ID, INIT_STD, MOE_64E8, PAD_ID, BenchModel
from etude.config.imitation import MidtrainConfig
from etude.config.recipe import RunConfig
from etude.models.checkpoint import CONFIG_FILE, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.run.phase_models import optimisation_of
from etude.trainer.imitation import ImitationTrainer
from etude.types import Document, Ids

CACHE = Path("~/.cache/etude/bench")
_TEXT_BYTES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schooling:
    """Training of the model; equal recipes share a cache."""

    model: BenchModel = MOE_64E8
    steps: int = 160
    rows: int = 8
    row_tokens: int = 192
    learning_rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedModel:
    """A checkpoint with the text that it was trained on."""

    folder: Path
    text: Ids
    """[n] bytes."""

    def excerpts(self, count: int, tokens: int, *, seed: int) -> list[list[int]]:
        """Pieces of the text from random places: prompts."""
        starts = np.random.default_rng(seed).integers(len(self.text) - tokens, size=count)
        return [self.text[start : start + tokens].tolist() for start in starts]


def trained_model(schooling: Schooling, cache: Path, say: Callable[[str], None]) -> TrainedModel:
    """The model from ``cache``, or made now and left there; ``say`` gets a line on which."""
    text = _text()
    line = orjson.dumps([asdict(schooling), hashlib.sha256(text.tobytes()).hexdigest()], option=orjson.OPT_SORT_KEYS)
    folder = cache.expanduser() / f"numerics-{hashlib.sha256(line).hexdigest()[:16]}"
    if (folder / CONFIG_FILE).is_file():
        say(f"trained model from {folder}, made by an earlier call")
    else:
        say(f"training {schooling.model.name} for {schooling.steps} steps; kept in {folder}")
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            _train(schooling, text, partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return TrainedModel(folder=folder, text=text)


def _text() -> Ids:
    """Source of the standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: list[bytes] = []
    missing = _TEXT_BYTES
    for file in sorted(folder.glob("*.py")):
        if missing > 0:
            texts.append(file.read_bytes()[:missing])
            missing -= len(texts[-1])
    return np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)


def _train(schooling: Schooling, text: Ids, folder: Path) -> None:
    model = Decoder(schooling.model.spec)
    model.initialise(schooling.seed, INIT_STD)
    tokens = schooling.rows * schooling.row_tokens
    settings = MidtrainConfig(batch_tokens=tokens, learning_rate=schooling.learning_rate)
    trainer = ImitationTrainer(optimisation_of(model, RunConfig(), settings, steps=schooling.steps))
    for step, documents in zip(range(1, schooling.steps + 1), _batches(schooling, text), strict=False):
        trainer.step(step, [documents])
    save_checkpoint(folder, schooling.model.spec, state_of(model), end_id=END_ID, pad_id=PAD_ID)


def _batches(schooling: Schooling, text: Ids) -> Iterator[Sequence[Document]]:
    """Rows from random places, without end."""
    random = np.random.default_rng(schooling.seed)
    weights = np.ones(schooling.row_tokens, np.float32)
    while True:
        starts = random.integers(len(text) - schooling.row_tokens, size=schooling.rows)
        yield [Document(token_ids=text[start : start + schooling.row_tokens], weights=weights) for start in starts]
