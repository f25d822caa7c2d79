"""Sandboxes of an OCI runtime (Open Container Initiative): ``crun``, or gVisor's ``runsc`` on machines without
virtualisation.

    provider ──▶ namespaces (etude.sandboxes.oci.namespaces) ──▶ runtime ──▶ commands and their system calls
                                                                   └──▶ with gVisor: sentry (the kernel), gofer (files)

The runtimes are rows of a table (:mod:`etude.sandboxes.oci.runtimes`). The inside is like that of
:mod:`etude.sandboxes.ns.provider`. With gVisor a separate kernel answers, so a bug in the machine's kernel is out of a
command's reach, and a running sandbox can be forked with its memory: its sentry is checkpointed, then restored once for
the original and once per fork, with copies of the written files.

Needs root, the runtime (``runsc`` of 2022 or later), and a kernel of 6.6 or later for its overlays. A spec that needs
more than the capabilities of a row is rejected; if the machine has control groups, a sandbox that far exceeds its
limits is ended as a whole.

States of a provider: new ──create──▶ open ──close──▶ closed. Owns its folder; whatever runs ends with it.
"""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from etude.errors import ConfigError, SandboxError
from etude.sandbox_spec import Capability, Image, SandboxSpec
from etude.sandboxes.capabilities import check_sources, check_spec
from etude.sandboxes.entrypoint import services_started, started
from etude.sandboxes.images.layers import copy_tree, first_link, give_away, remove_tree
from etude.sandboxes.images.machine_base import machine_folders, write_skeleton
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.lifecycle import close_all
from etude.sandboxes.oci.bundle import RootOverlay, bundle, overlays, root_script, stage_script
from etude.sandboxes.oci.namespaces import NamespaceHolder, run_program
from etude.sandboxes.oci.runtimes import GVISOR, OciRuntime, build_statx_shim
from etude.sandboxes.oci.sandbox import OciSandbox, OciSandboxHooks
from etude.sandboxes.scratch import Scratch

TRIAL_TIMEOUT_S = 60.0
"""Timeout of the very first command."""
COPY_TIMEOUT_S = 300.0
"""Timeout for the files of one fork or snapshot."""


