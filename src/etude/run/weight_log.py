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
"""Options of a remote store: it may be silent for many round trips, and its readers retry themselves, so that a
restored link is used at once.
"""
KEY_VARIABLE = "ETUDE_WEIGHTS_KEY"
"""The environment variable with the secret that signs weight records, and manifests of files at the URL of a run; every
process of a run needs the same value.
"""


def open_log(folder: RunFolder, outages: StoreOutages | None = None) -> WeightLog:
    """Open a run's weight log, with its log id and the least version that its ledger knows.

    With ``outages``, in a process of the run, every call waits while the storage is unavailable; a user's command fails
    at once.
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

    ``log_id`` and ``at_least`` are known facts about the log. A missing folder is created with ``creates``, else it
    raises :class:`~etude.errors.UserError`. A ``far`` store is only read.
    """
    options = far_options(url) if far else None
    return WeightLog(ObjectStore(url, options, creates=creates), key=signing_key(), log_id=log_id, at_least=at_least)


def far_options(url: str) -> StoreOptions | None:
    """The options of a store that is only read over a link that may fail; ``None`` for a folder."""
    return FAR if urlsplit(url).scheme in CLOUD_SCHEMES else None


def log_id_of(folder: RunFolder) -> str | None:
    """The id of a run's weight log; ``None`` if it was not recorded."""
    file = folder.path / LOG_ID
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _opened(url: str) -> Objects:
    """A run's store. It was created with the run, so a failure to open it means that it is unavailable."""
    try:
        return ObjectStore(url, creates=False)
    except UserError as error:
        raise InfrastructureError(str(error)) from error


def signing_key() -> bytes | None:
    """The signing secret, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return key.encode() if key else None


def _committed(folder: RunFolder) -> int:
    """The newest version that the ledger knows to be published."""
    try:
        with closing(Archive.open(folder.ledger, folder.config().ledger)) as archive:
            return archive.steps_done()
    except RunFolderError:  # there is none yet
        return 0
