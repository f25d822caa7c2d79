"""Whether this machine has what a recipe names: found before there is a run, not by one of its processes.

Owns the looking; what is looked for is explained by the sections of the recipe. A recipe alone says nothing of it, so
``--dry-run`` does not ask.
"""

from pathlib import Path

from etude.config.recipe import RunConfig
from etude.config.tasks import OF_FOLDER
from etude.errors import ConfigError, UserError
from etude.run.decisions import check_devices
from etude.run.endpoints import probe_ports
from etude.run.families import open_family
from etude.run.rollouts import harness_mounts


def check_ready(config: RunConfig) -> None:
    """Raise :class:`~etude.errors.UserError` for a device, folder or port that a new run would not have."""
    check_devices(config)
    checkpoint = Path(config.model.checkpoint)
    if config.model.checkpoint and not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"model.checkpoint = {config.model.checkpoint!r}: no Hugging Face checkpoint there, as {Path.cwd()} has no "
            f"{checkpoint / 'config.json'}"
        )
    harness_mounts(config.harness.mounts)
    if config.tasks.family in OF_FOLDER:
        try:
            open_family(config)
        except UserError as error:
            raise ConfigError(f"tasks.folder: {error}") from error
    probe_ports(config)
