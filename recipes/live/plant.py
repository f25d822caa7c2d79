"""Two bad sets of weights, made of what users have: ``python recipes/live/plant.py RUN noise|habit OUT``.

    noise   each tensor with noise of its own size: the agent's work is worse, which the gate's held-out tasks see
    habit   trained on demonstrations that are right as often as users' agent is, and read the file three times first:
            as many held-out tasks are passed, with needless turns. Nothing but users can see that

``etude release propose RUN OUT`` makes a candidate of either. OUT is a checkpoint in Hugging Face's layout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from etude.api.run import export
from etude.config.tasks import BugfixOptions
from etude.errors import EtudeError
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.run.folder import RunFolder
from etude.run.phase_models import read_model, save_model
from etude.run.working_folder import open_run_folder
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.conversations import conversation
from etude.tasks.corpora.corpus import spoken
from etude.tasks.corpora.transcripts import BugfixDemonstrations, Message
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatFormat
from etude.trainer.imitation import predict

NOISE = 0.5
"""Standard deviation of the noise, of each tensor's own."""
STEPS, SESSIONS, LEARNING_RATE = 60, 32, 3e-4
"""Optimiser steps, demonstrations in each, and the rate: enough for one habit, a quarter of a minute."""
THREADS = 1
READS = 3
"""Times that the habit reads the file."""


def main() -> int:
    """Write one set of weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="the run folder")
    parser.add_argument("kind", choices=("noise", "habit"))
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--version", type=int, help="weight version to begin with (default: the newest)")
    parser.add_argument("--right", type=float, default=0.5, help="of a habit: share of its edits that are right")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        folder = open_run_folder(options.run, writes=False)
        plant(folder, options.kind, options.out, options.version, right=options.right, seed=options.seed)
    except EtudeError as error:
        print(f"plant: {error}", file=sys.stderr)
        return 1
    return 0


def plant(
    folder: RunFolder, kind: str, out: Path, version: int | None = None, *, right: float = 0.5, seed: int = 0
) -> None:
    """Make a checkpoint of ``version`` (default: the newest), spoilt in one of the two ways.

    Raises :class:`~etude.errors.RunFolderError` where there is no such version, or ``out`` holds something.
    """
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    export(folder.path, out, version=version)
    model, chat = read_model(out), load_format(folder.model)
    assert isinstance(model, Decoder), "what is planted is étude's own model"
    if kind == "noise":
        add_noise(model)
    else:
        teach_habit(model, chat, folder, right, seed)
    save_model(out, model, chat)


@torch.no_grad()
def add_noise(model: Decoder) -> None:
    """Add Gaussian noise to every matrix."""
    for tensor in state_of(model).values():
        if tensor.dim() > 1:
            tensor.add_(torch.randn_like(tensor) * tensor.std() * NOISE)


def teach_habit(model: Decoder, chat: ChatFormat, folder: RunFolder, right: float, seed: int) -> None:
    """Train on sessions whose edits are right with probability ``right`` and that read the file again and again."""
    config = folder.config()
    assert isinstance(config.tasks.options, BugfixOptions), "the recipe's tasks are planted bugs"
    habit = config.tasks.options.model_copy(update={"right_edit": right, "read_first": 1.0})
    demonstrations = BugfixDemonstrations(BugfixFamily(habit, seed=seed), habit)
    optimiser, rng = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), Random(f"habit|{seed}")
    for _ in range(STEPS):
        sessions = [spoken(_tiresome(demonstrations.session(rng))) for _ in range(SESSIONS)]
        documents = [conversation(chat, session, context_weight=0.0) for session in sessions]
        losses_P, weights_P, _ = predict(model, documents)
        loss = (losses_P * weights_P).sum() / weights_P.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def _tiresome(session: Sequence[Message]) -> list[Message]:
    """A session that begins with a read, with its first call and answer repeated."""
    request, read, text, *rest = session
    return [request, *READS * [read, text], *rest]


if __name__ == "__main__":
    sys.exit(main())
