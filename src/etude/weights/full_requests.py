"""Calls for help: a reader whom no sound way leads on says so, and the publisher answers with everything.

Without them a reader behind a lost pack would wait for the next anchor. A plea is an empty object that names the
version to be published whole. That version is two ahead, so that all ranks of the trainer see the plea before any of
them starts on it, and decide alike. Pleas are not signed: all that they can bring about is a large version.
"""

from contextlib import suppress

from etude.errors import InfrastructureError
from etude.types import WeightVersion
from etude.weights.log import WeightLog
from etude.weights.store import PLEA_FOLDER

AHEAD = 2
"""How far beyond the newest version the whole one shall be."""


def plead(log: WeightLog) -> None:
    """Ask for a whole version soon. A reader that may not write, or cannot, waits for the next anchor."""
    with suppress(InfrastructureError):
        newest = log.latest()
        if newest is not None:
            log.store.put_if_absent(_key(newest + AHEAD), b"")


def is_pleaded(log: WeightLog, before: WeightVersion, version: int, *, alone: bool) -> bool:
    """Whether ``version`` shall be whole; ``before`` is the one before it, of which it would else be a change.

    What asks for ``version`` speaks of older ones than ``before``, hence counts for nothing when that is whole. Who
    decides ``alone`` need not wait and answers what asks for the next version, too.
    """
    if alone and log.store.exists(_key(version + 1)):
        return True
    return before.base is not None and log.store.exists(_key(version))


def _key(version: int) -> str:
    return f"{PLEA_FOLDER}/{version:08d}"
