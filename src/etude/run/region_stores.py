"""The stores of a fleet's regions, as used by the processes of a run: weights and endpoints.

    REGION'S STORE/weights/       the region's copy of the weight log: a relay's, or the run's own at home
    REGION'S STORE/processes/     the URLs of the region's processes (:mod:`etude.run.directory`)

A process in a region only reads its weights from there, so that versions cross a long distance once and the region
continues while it is cut off. Without a fleet everything is at home.
"""

import os
import socket
from functools import partial

from etude.errors import ConfigError
from etude.objects import ObjectStore, RetryingStore
from etude.run.directory import PROCESSES, Directory
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.placement import region_store
from etude.run.store_outages import StoreOutages
from etude.run.weight_log import far_options, log_id_of, open_log, signing_key
from etude.weights.log import WeightLog

WEIGHTS = "weights"
"""Folder of a store with the weight log."""
ADDRESS_VARIABLE = "ETUDE_ADDRESS"
"""Environment variable with the address at which other machines reach this one; by default that of its host name."""

PORT_VARIABLE = "ETUDE_PORT"
"""Environment variable with the port of an engine or a gateway that has an address of its own, such as a pod's."""
LAST_PORT = 65_535


def weights_url(folder: RunFolder, region: str) -> str:
    """The URL of the weight log that processes of a region read."""
    return f"{region_store(folder, region)}/{WEIGHTS}" if region else folder.store


def open_region_log(folder: RunFolder, region: str, outages: StoreOutages) -> WeightLog:
    """Open the weight log that processes of a region read."""
    if not region:
        return open_log(folder, outages)
    url = weights_url(folder, region)
    objects = RetryingStore(url, partial(ObjectStore, url), outages)
    return WeightLog(objects, key=signing_key(), log_id=log_id_of(folder))


def open_directory(folder: RunFolder, region: str, outages: StoreOutages | None = None) -> Directory:
    """Open the directory of a region's processes: to read it or, with ``outages``, to announce a process, which waits
    while the store is unavailable.
    """
    url, key = f"{region_store(folder, region)}/{PROCESSES}", folder.key(KeyRole.DIRECTORY)
    if outages is None:
        return Directory(ObjectStore(url, far_options(url)), key)
    return Directory(RetryingStore(url, partial(ObjectStore, url), outages), key)


def own_address() -> str:
    """The address at which other machines reach this one."""
    return os.environ.get(ADDRESS_VARIABLE, "").strip() or socket.gethostbyname(socket.gethostname())


def own_port() -> int:
    """The port of :data:`PORT_VARIABLE`; 0 without it. Raises :class:`~etude.errors.ConfigError` if it is no port."""
    given = os.environ.get(PORT_VARIABLE, "").strip() or "0"
    if not given.isdecimal() or int(given) > LAST_PORT:
        raise ConfigError(f"{PORT_VARIABLE}={given!r} is no port: give a number up to {LAST_PORT}, or unset it")
    return int(given)
