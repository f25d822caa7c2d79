"""`etude weights export`: a version of a run as an ordinary checkpoint. The one of these commands that takes
torch.
"""

from pathlib import Path

from etude.cli.commands.weights import log_of, require_empty
from etude.errors import RunFolderError
from etude.models.checkpoint import load_spec
from etude.run.folder import RunFolder
from etude.run.numerics import checkpoint_extra
from etude.run.phases import hand_down, save_state
from etude.tokens.jinja import load_format
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors


def export_run(folder: RunFolder, out: Path, version: int | None) -> int:
    """Write a version as a Hugging Face checkpoint, tokenizer included; returns the version.

    Raises :class:`~etude.errors.RunFolderError` when ``out`` cannot be written or already holds something.
    """
    require_empty(out)
    pulled = pull(log_of(str(folder.path)), version)
    chat, spec = load_format(folder.model), load_spec(folder.model)
    state = to_tensors(pulled.state)
    extra = checkpoint_extra(state, folder.config().numerics)
    try:
        save_state(out, spec, state, chat, extra)
        hand_down(folder.model, out)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}") from error
    return pulled.version
