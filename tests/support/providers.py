"""Providers of sandboxes under test: how each is made, what it needs, and a stage on which scenarios are acted out."""

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import pytest

from etude.config.plugins import load
from etude.config.section import Section
from etude.config.tasks import PROVIDERS as PROVIDER_NAMES
from etude.errors import ConfigError
from etude.protocols import ExecResult, Sandbox, SandboxProvider
from etude.run.serving import listening
from etude.sandbox_spec import Capability, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.capabilities import LIMITS
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import CRUN
from etude.sandboxes.providers import ProviderContext
from etude.sandboxes.qemu.provider import QemuSandboxes
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.hosts import HostedSandboxes
from etude.sandboxes.remote.principals import Permissions, SandboxClient
from etude.sandboxes.remote.server import SandboxServer
from etude.sandboxes.warm_pool import SandboxPool

T = TypeVar("T")

KEY = "the key of a client of remote sandboxes"
SECRET = "a secret of the provider's process"
"""In the environment of the process that the provider is in, which no command may see."""
TIGHT = SandboxLimits(memory_bytes=256 << 20, disk_bytes=64 << 20, processes=32)
"""Limits of the sandboxes in tests of limits: the same for all, since a template may have to be made for them."""
TIMEOUT_S = 30.0
IMAGES = tempfile.TemporaryDirectory()
"""The store of images that a provider of one's own is made with."""
WAIT_S = 20.0
"""Timeout for concurrent work on a busy machine."""
"""For one command of a test, on a machine that is busy with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A provider whose contract is tested."""

    make: Callable[[Path], SandboxProvider]
    """Given a folder for what it has on disk, which is empty again once it is closed."""
    missing: Callable[[], str] = str
    """Why it cannot be tried on this machine; empty if it can."""
    heavy: str = ""
    """Programs that this one needs and `make test` does not require."""


class Stage:
    """A provider with an event loop of its own."""

    def __init__(self, name: str, provider: SandboxProvider, runner: asyncio.Runner, scratch: Path) -> None:
        self.name = name
        self.provider = provider
        self.scratch = scratch
        self._runner = runner
        self.claims: frozenset[Capability] = runner.run(provider.capabilities())

    def need(self, *capabilities: Capability) -> None:
        """Skip the test where the provider claims none of some capabilities."""
        if not self.claims.intersection(capabilities):
            pytest.skip(f"{self.name} does not claim {' or '.join(capabilities)}")

    @property
    def tight(self) -> SandboxSpec:
        """Close limits, as far as the provider claims to keep them."""
        usual = SandboxLimits()
        close = {name: getattr(TIGHT if claim in self.claims else usual, name) for name, claim in LIMITS.items()}
        return SandboxSpec(limits=SandboxLimits(**close))

    def run(self, action: Awaitable[T]) -> T:
        """Await something."""

        async def act() -> T:
            return await action

        return self._runner.run(act())

    def play(
        self,
        scenario: Callable[[Sandbox], Awaitable[T]],
        files: Mapping[str, str] | None = None,
        spec: SandboxSpec | None = None,
    ) -> T:
        """Act out a scenario in a fresh sandbox."""

        async def act() -> T:
            sandbox = await self.provider.create(files or {}, spec)
            try:
                return await scenario(sandbox)
            finally:
                await sandbox.close()

        return self._runner.run(act())

    def python(
        self, code: str, *, stdin: str = "", timeout_s: float = TIMEOUT_S, spec: SandboxSpec | None = None
    ) -> ExecResult:
        """Run a program in a fresh sandbox."""
        return self.play(lambda sandbox: python(sandbox, code, stdin=stdin, timeout_s=timeout_s), spec=spec)


async def python(sandbox: Sandbox, code: str, *, stdin: str = "", timeout_s: float = TIMEOUT_S) -> ExecResult:
    """Run a program."""
    return await sandbox.exec(["python3", "-c", code], stdin=stdin, timeout_s=timeout_s)


