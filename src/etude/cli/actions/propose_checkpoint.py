"""`etude release propose`: asks the release process of a run to make weights from elsewhere a candidate."""

import getpass
import shutil
from pathlib import Path

from etude.clock import unix_s
from etude.errors import ConfigError
from etude.models.checkpoint import StoredCheckpoint, load_spec
from etude.releases.store import ReleaseRequest, RequestKind
from etude.run.numerics import unfilled_model
from etude.run.stores import open_releases
from etude.run.working_folder import open_run_folder

PROPOSALS = "proposals"
"""Folder of a run with copies of proposed checkpoints, since the originals may be changed or deleted."""


def propose_checkpoint(run: str, checkpoint: Path, by: str) -> None:
    """Check a checkpoint and propose a copy of it, by a person or else by this user.

    Raises :class:`~etude.errors.UserError` if the run cannot take it.
    """
    folder = open_run_folder(run)
    config = folder.config()
    if not config.release.enabled:
        raise ConfigError(f"{run} releases nothing: its recipe has release.every_steps = 0")
    if config.lora.trains("rl"):
        raise ConfigError(f"{run} trains adapters over frozen weights: whole weights cannot be proposed (lora.rank)")
    impl = config.model.impl
    StoredCheckpoint(checkpoint, impl).check(unfilled_model(load_spec(folder.model, impl), config.numerics, "cpu"))
    with open_releases(folder) as store:
        copy = folder.path / PROPOSALS / f"{int(unix_s() * 1e6)}"
        shutil.copytree(checkpoint, copy)
        name = by or getpass.getuser()
        store.ask(ReleaseRequest(kind=RequestKind.PROPOSE, by=name, at=unix_s(), checkpoint=str(copy.absolute())))
    print(f"proposed; follow it with: etude release status {run}")
