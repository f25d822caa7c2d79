"""`etude doctor`: checks which parts work on this machine, and whether engine and trainer agree.

Owns the checks of the machine and the output. Engine and trainer are compared by :mod:`etude.run.parity`; `etude check`
checks the needs of one recipe.
"""

import asyncio
import importlib.util
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.cli.options import Overrides, group
from etude.config.fleet import FleetConfig
from etude.config.loading import default_recipe, load_fleet, load_recipe
from etude.config.tasks import PROVIDERS, SandboxConfig
from etude.dashboard import formatting
from etude.errors import ConfigError, ExitCode, SandboxError
from etude.models.invariant import InvariantArithmetic
from etude.protocols import SandboxProvider
from etude.run import parity as parity_check
from etude.run.fleet_check import look_at_fleet
from etude.run.folder import RunFolder
from etude.run.machine_info import describe_machine
from etude.run.parity import DIM, GOOD, WARN
from etude.run.preflight import MachineFinding, about_template
from etude.run.task_sandboxes import base_store, open_kind
from etude.run.working_folder import open_run_folder
from etude.sandbox_spec import Capability
from etude.sandboxes.qemu.provider import QemuSandboxes
from etude.tokens.jinja import call_support

NOT_TRIED = ("qemu", "remote")
"""Kinds of sandbox that are not tried, since they would boot a machine or need a server."""
SANDBOX_NEEDS = (Capability.CONFINED, Capability.NETWORK_OFF, Capability.PROCESSES_APART)
"""Capabilities that a sandbox needs to run a model's programs."""


app = group()


@app.command()
def doctor(
    *,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare engine and trainer layer by layer, bit by bit.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face checkpoint (default: random weights).")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A run folder or URL. With --parity: compare its newest weights; with --fleet: check its processes.",
        ),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FLEET", help="Check the stores, clocks, keys and gateways of a fleet's regions."),
    ] = None,
    overrides: Overrides,
) -> int:
    """Check what works on this machine or fleet, and whether engine and trainer agree."""
    if fleet is not None:
        if parity or model is not None or overrides:
            raise ConfigError("--fleet can be combined with --run only: it compares no engine with a trainer")
        return show_fleet(load_fleet(fleet), None if run is None else open_run_folder(run, writes=False), Console())
    ignored = [name for name, value in {"model": model, "run": run, "set": overrides}.items() if value]
    if ignored and not parity:
        raise ConfigError(f"--{', --'.join(ignored)} would have no effect without --parity")
    if model is not None and run is not None:
        raise ConfigError("--model and --run: give one of the two")
    console = Console()
    if not parity:
        show_machine(console)
        return 0
    if run is None:
        measured = parity_check.parity_of_model(model, default_recipe(overrides))
    else:
        folder = open_run_folder(run, writes=False)
        measured = parity_check.parity_of_run(folder, load_recipe(folder.config_file, overrides))
    parity_check.show_parity(measured, console)
    if model is None:
        return 0 if measured.passed else ExitCode.USER_ERROR
    reads_calls = show_calls(model, console)
    for line in about_template(model):
        console.print(line)
    return 0 if measured.passed and reads_calls else ExitCode.USER_ERROR


def show_machine(console: Console) -> None:
    """Print what works on this machine."""
    table = Table.grid(padding=(0, 2))
    for finding in examine():
        mark = Text("✓", GOOD) if finding.works else Text("–", WARN)
        table.add_row(mark, Text(finding.name, DIM), finding.words)
    console.print(table)


def show_fleet(fleet: FleetConfig, folder: RunFolder | None, console: Console) -> int:
    """Print each finding about a fleet, one per line; returns the exit status."""

    async def show() -> bool:
        sound = True
        async for finding in look_at_fleet(fleet, folder):
            mark = ("✓", GOOD) if finding.works else ("✗", WARN)
            console.print(Text.assemble(mark, "  ", (finding.name, DIM), "  ", finding.words))
            sound = sound and finding.works
        return sound

    return 0 if asyncio.run(show()) else ExitCode.USER_ERROR


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


def show_calls(checkpoint: Path, console: Console) -> bool:
    """Print how the tool calls of a checkpoint's chat template are read; ``False`` if the template writes calls that
    étude cannot read.
    """
    calls = call_support(checkpoint)
    words = (
        calls.problem
        or f"tool calls are read as the chat template writes them ({calls.grammar and calls.grammar.name})"
    )
    console.print(Text(words, WARN if calls.problem else GOOD))
    return not calls.is_lost


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
    claims = ", ".join(capability.replace("_", " ") for capability in sorted(granted)) or "this machine grants none"
    return MachineFinding(
        name=name, works=not missing, words=claims + (f"; not: {', '.join(missing)}" if granted and missing else "")
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