async def output(sandbox: Sandbox, code: str) -> str:
    """Output of a program that succeeds."""
    result = await python(sandbox, code)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def stage(name: str, make: Callable[[Path], SandboxProvider]) -> Iterator[Stage]:
    """Set the stage for a provider, and see that it leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        scratch = Path(folder)
        scratch.chmod(0o711)  # without a root of their own, commands must get there
        os.environ["ETUDE_TEST_SECRET"] = SECRET
        try:
            made = Stage(name, make(scratch), runner, scratch)
            yield made
            runner.run(made.provider.close())
        finally:
            os.environ.pop("ETUDE_TEST_SECRET", None)  # another provider's stage may have stood beside this one
        assert list(scratch.iterdir()) == []


def needs(*programs: str, root: bool = False) -> Callable[[], str]:
    """Missing programs or rights."""

    def missing() -> str:
        lacks = [f"{program} is not installed" for program in programs if shutil.which(program) is None]
        return ", ".join([*lacks, *(["it needs root"] if root and os.geteuid() != 0 else [])])

    return missing


class AnyPlace:
    """A list of places that has all of them: tests listen where they can."""

    def __contains__(self, place: object) -> bool:
        return True


class OverHttp:
    """A provider behind a server and a client of remote sandboxes, in one event loop."""

    def __init__(self, inner: SandboxProvider, folders: Sequence[Path] = ()) -> None:
        """``folders`` of this machine may be named by the client."""
        self.inner = inner
        permissions = Permissions(allow=AnyPlace(), folders=folders, images=_no_image)
        client = SandboxClient(digest=hashlib.sha256(KEY.encode()).hexdigest(), permissions=permissions)
        self.server = SandboxServer(inner, {"tests": client})
        self._open = AsyncExitStack()
        self._client: RemoteSandboxes | None = None

    async def client(self) -> RemoteSandboxes:
        """The client, once the server listens."""
        if self._client is None:
            port = await self._open.enter_async_context(listening(self.server.app(), 0))
            self._client = RemoteSandboxes(f"http://127.0.0.1:{port}", KEY)
        return self._client

    async def capabilities(self) -> frozenset[Capability]:
        return await (await self.client()).capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        return await (await self.client()).create(files, spec)

    async def close(self) -> None:
        await (await self.client()).close()
        assert len(self.server) == 0
        await self._open.aclose()
        await self.inner.close()


class OverHosts:
    """A provider for each of two hosts, and a client that chooses between them, in one event loop."""

    def __init__(self, *inner: SandboxProvider, folders: Sequence[Path] = ()) -> None:
        """``folders`` of this machine may be named by the client."""
        self.hosts = [OverHttp(each, folders) for each in inner]
        self._open = AsyncExitStack()
        self._client: HostedSandboxes | None = None

    async def client(self) -> HostedSandboxes:
        """The client, once all servers listen."""
        if self._client is None:
            servers = [host.server.app() for host in self.hosts]
            ports = [await self._open.enter_async_context(listening(server, 0)) for server in servers]
            self._client = HostedSandboxes([f"http://127.0.0.1:{port}" for port in ports], KEY)
        return self._client

    async def capabilities(self) -> frozenset[Capability]:
        return await (await self.client()).capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        return await (await self.client()).create(files, spec)

    async def close(self) -> None:
        await (await self.client()).close()
        assert [len(host.server) for host in self.hosts] == [0, 0]
        await self._open.aclose()
        for host in self.hosts:
            await host.inner.close()


def _no_image(reference: str) -> Image:
    raise ConfigError(f"there is no image {reference!r}")


def no_virtual_machines() -> str:
    """Why no virtual machine can be had: programs, or a base system, which takes minutes to build."""
    try:
        QemuSandboxes()
    except ConfigError as error:
        return str(error)
    return ""


def example(scratch: Path) -> SandboxProvider:
    """The provider of ``docs/extending.md``."""
    place = Path(__file__).parents[2] / "examples" / "extend" / "provider.py"
    options = cast("type[Section]", load(f"@{place}:ZoneOptions", "a test"))
    context = ProviderContext(kind="example", store=ImageStore(Path(IMAGES.name)))
    return cast("SandboxProvider", PROVIDER_NAMES.make(f"@{place}:Zoned", options(), context))


PROVIDERS: dict[str, Candidate] = {
    "local": Candidate(make=lambda scratch: LocalSandboxes(2, scratch)),
    "local without namespaces": Candidate(make=lambda scratch: LocalSandboxes(2, scratch, isolate=False)),
    "example": Candidate(make=example),
    "crun": Candidate(
        make=lambda scratch: OciSandboxes(CRUN, scratch=scratch),
        missing=needs("crun", root=True),
        heavy="crun, and root",
    ),
    "gvisor": Candidate(
        make=lambda scratch: OciSandboxes(scratch=scratch),
        missing=needs("runsc", root=True),
        heavy="runsc, and root",
    ),
    "remote, over ns": Candidate(make=lambda scratch: OverHttp(NamespaceSandboxes(scratch=scratch), [Path("/tmp")])),
    "hosts, over ns": Candidate(
        make=lambda scratch: OverHosts(
            *(NamespaceSandboxes(scratch=scratch) for _ in range(2)), folders=[Path("/tmp")]
        ),
        heavy="minutes, beside remote over ns",
    ),
    "remote, over local": Candidate(
        make=lambda scratch: OverHttp(LocalSandboxes(2, scratch), [Path("/tmp")]),
        heavy="minutes, beside remote over ns",
    ),
    "ns": Candidate(make=lambda scratch: NamespaceSandboxes(scratch=scratch)),
    "pool, over ns": Candidate(make=lambda scratch: SandboxPool(NamespaceSandboxes(scratch=scratch))),
    "qemu": Candidate(
        make=lambda scratch: QemuSandboxes(scratch=scratch),
        missing=no_virtual_machines,
        heavy="QEMU, and a base system",
    ),
}
"""All that must pass the contract suite."""
