"""A weight version of a run as an ordinary checkpoint in Hugging Face's layout, or an adapter as a PEFT folder."""

from pathlib import Path

from torch import Tensor

from etude.errors import RunFolderError, UserError
from etude.models.adapters import attach, base_of, is_adapter, merge
from etude.models.checkpoint import load_spec, load_state, state_of
from etude.models.decoder import Decoder
from etude.models.peft import write_peft
from etude.run.folder import RunFolder, require_empty
from etude.run.numerics import DTYPES, adapter_spec, checkpoint_extra
from etude.run.phase_models import copy_tokenizer, read_model, save_state
from etude.run.weight_log import open_log
from etude.tokens.jinja import load_format
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors


def export_run(folder: RunFolder, out: Path, version: int | None, *, peft: bool = False) -> int:
    """Write a version (default: the newest) as a Hugging Face checkpoint, tokenizer included; returns the version.

    An adapter is merged into its base, or with ``peft`` written as a PEFT folder. Raises
    :class:`~etude.errors.RunFolderError` when ``out`` cannot be written or already holds something, and
    :class:`~etude.errors.UserError` for ``peft`` of a run that trains whole weights.
    """
    require_empty(out)
    pulled = pull(open_log(folder), version)
    chat, spec = load_format(folder.model), load_spec(folder.model, folder.config().model.impl)
    state = to_tensors(pulled.state)
    if peft and not is_adapter(state):
        raise UserError(f"{folder.path} trains whole weights, not adapters (lora.rank = 0): leave --peft out")
    try:
        if peft:
            write_peft(out, state, spec, base_name=str(folder.model))
            return pulled.version
        if is_adapter(state):
            state = _merged(folder, state)
        extra = checkpoint_extra(state, folder.config().numerics)
        save_state(out, spec, state, chat, extra)
        copy_tokenizer(folder.model, out)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}") from error
    return pulled.version


def _merged(folder: RunFolder, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a base and its adapter, added in float32 and rounded to the type that the run publishes."""
    config, model = folder.config(), read_model(folder.model)
    assert isinstance(model, Decoder), "refused with the recipe"
    attach(model, adapter_spec(config), base=base_of(state))
    load_state(model, state)
    merge(model)
    return {name: tensor.to(DTYPES[config.numerics.stored_dtype]) for name, tensor in state_of(model).items()}
