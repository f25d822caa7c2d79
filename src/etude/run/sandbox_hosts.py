"""The sandbox hosts of a fleet, which join and leave while the run lives: each announces its URL in its region's store.

    etude sandboxes serve --announce STORE ──▶ STORE/processes/sandboxes-1@eu/… ──▶ rollouts: HostedSandboxes

Entries are signed with a key derived from that of the hosts (``ETUDE_SANDBOXES_KEY``), not with a key of the run: a
program that escapes from a sandbox must not be able to sign the URL of a gateway or an engine. The key is in the
signature only as a hash, so it has to be too long to be guessed.

This module owns the entries of hosts; :mod:`etude.run.directory` owns their form, and
:mod:`etude.sandboxes.remote.hosts` the use of what is found.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from etude.config.tasks import RemoteOptions, SandboxConfig
from etude.errors import ConfigError, InfrastructureError
from etude.objects import Objects, ObjectStore, RetryingStore
from etude.run.directory import PROCESSES, Directory
from etude.run.folder import RunFolder
from etude.run.keys import SHORTEST, KeyRole, derive_key
from etude.run.placement import fleet_of, region_store
from etude.run.process_name import SANDBOXES, ProcessName
from etude.run.region_stores import own_address
from etude.run.store_outages import StoreOutages
from etude.run.weight_log import far_options
from etude.sandboxes.providers import KEY_VARIABLE, sandboxes_key
from etude.sandboxes.remote.hosts import FindHosts


@asynccontextmanager
async def announced(store: str, name: ProcessName, port: int) -> AsyncIterator[None]:
    """Announce a host that listens on ``port`` of this machine in the store of its region, while the context is open;
    this waits while the store is unavailable.

    Raises :class:`~etude.errors.ConfigError` without a key, or for one that is too short.
    """
    place, url = f"{store.rstrip('/')}/{PROCESSES}", f"http://{own_address()}:{port}"
    with StoreOutages(place, 0.0) as outages:
        directory = host_directory(RetryingStore(place, partial(ObjectStore, place), outages))
        await asyncio.to_thread(directory.announce, name, url)
        try:
            yield
        finally:
            outages.close()  # an unavailable store must not keep a host from stopping
            with suppress(InfrastructureError):
                await asyncio.to_thread(directory.withdraw, name, url)


def fleet_hosts(folder: RunFolder, sandboxes: SandboxConfig) -> Sequence[FindHosts]:
    """Readers of the directories in which the sandbox hosts of a run are found, those of all regions of its fleet; none
    if it is on one machine, or if its recipe uses other sandboxes.

    Raises :class:`~etude.errors.ConfigError` without the key of hosts, or for one that is too short.
    """
    fleet, options = fleet_of(folder), sandboxes.options
    if fleet is None or not isinstance(options, RemoteOptions) or options.url:
        return ()
    stores = [region_store(folder, "" if region.name == fleet.home else region.name) for region in fleet.regions]
    places = [f"{store}/{PROCESSES}" for store in stores]
    return [partial(_urls, host_directory(ObjectStore(place, far_options(place)))) for place in places]


def host_directory(objects: Objects) -> Directory:
    """The hosts that are announced in ``objects``. Raises :class:`~etude.errors.ConfigError` without their key, or for
    one that is too short.
    """
    key = sandboxes_key()
    if len(key) < SHORTEST:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters: the key of a fleet's sandbox hosts has at least {SHORTEST}, "
            f"e.g. of `openssl rand -hex 32`"
        )
    return Directory(objects, derive_key(key, KeyRole.DIRECTORY))


async def _urls(directory: Directory) -> Collection[str]:
    return (await asyncio.to_thread(directory.urls, SANDBOXES.command)).values()
