"""Opens the stores of a run: its ledger with the payloads, its releases, its live sessions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.feedback.archive import SessionArchive
from etude.feedback.store import FeedbackStore
from etude.ledger.archive import Archive
from etude.ledger.heartbeat import leased
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.ledger.record_index import RecordIndex
from etude.objects import ObjectStore, RetryingStore
from etude.releases.store import ReleaseStore
from etude.run.folder import RunFolder, feedback_place, holder
from etude.run.process_name import ProcessName
from etude.run.store_outages import StoreOutages
from etude.telemetry.log import EventLog


def open_payloads(folder: RunFolder, outages: StoreOutages | None = None, *, syncs: bool = False) -> Payloads:
    """Open a run's payloads. With ``outages``, calls wait for storage that is unreachable; with ``syncs``, what was
    stored is durable on disk, like the commits of the ledger.

    Raises :class:`~etude.errors.UserError` for a folder that is missing and cannot be created.
    """
    objects = ObjectStore(folder.payloads, syncs=syncs)
    return Payloads(objects if outages is None else RetryingStore(folder.payloads, lambda: objects, outages))


def open_archive(folder: RunFolder, index: RecordIndex | None = None) -> Archive:
    """Open a run's ledger for reading, with its payloads if they are there; only reading turns needs them. ``index`` is
    what earlier readers learnt.

    Raises as :meth:`Archive.open <etude.ledger.archive.Archive.open>` does.
    """
    is_there = bool(folder.url) or Path(folder.payloads).is_dir()
    payloads = open_payloads(folder) if is_there else None
    return Archive.open(folder.ledger, folder.config().ledger, payloads=payloads, index=index)


def open_ledger(folder: RunFolder) -> Ledger:
    """Open a run's ledger and its payloads without a lease. Raises as :meth:`~etude.ledger.ledger.Ledger.open` does."""
    return Ledger.open(folder.ledger, folder.config().ledger, payloads=open_payloads(folder, syncs=True))


def open_releases(folder: RunFolder, *, read_only: bool = False) -> ReleaseStore:
    """Open a run's releases, beside its ledger. Raises as :meth:`ReleaseStore.open
    <etude.releases.store.ReleaseStore.open>` does.
    """
    return ReleaseStore.open(folder.ledger, folder.config().ledger, read_only=read_only)


def open_feedback(folder: RunFolder) -> FeedbackStore:
    """Open the live sessions and signals of a run. Raises :class:`~etude.errors.UserError` where it keeps none."""
    window_s = folder.config().feedback.window_s
    if not window_s:
        raise UserError(f"{folder.path} keeps no live sessions: its recipe has feedback.window_s = 0")
    return FeedbackStore.open(feedback_place(folder), window_s=window_s)


def open_sessions(folder: RunFolder) -> SessionArchive:
    """Open the live sessions of a run for reading. Raises :class:`~etude.errors.UserError` if it keeps or has none."""
    if not folder.config().feedback.window_s:
        raise UserError(f"{folder.path} keeps no live sessions: its recipe has feedback.window_s = 0")
    return SessionArchive.open(feedback_place(folder))


@contextmanager
def leased_ledger(
    folder: RunFolder, config: RunConfig, name: ProcessName, events: EventLog, *, lease: str = ""
) -> Iterator[Ledger]:
    """A process's connection to a run's ledger and its payloads, under the lease of its own name or ``lease``.

    Raises as :func:`~etude.ledger.heartbeat.leased` does.
    """
    with StoreOutages(folder.payloads, config.rollouts.max_outage_s, events) as outages:
        payloads = open_payloads(folder, outages, syncs=True)
        with leased(
            folder.ledger, config.ledger, name=lease or str(name), holder=holder(folder, name), payloads=payloads
        ) as ledger:
            yield ledger
