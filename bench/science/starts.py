"""Mid-trained models that trials start from, made once for each recipe and seed and kept in the user's cache.

    recipe ──its keys that mid-training reads──▶ digest ──▶ ~/.cache/etude/bench/science-DIGEST/, made if not there

As `etude midtrain` does it, in this process: the tokenizer, the random model, the stream of demonstrations, the steps
and the held-out loss are those of :mod:`etude.run.phases`. At this size starting a process costs as much as all steps.
"""

import json
import os
import shutil
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from bench.numerics.model import CACHE
from bench.starts import digest_of
from etude.config.recipe import RunConfig
from etude.run.phase_data import batch_schedule, open_reading
from etude.run.phase_models import copy_tokenizer, make_start, optimisation_of, prepare, read_model, save_model
from etude.run.resolve import resolve
from etude.tasks.corpora.mixture import Cursor
from etude.tokens.chat import ChatTemplate
from etude.trainer.imitation import ImitationTrainer, Loss

LOSS = "heldout_loss.json"
"""File beside the model, with the held-out loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A mid-trained model."""

    folder: Path
    loss: float
    """Cross-entropy of held-out demonstrations, in nats per token that the agent wrote."""


def prepared_start(config: RunConfig, cache: Path = CACHE) -> Start:
    """The start of a recipe, from ``cache`` or made now and left there."""
    folder = cache.expanduser() / f"science-{digest_of(config)}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            _midtrain(resolve(config), partial)
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has made the same start
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Start(folder=folder, loss=json.loads((folder / LOSS).read_text(encoding="utf-8")))


def _midtrain(config: RunConfig, folder: Path) -> None:
    """Train a model in ``folder``, which is made."""
    torch.set_num_threads(config.midtrain.threads)
    random = folder / "random"
    make_start(random, config)
    chat, model = ChatTemplate.load(random), read_model(random)
    reading = open_reading(config, "midtrain", chat, folder)
    prepare(model, config)
    ends = list(accumulate(batch_schedule(config.midtrain, reading.tokens).budgets()))
    trainer = ImitationTrainer(optimisation_of(model, config, config.midtrain, steps=len(ends)))
    cursor = Cursor()
    for step, end in enumerate(ends, start=1):
        documents, cursor = reading.stream.batch(cursor, end)
        trainer.step(step, [documents])
    loss = sum((trainer.measure([documents]) for documents in reading.heldout.values()), Loss())
    copy_tokenizer(random, folder)
    save_model(folder, model, chat)
    shutil.rmtree(random)
    (folder / LOSS).write_text(json.dumps(loss.mean) + "\n", encoding="utf-8")
