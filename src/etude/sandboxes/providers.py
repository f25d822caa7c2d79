"""The providers that ``sandboxes.kind`` names, opened from a recipe's options."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from etude.config.section import Section
from etude.config.tasks import LocalOptions, RemoteOptions
from etude.errors import ConfigError
from etude.protocols import SandboxProvider
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import RUNTIMES
from etude.sandboxes.qemu.provider import QemuSandboxes
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.hosts import FindHosts, HostedSandboxes

KEY_VARIABLE = "ETUDE_SANDBOXES_KEY"
"""Environment variable with the key of a remote sandbox server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """The run that a provider is created for; its own options are separate."""

    kind: str
    """``sandboxes.kind``."""
    store: ImageStore
    """The base systems."""
    find_hosts: Sequence[FindHosts] = ()
    """Readers of the directories of a fleet's sandbox hosts, if the run is on one."""


def open_local(options: LocalOptions, context: ProviderContext) -> SandboxProvider:
    """Short programs in a folder of this machine."""
    return LocalSandboxes(workers=options.workers)


def open_namespaces(options: Section, context: ProviderContext) -> SandboxProvider:
    """Sandboxes of Linux namespaces."""
    return NamespaceSandboxes(store=context.store)


def open_oci(options: Section, context: ProviderContext) -> SandboxProvider:
    """Containers of the OCI runtime named by the kind."""
    return OciSandboxes(RUNTIMES[context.kind], store=context.store)


def open_qemu(options: Section, context: ProviderContext) -> SandboxProvider:
    """Virtual machines."""
    return QemuSandboxes(store=context.store)


def open_remote(options: RemoteOptions, context: ProviderContext) -> SandboxProvider:
    """Sandboxes of one or more servers. Raises :class:`~etude.errors.ConfigError` without a server, or their key."""
    options.check_servers(on_fleet=bool(context.find_hosts))
    key = sandboxes_key()
    if options.url:
        return RemoteSandboxes(options.url, key, connections=options.connections)
    return HostedSandboxes(options.urls, key, find=context.find_hosts, connections=options.connections)


def sandboxes_key() -> str:
    """The key of sandbox servers, from the environment. Raises :class:`~etude.errors.ConfigError` if it is missing."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(f"sandboxes on another machine need their server's key: set {KEY_VARIABLE}")
    return key
