"""The draft head of a run's model: the checkpoint's own, or a new one for training.

It is added when version 0 is made from the model, and from then on is part of the weights: of versions, digests and
checkpoints.
"""

from dataclasses import replace
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.models.checkpoint import StoredCheckpoint, load_state, state_of
from etude.models.decoder import Decoder


def has_draft_head(folder: Path) -> bool:
    """Report whether a checkpoint has the weights of a draft head, regardless of its configuration."""
    stored = StoredCheckpoint(folder, draft=True)
    return f"model.layers.{stored.spec.layers}.eh_proj.weight" in stored.shapes


def with_draft_head(folder: Path, config: RunConfig) -> Decoder:
    """The phases' model in ``folder`` with a draft head: the one in ``folder``, else that of the recipe's initial
    checkpoint, else a random one.

    Raises :class:`~etude.errors.DamagedError` if a head does not fit.
    """
    stored = StoredCheckpoint(folder)
    model = Decoder(replace(stored.spec, draft=True))
    model.initialise(config.seed)
    policy = stored.shapes.keys()
    state = state_of(model) | {name: stored.read(name) for name in policy}
    sources = [folder, *([Path(config.model.checkpoint)] if config.model.checkpoint else [])]
    source = next((each for each in sources if has_draft_head(each)), None)
    if source is not None:
        given = StoredCheckpoint(source, draft=True)
        state |= {name: given.read(name) for name in given.shapes.keys() - policy}
    load_state(model, state)
    return model