class OciSandboxes:
    """Makes sandboxes with an OCI runtime; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        runtime: OciRuntime = GVISOR,
        *,
        scratch: Path | None = None,
        store: ImageStore | None = None,
    ) -> None:
        """``scratch`` is the parent of the provider's folder, which has the snapshots (default: the temporary
        directory); ``store`` has the base systems, and is kept open until the provider is closed.

        Raises :class:`~etude.errors.ConfigError` if the runtime is not installed.
        """
        program = shutil.which(runtime.program)
        if program is None:
            raise ConfigError(
                f"{runtime.program!r} is not installed: on Debian or Ubuntu, apt-get install {runtime.package}"
            )
        self._runtime = runtime
        self._command = (program, *runtime.flags)
        self._parent = scratch or Path(tempfile.gettempdir())
        self._store = store
        self._bases: Mapping[str, Path] = {} if store is None else store.bases
        self._scratch: Scratch | None = None
        self._proven: frozenset[Capability] | None = None
        self._failure: SandboxError | None = None
        self._trying = asyncio.Lock()
        self._sandboxes: set[OciSandbox] = set()
        self._numbers = itertools.count(1)
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """Its capabilities on this machine; empty if no sandbox can be made."""
        async with self._trying:
            if self._proven is None:
                try:
                    self._proven = await self._try()
                except SandboxError as error:
                    self._proven, self._failure = frozenset(), error
        return self._proven

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> OciSandbox:
        """A fresh sandbox that contains ``files``.

        Raises :class:`~etude.errors.SandboxError` if it cannot be created, ``ValueError`` for a path that leaves it.
        """
        spec = spec or SandboxSpec()
        if not await self.capabilities() and self._failure is not None:
            raise SandboxError(str(self._failure)) from self._failure
        check_spec(spec, await self.capabilities(), self._runtime.kind)
        check_sources(spec, self._bases)
        sandbox = await self._make(files, spec)
        await services_started(sandbox, spec.image)
        await started(sandbox, spec.image)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox and remove all files; calling it twice is harmless."""
        self._closed = True
        failures = await close_all(self._sandboxes)
        if self._scratch is not None:
            scratch, self._scratch = self._scratch, None
            await asyncio.to_thread(scratch.close)
        self._store = None
        if failures:
            raise failures[0]

    async def _try(self) -> frozenset[Capability]:
        """Create a sandbox and run a command that fails on old runtimes; in that case build a workaround."""
        trial = await self._make({}, SandboxSpec())
        unheld = frozenset() if trial.namespaces.has_wall else {Capability.LIMIT_WALL}
        try:
            listed = await trial.exec(["ls", "/"], timeout_s=TRIAL_TIMEOUT_S)
        finally:
            await trial.close()
        if listed.exit_code:
            await asyncio.to_thread(build_statx_shim, self._open().path / "shim")
        return self._runtime.capabilities - unheld

    async def _make(self, files: Mapping[str, str], spec: SandboxSpec) -> OciSandbox:
        """A sandbox that was booted."""
        sandbox = await self._prepare(spec)
        try:
            await sandbox.namespaces.go_on()
            for path, text in files.items():
                sandbox.files.write(path, text)
            await sandbox.container.boot()
        except BaseException:
            await close_all([sandbox])
            raise
        return sandbox

    async def _prepare(self, spec: SandboxSpec) -> OciSandbox:
        """A sandbox that has a stage for its root, but no root and no memory yet."""
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if os.geteuid() != 0:
            raise SandboxError(
                f"{self._runtime.kind} sandboxes need root on this machine, to mount their files: use ns"
            )
        scratch = self._open()
        folder = scratch.create(reader=None)
        try:
            stage = scratch.path / "stage"
            (folder / "bundle").mkdir()
            (folder / "bundle" / "config.json").write_bytes(
                orjson.dumps(bundle(stage, spec.image.services, shares_kernel=self._runtime.shares_kernel))
            )
            script = stage_script(stage, spec.limits.disk_bytes) + root_script(stage, self._overlays(spec), spec)
            namespaces = await NamespaceHolder.start(script, spec.limits)
        except BaseException:
            await asyncio.to_thread(remove_tree, folder)
            raise
        sandbox = OciSandbox(self._home(scratch), namespaces, folder, spec)
        self._sandboxes.add(sandbox)
        return sandbox

    def _open(self) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch.open(self._parent)
            for name in ("stage", "shim"):
                (self._scratch.path / name).mkdir(mode=0o755)
            write_skeleton(self._scratch.path / "skeleton")
        return self._scratch

    def _home(self, scratch: Scratch) -> OciSandboxHooks:
        return OciSandboxHooks(
            runtime=self._runtime,
            command=self._command,
            stage=scratch.path / "stage",
            snapshot=self._snapshot,
            fork=self._fork_live if Capability.LIVE_FORK in self._runtime.capabilities else self._fork_files,
            forget=self._forget,
        )

    def _overlays(self, spec: SandboxSpec) -> Sequence[RootOverlay]:
        own = self._open().path
        if spec.image.base:
            return overlays(spec, (own / "shim", self._bases[spec.image.base]), {})
        machine = {"/usr": Path("/usr"), **machine_folders()}
        return overlays(spec, (own / "shim", own / "skeleton"), machine)

    async def _snapshot(self, sandbox: OciSandbox) -> Image:
        """Copy the written files, while nothing writes, into a layer that exists as long as the provider."""
        layer = self._open().path / f"layer-{next(self._numbers):06d}"
        targets = [overlay.target for overlay in self._overlays(sandbox.spec)]
        await sandbox.container.pause()
        try:
            await asyncio.to_thread(_copy_upper_folders, sandbox.stage / "upper", targets, layer)
            image = sandbox.spec.image
            await asyncio.to_thread(give_away, layer, (image.workdir, image.user.home), image.user)
        except ValueError as error:
            await asyncio.to_thread(remove_tree, layer)
            raise SandboxError(f"a sandbox cannot be kept: {error}") from error
        finally:
            await sandbox.container.resume()
        return replace(image, digest="", layers=(*image.layers, layer))

    async def _fork_files(self, sandbox: OciSandbox, count: int) -> Sequence[OciSandbox]:
        """Copy the written files, while nothing writes, and boot a container over each copy, in which the programs of
        its image start again.
        """
        forks: list[OciSandbox] = []
        await sandbox.container.pause()
        try:
            for _ in range(count):
                fork = await self._copy_files(sandbox, forks)
                await fork.container.boot()
            for fork in forks:
                await services_started(fork, sandbox.spec.image)
                await started(fork, sandbox.spec.image)
        except BaseException:
            await close_all(forks)
            raise
        finally:
            await sandbox.container.resume()
        return forks

    async def _fork_live(self, sandbox: OciSandbox, count: int) -> Sequence[OciSandbox]:
        """Save the memory, copy the written files, and wake the original and the forks."""
        memory = self._open().path / f"memory-{next(self._numbers):06d}"
        forks: list[OciSandbox] = []
        try:
            await sandbox.container.sleep(memory)
            try:
                for _ in range(count):
                    await self._copy_files(sandbox, forks)
            finally:
                waking = [each.container.wake(memory) for each in (sandbox, *forks)]
                woken = await asyncio.gather(*waking, return_exceptions=True)
            for failure in filter(None, woken):
                raise failure
        except BaseException:
            await close_all(forks)
            raise
        finally:
            await asyncio.to_thread(remove_tree, memory)
        return forks

    async def _copy_files(self, sandbox: OciSandbox, forks: list[OciSandbox]) -> OciSandbox:
        """A sandbox without memory, added to ``forks`` at once, that has the files of another with everything that the
        kernel's overlay and a sentry's memory know of them: owners, times, links.
        """
        fork = await self._prepare(sandbox.spec)
        forks.append(fork)
        line = ("cp", "-a", f"{sandbox.stage / 'upper'}/.", str(fork.stage / "upper"))
        code, printed = await run_program(line, COPY_TIMEOUT_S)
        if code:
            raise SandboxError(f"the files of a sandbox could not be copied: {printed.strip()}")
        await fork.namespaces.go_on()
        return fork

    async def _forget(self, sandbox: OciSandbox) -> None:
        await asyncio.to_thread(remove_tree, sandbox.folder)
        self._sandboxes.discard(sandbox)


def _copy_upper_folders(upper: Path, targets: Sequence[str], layer: Path) -> None:
    """Move the files written over each overlay to their path in a layer. ``ValueError`` if a link leads there."""
    copy_tree(upper / "0", layer, owned=None)
    for number, target in enumerate(targets):
        if target:
            if link := first_link(layer, target):
                raise ValueError(f"{link} was made a link, below which the machine's {target} is shown: remove it")
            place = layer / target.lstrip("/")
            remove_tree(place)  # the folder that was mounted on
            place.parent.mkdir(parents=True, exist_ok=True)
            copy_tree(upper / str(number), place, owned=None)
