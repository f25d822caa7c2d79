"""The mid-training process: a tokenizer, a model from random weights, weight version 0.

Safe to kill and start again: nothing counts until version 0 is committed, and then there is nothing left to do.
"""

import torch

from etude.environments.corpus import Corpus, tokenizer_texts
from etude.models.checkpoint import save_checkpoint, spec_from_config, state_of
from etude.models.decoder import Decoder
from etude.run.decisions import resolve_device
from etude.run.families import open_practice
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate
from etude.trainer.midtrain import midtrain


def run_midtraining(folder: RunFolder) -> None:
    """Train from scratch and publish version 0, unless that has been done."""
    log = open_log(folder)
    if log.read(0) is not None:
        return
    config = folder.config()
    torch.set_num_threads(config.midtrain.threads)
    practice = open_practice(config)
    chat = ChatTemplate.train(tokenizer_texts(practice, config.seed), config.model.vocab_size)
    spec = spec_from_config(config.model, chat.vocab_size)
    model = Decoder(spec)
    model.initialise(config.seed)
    model.to(resolve_device(config.trainer.device))
    corpus = Corpus(practice, chat, config.midtrain)
    with EventLog(folder.events, "midtrain") as events:
        midtrain(model, corpus.batches(config.seed), config.midtrain, events.write)
        save_checkpoint(folder.model, spec, state_of(model), end_id=chat.end_id, pad_id=chat.pad_id)
        chat.save(folder.model)
        with WeightPublishing(log, config.name, events) as publishing:
            publishing.start(published_state(model, config.numerics), 0)
            publishing.land()
