"""Opening the weight log of a run; without torch, so that processes without a model can read it."""

import os
from contextlib import closing

from etude.errors import InfrastructureError, RunFolderError, UserError
from etude.ledger.archive import Archive
from etude.objects import Objects, ObjectStore, RetryingStore
from etude.run.folder import LOG_ID, RunFolder
from etude.run.store_outages import StoreOutages
from etude.weights.log import WeightLog

KEY_VARIABLE = "ETUDE_WEIGHTS_KEY"
"""The environment variable with the secret that signs weight records, and manifests of files at the URL of a run; every
process of a run needs the same.
"""


def open_log(folder: RunFolder, outages: StoreOutages | None = None) -> WeightLog:
    """Open a run's weight log, with its log id and the least version that its ledger knows.

    With ``outages``, of a process of the run, storage that is away is waited for, from the first call on; a person's
    command is told at once.
    """
    store: Objects
    if outages is None:
        store = ObjectStore(folder.store, creates=False)
    else:
        store = RetryingStore(folder.store, lambda: _opened(folder.store), outages)
    return WeightLog(store, key=signing_key(), log_id=log_id_of(folder), at_least=_committed(folder))


def open_store(url: str, *, creates: bool = True, log_id: str | None = None, at_least: int = 0) -> WeightLog:
    """Open the weight store at a URL, signed and checked when the environment has a key for it.

    ``log_id`` and ``at_least`` are what is known of the log from elsewhere. A folder that is missing is made if this
    ``creates``, else it raises :class:`~etude.errors.UserError`.
    """
    return WeightLog(ObjectStore(url, creates=creates), key=signing_key(), log_id=log_id, at_least=at_least)


def log_id_of(folder: RunFolder) -> str | None:
    """The id of a run's weight log; ``None`` where it was not recorded."""
    file = folder.path / LOG_ID
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _opened(url: str) -> Objects:
    """A run's store, which was made with the run: where it cannot be opened it is away."""
    try:
        return ObjectStore(url, creates=False)
    except UserError as error:
        raise InfrastructureError(str(error)) from error


def signing_key() -> bytes | None:
    """The secret, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return key.encode() if key else None


def _committed(folder: RunFolder) -> int:
    """The newest version that the ledger knows to be published."""
    try:
        with closing(Archive.open(folder.ledger, folder.config().ledger)) as archive:
            return archive.steps_done()
    except RunFolderError:  # there is none yet
        return 0
