"""Opening the payloads of a run, which lie in its folder or at its URL."""

from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore, RetryingStore
from etude.run.folder import RunFolder
from etude.run.store_outages import StoreOutages


def open_payloads(folder: RunFolder, outages: StoreOutages | None = None) -> Payloads:
    """Open a run's payloads; with ``outages``, storage that is away is waited for, from the first call on.

    Raises :class:`~etude.errors.UserError` for a folder that is missing and cannot be made.
    """
    objects = ObjectStore(folder.payloads)
    return Payloads(objects if outages is None else RetryingStore(folder.payloads, lambda: objects, outages))
