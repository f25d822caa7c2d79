"""Opening the weight log of a run; without torch, so that processes without a model can read it."""

import os
from contextlib import closing
from urllib.parse import urlsplit

from etude.errors import InfrastructureError, RunFolderError, UserError
from etude.ledger.archive import Archive
from etude.objects import CLOUD_SCHEMES, Objects, ObjectStore, RetryingStore, StoreOptions
from etude.run.folder import LOG_ID, RunFolder
from etude.run.store_outages import StoreOutages
from etude.weights.log import WeightLog

FAR = StoreOptions(silence_s=3.0, longest_pause_s=0.5, retries=1)
"""Options of a store that is far away: it may be silent for many round trips, and who reads it tries again by itself,
so that a link that is back is used at once.
"""
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


def open_store(
    url: str, *, creates: bool = True, log_id: str | None = None, at_least: int = 0, far: bool = False
) -> WeightLog:
    """Open the weight store at a URL, signed and checked when the environment has a key for it.

    ``log_id`` and ``at_least`` are what is known of the log from elsewhere. A folder that is missing is made if this
    ``creates``, else it raises :class:`~etude.errors.UserError`. One that is ``far`` is only read.
    """
    options = far_options(url) if far else None
    return WeightLog(ObjectStore(url, options, creates=creates), key=signing_key(), log_id=log_id, at_least=at_least)


def far_options(url: str) -> StoreOptions | None:
    """The options of a store that is only read, and the way to which may be cut; ``None`` for a folder."""
    return FAR if urlsplit(url).scheme in CLOUD_SCHEMES else None


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
