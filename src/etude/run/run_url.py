"""The URL of a run: the place of everything that a run needs on every machine and after the loss of a disk.

    files/          run.toml, model/, plugins/, weights.id, ledger.url, the report: sets of files, the newest is valid
    weights/        the weight log                      checkpoints/    copies of the newest checkpoints
    payloads/       turns, their routes and masks       events/         copies of each process's events
    data/           copies of the recipe's data         phases/         copies of mid-training's and SFT's checkpoints
    evaluations/    ledgers of `etude eval`             judge/          votes of judges and their costs
    sinks/          positions of the sinks

``s3://bucket/runs/NAME``, ``gs://``, ``az://``, or a folder that all machines see. It never contains the run key or
files of one machine: logs, locks, ports. Each machine has a working folder for its local copies
(:mod:`etude.run.working_folder`).

This module owns the names below the URL and opens them.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.errors import ConfigError
from etude.objects import CLOUD_SCHEMES, Objects, ObjectStore, RetryingStore
from etude.run.folder import RunFolder
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import MANIFESTS, StoredFiles
from etude.run.weight_log import far_options, log_id_of, signing_key

FILES, EVENTS, POSITIONS = "files", "events", "sinks"
"""Places below the URL: the files of the run, the events of its processes, the positions of its sinks."""


def normal_url(text: str) -> str:
    """Normalise ``text`` to a URL or an absolute folder, so that equal places have equal names.

    Raises :class:`~etude.errors.ConfigError`.
    """
    parts = urlsplit(text)
    if "://" not in text:
        return str(Path(text).absolute())
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return str(Path(unquote(parts.path)).absolute())
    if parts.scheme in CLOUD_SCHEMES and parts.netloc and parts.path.strip("/") and not parts.query:
        return f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}"
    raise ConfigError(
        f"{text!r} is not a URL of a run: expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or a folder"
    )


def is_run_url(text: str) -> bool:
    """True if ``text`` names a run by its URL and not by its run folder."""
    return "://" in text or (Path(text) / FILES / MANIFESTS).is_dir()


def open_place(url: str, name: str, outages: StoreOutages | None = None, *, far: bool = False) -> Objects:
    """The objects at a place below the URL; with ``outages``, unavailable storage is waited for. With ``far``, for
    storage in another region that is only read, unavailability is detected soon.
    """
    objects = ObjectStore(f"{url}/{name}", far_options(url) if far else None)
    return objects if outages is None else RetryingStore(objects.url, lambda: objects, outages)


def open_stored(url: str, name: str, outages: StoreOutages | None = None, *, far: bool = False) -> StoredFiles:
    """The sets of files at a place below the URL."""
    return StoredFiles(open_place(url, name, outages, far=far), name, signing_key())


def open_run_files(folder: RunFolder, name: str, outages: StoreOutages | None = None) -> StoredFiles:
    """The sets of files at a place of a run whose id is known: files of another run, signed with the same key, are
    excluded. The names of the files that hold the id do not contain it.
    """
    run = "" if name == FILES else log_id_of(folder) or ""
    return StoredFiles(open_place(folder.url, name, outages), f"{run}/{name}" if run else name, signing_key())
