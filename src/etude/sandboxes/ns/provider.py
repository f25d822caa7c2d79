"""The embedded provider: sandboxes made of Linux namespaces, with or without root.

    provider ──▶ launcher (etude.sandboxes.ns.launcher) ──▶ a sandbox's first process ──▶ init
                     └──▶ commands                       see ns_calls, ns_child, ns_root, ns_filter, ns_cgroups

Inside: a base system (the machine's own programs, read-only, or a stored one) under the layers of an image under the
written files, in memory; separate users, processes, network, host name and IPC; no capabilities, a system call filter,
limits of memory, processes and disk. Written files are in memory: they count as memory and as disk.

Only the machine's root has: a range of users for every sandbox, hence a root inside that builds images (``IMAGES``,
``SNAPSHOT``); and control groups, without which memory is limited only per process (``MEMORY_LIMIT``). Without root
these three are missing: all files are the agent's and the system is read-only. No user in a sandbox maps to the
machine's root: the kernel's files check the writer's user, not its capabilities.

All sandboxes share the machine's kernel: a boundary for models in training, not for hostile tenants. For those:
:mod:`etude.sandboxes.oci.provider`, :mod:`etude.sandboxes.qemu`.

States of a provider: new ──create──▶ open ──close──▶ closed. Owns its folder and its launcher; when the provider is
killed, the launcher ends everything, and the next provider removes the folder.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from etude.errors import SandboxError
from etude.sandbox_spec import Capability, Image, SandboxSpec
from etude.sandboxes.capabilities import check_sources, demands, unsupported
from etude.sandboxes.command_io import in_memory
from etude.sandboxes.egress import EgressProxy
from etude.sandboxes.entrypoint import services_started, started
from etude.sandboxes.folders import Folder
from etude.sandboxes.images.layers import remove_tree
from etude.sandboxes.images.machine_base import machine_folders, write_skeleton
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.lifecycle import all_or_none, close_all
from etude.sandboxes.ns import wire
from etude.sandboxes.ns.cgroups import MEMORY
from etude.sandboxes.ns.link import LauncherGone, LauncherLink
from etude.sandboxes.ns.root import HOSTNAME, MAX_LAYERS, AllowedPlace, hosts_text, places
from etude.sandboxes.ns.sandbox import HandleArguments, NamespaceSandbox, NamespaceSandboxHooks
from etude.sandboxes.scratch import Scratch

NAME = "ns"
START_TIMEOUT_S = 60.0
"""Timeout for building a sandbox; it takes some 20 ms on an idle machine."""
ALWAYS = frozenset(
    {
        *(Capability.CONFINED, Capability.PROCESSES_APART, Capability.NETWORK_OFF, Capability.ALLOW_LIST),
        *(Capability.PROCESS_LIMIT, Capability.DISK_LIMIT, Capability.COUNTERS_APART),
        *(Capability.BACKGROUND, Capability.FORK),
    }
)
"""Capabilities on any machine that can make a sandbox."""


class NamespaceSandboxes:
    """Makes sandboxes with namespaces; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        *,
        scratch: Path | None = None,
        store: ImageStore | None = None,
    ) -> None:
        """``scratch`` is the parent of the provider's folder (default: the temporary directory), which holds snapshots;
        ``store`` has the base systems, and is kept open until the provider is closed.
        """
        self._parent = scratch or Path(tempfile.gettempdir())
        self._store = store
        self._bases: Mapping[str, Path] = {} if store is None else store.bases
        self._scratch: Scratch | None = None
        self._home: NamespaceSandboxHooks | None = None
        self._proven: frozenset[Capability] | None = None
        self._opening = asyncio.Lock()
        self._sandboxes: set[NamespaceSandbox] = set()
        self._lent: dict[Path, int] = {}  # layer made for forks → number of its users
        self._layers_made = 0
        self._closed = False

    @property
    def launcher_pid(self) -> int | None:
        """The process that owns all others of this provider; ``None`` before the first sandbox."""
        return None if self._home is None else self._home.link.pid

    async def capabilities(self) -> frozenset[Capability]:
        """Its capabilities on this machine; empty if no sandbox can be made."""
        if self._proven is None:
            try:
                home = await self._open()
                probe = await self._make({}, SandboxSpec(), home)
                try:
                    works = (await probe.exec(["true"], timeout_s=START_TIMEOUT_S)).exit_code == 0
                finally:
                    await probe.close()
            except SandboxError:
                if self._closed:
                    raise
                return frozenset()  # not cached: a temporary shortage may end
            self._proven = _capabilities(home.link.grants) if works else frozenset()
        return self._proven

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> NamespaceSandbox:
        """A fresh sandbox that holds ``files``; the first one also starts the launcher.

        Raises :class:`~etude.errors.SandboxError` if it cannot be made or a shown path is missing, and ``ValueError``
        for a path that leaves it.
        """
        home = await self._open()
        spec = spec or SandboxSpec()
        granted = _capabilities(home.link.grants)
        for capability, words in demands(spec).items():
            if capability not in granted:
                raise unsupported(NAME, words, "it as root, or qemu")
        try:
            sandbox = await self._make(files, spec, home)
        except LauncherGone:  # it was killed, before this request or during it, with everything of the sandbox
            sandbox = await self._make(files, spec, await self._open())
        await services_started(sandbox, spec.image)
        await started(sandbox, spec.image)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox and the launcher and remove all files; calling it twice is harmless."""
        self._closed = True
        async with self._opening:
            await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)), return_exceptions=True)
            if self._home is not None:
                await self._home.link.close()
                self._home = None
            if self._scratch is not None:
                await asyncio.to_thread(self._scratch.close)
                self._scratch = None
            self._store = None

    async def _open(self) -> NamespaceSandboxHooks:
        async with self._opening:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._home is not None and self._home.link.is_closed:
                await self._home.link.close()  # the launcher was killed, and all its sandboxes with it
                self._home = None
            if self._home is None:
                self._home = await self._start()
            return self._home

    async def _start(self) -> NamespaceSandboxHooks:
        if self._scratch is None:
            self._scratch = Scratch.open(self._parent)
        skeleton = self._scratch.path / "skeleton"
        if not skeleton.exists():
            await asyncio.to_thread(write_skeleton, skeleton)
        folder = tempfile.mkdtemp(prefix="launcher-", dir=self._scratch.path)
        link = await LauncherLink.start(wire.Options(folder=folder, skeleton=str(skeleton)))
        return NamespaceSandboxHooks(link=link, snapshot=self._snapshot, fork=self._fork, forget=self._forget)

    async def _make(self, files: Mapping[str, str], spec: SandboxSpec, home: NamespaceSandboxHooks) -> NamespaceSandbox:
        link, reachable = home.link, places(spec.allow)
        creation = self._creation(spec, reachable, link.next_number())
        inside = Folder(Path("/"), owner=None, inside="/", workdir=spec.image.workdir)
        texts = {f"/{inside.place(path)}": text for path, text in files.items()}
        first_files = in_memory(orjson.dumps(texts) if texts else b"")
        link.watch_box(creation["box"])
        try:
            made = await _ask_for(link, creation, first_files)
            egress = EgressProxy()
            await egress.open(reachable, made["descriptors"])
            self._hold(spec.image.layers)
            sandbox = NamespaceSandbox(home, HandleArguments(box=creation["box"], spec=spec, egress=egress))
            self._sandboxes.add(sandbox)
        except BaseException:
            with suppress(SandboxError):  # it ended with its launcher
                await link.send({"kind": "close", "box": creation["box"]})
            raise
        finally:
            os.close(first_files)
        try:
            if made["unsettled"]:
                await sandbox.job("settle", {})
        except BaseException:
            await close_all([sandbox])
            raise
        return sandbox

    def _creation(self, spec: SandboxSpec, reachable: Sequence[AllowedPlace], number: int) -> wire.CreateOrder:
        image, limits = spec.image, spec.limits
        system = {} if image.base else machine_folders()
        check_sources(spec, self._bases)
        if len(image.layers) > MAX_LAYERS:
            raise SandboxError(f"an image of {len(image.layers)} layers, at most {MAX_LAYERS}: build it of fewer")
        return wire.CreateOrder(
            box=number,
            root=str(self._bases[image.base]) if image.base else "",
            layers=[str(layer.absolute()) for layer in image.layers],
            system={target: str(path) for target, path in system.items()},
            shown={target: str(path.absolute()) for target, path in sorted(spec.mounts.items())},
            places=[list(place) for place in reachable],
            hosts=hosts_text(reachable, HOSTNAME, spec.names) if reachable or spec.names or image.base else "",
            workdir=image.workdir,
            user=[image.user.uid, image.user.gid, image.user.home],
            roots=[service.root for service in image.services],
            as_root=spec.user == "root",
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            processes=limits.processes,
            cpus=limits.cpus,
        )

    async def _snapshot(self, sandbox: NamespaceSandbox) -> Image:
        home = await self._open()
        if Capability.SNAPSHOT not in _capabilities(home.link.grants):
            raise unsupported(NAME, "a snapshot", "it as root, or qemu")
        image = sandbox.spec.image
        self._hold(image.layers)  # permanently
        return replace(image, digest="", layers=(*image.layers, await self._copy_layer(sandbox)))

    async def _fork(self, sandbox: NamespaceSandbox, count: int) -> Sequence[NamespaceSandbox]:
        image = sandbox.spec.image
        layer = await self._copy_layer(sandbox)
        spec = replace(sandbox.spec, image=replace(image, digest="", layers=(*image.layers, layer)))
        self._lent[layer] = 0
        self._hold(spec.image.layers)  # until all are made
        try:
            home = await self._open()
            return await all_or_none(self._restart(spec, home) for _ in range(count))
        finally:
            await self._release(spec.image.layers)

    async def _restart(self, spec: SandboxSpec, home: NamespaceSandboxHooks) -> NamespaceSandbox:
        """Make a sandbox in which everything that its image starts runs afresh."""
        sandbox = await self._make({}, spec, home)
        await services_started(sandbox, spec.image)
        await started(sandbox, spec.image)
        return sandbox

    async def _copy_layer(self, sandbox: NamespaceSandbox) -> Path:
        assert self._scratch is not None, "a sandbox has outlived its provider"
        self._layers_made += 1
        layer = self._scratch.path / f"layer-{self._layers_made:06d}"
        layer.mkdir(mode=0o755)
        try:
            await sandbox.job("copy", {"into": str(layer)})
        except BaseException:
            await asyncio.to_thread(remove_tree, layer)
            raise
        return layer

    async def _forget(self, sandbox: NamespaceSandbox) -> None:
        """Forget a sandbox that has been closed."""
        self._sandboxes.discard(sandbox)
        await self._release(sandbox.spec.image.layers)

    def _hold(self, layers: Sequence[Path]) -> None:
        """Count one more user of layers; layers made for forks are removed with their last user."""
        for layer in set(layers) & self._lent.keys():
            self._lent[layer] += 1

    async def _release(self, layers: Sequence[Path]) -> None:
        """Count one user of layers less."""
        for layer in set(layers) & self._lent.keys():
            self._lent[layer] -= 1
            if self._lent[layer] == 0:
                del self._lent[layer]
                await asyncio.to_thread(remove_tree, layer)


def _capabilities(grants: Mapping[str, Any]) -> frozenset[Capability]:
    """Capabilities from the grants of a launcher."""
    images = {Capability.IMAGES, Capability.IMAGE_SERVICES, Capability.SNAPSHOT} if grants["maps_range"] else set()
    counted = {Capability.MEMORY_LIMIT} if MEMORY in grants["controllers"] else set()
    return ALWAYS | images | counted


async def _ask_for(link: LauncherLink, creation: wire.CreateOrder, files: int) -> dict[str, Any]:
    """Request a sandbox from the launcher. Raises ``ValueError`` for files with invalid paths,
    else ``SandboxError``.
    """
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await (await link.ask({"kind": "create", "id": creation["box"], **creation}, (files,)))
    except TimeoutError:
        raise SandboxError(f"no sandbox could be made within {START_TIMEOUT_S:g} s") from None
