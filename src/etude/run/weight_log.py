"""Opening the log of a run's weight versions; it needs no torch, so that processes without a model can read it."""

import os

from etude.run.folder import RunFolder
from etude.weights.log import WeightLog
from etude.weights.store import ObjectStore

KEY_VARIABLE = "ETUDE_WEIGHTS_KEY"
"""The environment variable with the secret that signs weight records; every process of a run needs the same."""


def open_log(folder: RunFolder) -> WeightLog:
    """The weight versions of a run."""
    return open_store(str(folder.store))


def open_store(url: str, *, creates: bool = True) -> WeightLog:
    """The weight versions at a URL, signed and checked when the environment has a key for it.

    A folder that is missing is made if this ``creates``, else it raises :class:`~etude.errors.UserError`.
    """
    key = os.environ.get(KEY_VARIABLE)
    return WeightLog(ObjectStore(url, creates=creates), key=key.encode() if key else None)
