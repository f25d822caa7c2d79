"""A weight version of a run as an ordinary checkpoint in Hugging Face's layout."""

from pathlib import Path

from etude.errors import RunFolderError
from etude.models.checkpoint import load_spec
from etude.run.folder import RunFolder, require_empty
from etude.run.numerics import checkpoint_extra
from etude.run.phases import hand_down, save_state
from etude.run.weight_log import open_log
from etude.tokens.jinja import load_format
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors


def export_run(folder: RunFolder, out: Path, version: int | None) -> int:
    """Write a version (default: the newest) as a Hugging Face checkpoint, tokenizer included; returns the version.

    Raises :class:`~etude.errors.RunFolderError` when ``out`` cannot be written or already holds something.
    """
    require_empty(out)
    pulled = pull(open_log(folder), version)
    chat, spec = load_format(folder.model), load_spec(folder.model, folder.config().model.impl)
    state = to_tensors(pulled.state)
    extra = checkpoint_extra(state, folder.config().numerics)
    try:
        save_state(out, spec, state, chat, extra)
        hand_down(folder.model, out)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}") from error
    return pulled.version
