"""`etude doctor`: what works on this machine, one line for each part.

Parts are tried as far as that takes a few seconds: no virtual machine is booted, no server is called.
"""

import asyncio
import importlib.util
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.config.tasks import PROVIDERS, SandboxConfig
from etude.dashboard import formatting
from etude.dashboard.terminal import DIM, GOOD, WARN
from etude.errors import ConfigError, SandboxError
from etude.models.invariant import InvariantArithmetic
from etude.protocols import SandboxProvider
from etude.run.machine_info import describe_machine
from etude.run.preflight import MachineFinding
from etude.run.task_sandboxes import base_store, open_kind
from etude.sandbox_spec import Capability
from etude.sandboxes.qemu.provider import QemuSandboxes

NOT_TRIED = ("qemu", "remote")
"""Kinds of sandbox that are not tried, since they would boot a machine or need a server."""
SANDBOX_NEEDS = (Capability.CONFINED, Capability.NETWORK_OFF, Capability.PROCESSES_APART)
"""Capabilities that a sandbox needs to run a model's programs."""


def show_machine() -> None:
    """Print what works on this machine."""
    table = Table.grid(padding=(0, 2))
    for finding in examine():
        mark = Text("✓", GOOD) if finding.works else Text("–", WARN)
        table.add_row(mark, Text(finding.name, DIM), finding.words)
    Console().print(table)


def examine() -> list[MachineFinding]:
    """Check the machine, in a few seconds and without leaving files behind."""
    machine = describe_machine()
    kib = {name: words.split()[0] for name, _, words in (line.partition(":") for line in _meminfo())}
    free_gib = int(kib.get("MemAvailable", 0)) / 2**20
    return [
        MachineFinding(name="processor", works=True, words=f"{machine['processor']}, {machine['cores']} usable cores"),
        MachineFinding(name="memory", works=True, words=f"{machine['memory_gib']} GiB, {free_gib:.1f} of them free"),
        MachineFinding(name="disk", works=True, words=f"{formatting.size(shutil.disk_usage('.').free)} free here"),
        MachineFinding(
            name="python", works=True, words=f"{machine['python']}, étude {machine['etude']}, torch {machine['torch']}"
        ),
        *_sandboxes(),
        _kernels(),
        _cuda(),
        _package("vllm", "needed for engine.kind = 'vllm'; it may be in a Python environment of its own"),
    ]


def _meminfo() -> list[str]:
    file = Path("/proc/meminfo")
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _sandboxes() -> list[MachineFinding]:
    """Try each kind of sandbox, but boot no virtual machine."""
    kinds = [SandboxConfig(kind=kind) for kind in PROVIDERS.builtins if kind not in NOT_TRIED]
    return [
        *(_tried(config.kind, partial(open_kind, config, base_store(config))) for config in kinds),
        _virtual_machines(),
    ]


def _tried(kind: str, make: Callable[[], SandboxProvider]) -> MachineFinding:
    """Try a provider: its capabilities on this machine, or the reason why it has none."""

    async def ask() -> frozenset[Capability]:
        sandboxes = make()
        try:
            return await sandboxes.capabilities()
        finally:
            await sandboxes.close()

    name = f"sandboxes: {kind}"
    try:
        granted = asyncio.run(ask())
    except (SandboxError, ConfigError) as error:
        return MachineFinding(name=name, works=False, words=str(error))
    missing = [capability for capability in SANDBOX_NEEDS if capability not in granted]
    names = ", ".join(capability.replace("_", " ") for capability in sorted(granted)) or "this machine grants none"
    return MachineFinding(
        name=name,
        works=not missing,
        words=names + (f"; not: {', '.join(missing)}" if granted and missing else ""),
    )


def _virtual_machines() -> MachineFinding:
    name = "sandboxes: qemu"
    try:
        QemuSandboxes()
    except ConfigError as error:
        return MachineFinding(name=name, works=False, words=str(error))
    return MachineFinding(
        name=name, works=True, words="programs and base system are installed; KVM is tested at the first boot only"
    )


def _kernels() -> MachineFinding:
    """Compile the invariant arithmetic's matrix product, or load it from the cache, and run it."""
    ones = torch.ones(4, 8)
    right = bool((InvariantArithmetic().linear(ones, ones) == 8).all())
    return MachineFinding(name="numba", works=right, words=f"{version('numba')}, kernels compile and run")


def _cuda() -> MachineFinding:
    if not torch.cuda.is_available():
        return MachineFinding(
            name="cuda", works=False, words=f"torch {torch.__version__} finds no GPU; everything runs on CPUs, too"
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return MachineFinding(name="cuda", works=True, words=", ".join(names))


def _package(name: str, what: str) -> MachineFinding:
    if importlib.util.find_spec(name) is None:
        return MachineFinding(name=name, works=False, words=f"not installed here: {what}")
    return MachineFinding(name=name, works=True, words=version(name))
