"""Opening the log of a run's weight versions; it needs no torch, so that processes without a model can read it."""

import os
from contextlib import closing

from etude.errors import RunFolderError
from etude.ledger.archive import Archive
from etude.run.folder import RunFolder
from etude.weights.log import WeightLog
from etude.weights.store import ObjectStore

KEY_VARIABLE = "ETUDE_WEIGHTS_KEY"
"""The environment variable with the secret that signs weight records; every process of a run needs the same."""


def open_log(folder: RunFolder) -> WeightLog:
    """The weight versions of a run: of its own log, and none older than its ledger says there is."""
    return open_store(folder.store, log_id=folder.log_id, at_least=_committed(folder))


def open_store(url: str, *, creates: bool = True, log_id: str | None = None, at_least: int | None = None) -> WeightLog:
    """The weight versions at a URL, signed and checked when the environment has a key for it.

    ``log_id`` and ``at_least`` are what is known of the log from elsewhere. A folder that is missing is made if this
    ``creates``, else it raises :class:`~etude.errors.UserError`.
    """
    key = os.environ.get(KEY_VARIABLE)
    store = ObjectStore(url, creates=creates)
    return WeightLog(store, key=key.encode() if key else None, log_id=log_id, at_least=at_least)


def _committed(folder: RunFolder) -> int | None:
    """The newest version that the ledger knows to be published; ``None`` before the first step."""
    try:
        with closing(Archive.open(folder.ledger, folder.config().ledger)) as archive:
            return archive.steps_done() or None
    except RunFolderError:  # there is none yet
        return None
