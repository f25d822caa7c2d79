"""Who takes part in `bench sandbox`: our providers, through the protocol, and other people's programs.

Owns how a contestant is opened and asked for starts, and why one is missing. What programs do is
:mod:`bench.sandbox.programs`'; rounds and judging are :mod:`bench.sandbox.bench`'s.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, final

from bench.sandbox.programs import PROGRAMS, Launch, Launcher
from etude.errors import InfrastructureError
from etude.protocols import SandboxProvider
from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.qemu.provider import QemuSandboxes

NS, GVISOR, QEMU = "ns", "gvisor", "qemu"
SPEC = SandboxSpec()
"""Sandbox spec of our providers: the usual limits, no network."""
COMMAND_TIMEOUT_S = 60.0


class Contestant(Protocol):
    """Starts sandboxes, one after the other or some at a time."""

    @property
    def name(self) -> str:
        """Name in rows and goals."""
        ...

    async def launch(self, argv: Sequence[str], *, seconds: float = 0.0, at_once: int = 1) -> Sequence[Launch]:
        """Start, run a command and remove, again and again for so long, but once at least.

        Raises :class:`~etude.errors.EtudeError` when that fails.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class ProgramContestant:
    """A program, started by a launcher."""

    name: str
    launcher: Launcher

    async def launch(self, argv: Sequence[str], *, seconds: float = 0.0, at_once: int = 1) -> Sequence[Launch]:
        """Have the launcher do it."""
        return await asyncio.to_thread(self.launcher.launch, self.name, argv, seconds=seconds, at_once=at_once)


@final
@dataclass(frozen=True, slots=True)
class ProviderContestant:
    """A provider of ours."""

    name: str
    provider: SandboxProvider
    spec: SandboxSpec = SPEC

    async def launch(self, argv: Sequence[str], *, seconds: float = 0.0, at_once: int = 1) -> Sequence[Launch]:
        """Create, run and close."""
        ends_s = time.perf_counter() + seconds

        async def again() -> list[Launch]:
            launches: list[Launch] = []
            while not launches or time.perf_counter() < ends_s:
                launches.append(await self._launch(argv))
            return launches

        return [launch for launches in await asyncio.gather(*(again() for _ in range(at_once))) for launch in launches]

    async def _launch(self, argv: Sequence[str]) -> Launch:
        began_s = time.perf_counter()
        sandbox = await self.provider.create({}, self.spec)
        try:
            result = await sandbox.exec(argv, timeout_s=COMMAND_TIMEOUT_S)
            ran_s = time.perf_counter() - began_s
        finally:
            await sandbox.close()
        if result.exit_code:
            raise InfrastructureError(f"{self.name} was not measured: {result.stderr.strip() or result.exit_code}")
        return Launch(ran_s, time.perf_counter() - began_s)


def ns_provider(folder: Path) -> SandboxProvider:
    """Linux namespaces."""
    return NamespaceSandboxes(scratch=folder)


def gvisor_provider(folder: Path) -> SandboxProvider:
    """GVisor. Raises :class:`~etude.errors.ConfigError` where it is not installed."""
    return OciSandboxes(scratch=folder)


def qemu_provider(folder: Path) -> SandboxProvider:
    """Virtual machines. Raises :class:`~etude.errors.ConfigError` where the base system is not built."""
    return QemuSandboxes(scratch=folder)


def unbooted_provider(folder: Path) -> SandboxProvider:
    """Virtual machines without any earlier boot: only base systems are stored. Raises like :func:`qemu_provider`."""
    store = folder / "store"
    store.mkdir()
    (store / "bases").symlink_to(ImageStore().folder / "bases")
    return QemuSandboxes(store=ImageStore(store), scratch=folder)


PROVIDERS: Final[Mapping[str, Callable[[Path], SandboxProvider]]] = MappingProxyType(
    {NS: ns_provider, GVISOR: gvisor_provider, QEMU: qemu_provider}
)
"""Ours, by name; each is given a folder of its own."""
CONTESTANTS: Final = (*PROVIDERS, *PROGRAMS)
"""All, ours first."""
