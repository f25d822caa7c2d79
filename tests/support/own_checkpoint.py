"""A checkpoint that étude did not make: a tiny random model with Qwen's chat template and a tokenizer to go with it."""

import json
from dataclasses import replace
from pathlib import Path

from chat_formats import TEMPLATES, make_tokenizer
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY

END = "<|im_end|>"


def make_checkpoint(folder: Path, **settings: str) -> Path:
    """Write it into a folder, with further ``settings`` of the tokenizer."""
    tokenizer = make_tokenizer()
    spec = replace(TINY, vocab_size=tokenizer.get_vocab_size())
    model = Decoder(spec)
    model.initialise(0)
    end_id = tokenizer.token_to_id(END)
    assert end_id is not None
    save_checkpoint(folder, spec, state_of(model), end_id=end_id, pad_id=end_id)
    return with_tokenizer(folder, **settings)


def with_tokenizer(folder: Path, **settings: str) -> Path:
    """Write the tokenizer alone, beside a model of its vocabulary."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": (TEMPLATES / "qwen.jinja").read_text(), **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
