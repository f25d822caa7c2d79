"""`etude doctor`: what works on this machine, and whether engine and trainer compute the same numbers.

Owns what is looked at and how it is shown. How the two sides are compared is :mod:`etude.run.parity`'s.
"""

import asyncio
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.config.recipe import RunConfig
from etude.dashboard import units
from etude.errors import ConfigError, MismatchError, SandboxError
from etude.models.checkpoint import load_checkpoint, load_spec, load_state, spec_from_config
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import ModelSpec
from etude.protocols import SandboxProvider
from etude.run.decisions import resolve_device
from etude.run.folder import RunFolder
from etude.run.machine import describe_machine
from etude.run.numerics import load_published, published_state, training_model
from etude.run.parity import WAYS, LayerDifference, Parity, check_parity
from etude.run.states import to_tensors
from etude.run.weight_log import open_log
from etude.sandboxes.gvisor import GvisorSandboxes
from etude.sandboxes.local import LocalSandboxes
from etude.sandboxes.ns import NamespaceSandboxes
from etude.sandboxes.qemu.provider import QemuSandboxes
from etude.tokens.jinja import call_support, load_format
from etude.trainer.mismatch import Rung
from etude.weights.pull import pull
from etude.worlds import Capability

SEED_STD = 0.1
"""Spread of the weights of a model that is made up: wide enough that experts are chosen for a reason."""
SANDBOX_NEEDS = (Capability.CONFINED, Capability.NETWORK_OFF, Capability.PROCESSES_APART)
"""What programs of a model should be held by."""
GOOD, WARN, DIM = "green", "yellow", "bright_black"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    works: bool
    words: str


def show_machine(console: Console) -> None:
    """Print what works on this machine."""
    table = Table.grid(padding=(0, 2))
    for finding in examine():
        mark = Text("✓", GOOD) if finding.works else Text("–", WARN)
        table.add_row(mark, Text(finding.name, DIM), finding.words)
    console.print(table)


def examine() -> list[Finding]:
    """Look at the machine: some seconds at most, nothing is left behind."""
    machine = describe_machine()
    kib = {name: words.split()[0] for name, _, words in (line.partition(":") for line in _meminfo())}
    free_gib = int(kib.get("MemAvailable", 0)) / 2**20
    return [
        Finding("processor", True, f"{machine['processor']}, {machine['cores']} cores for us"),
        Finding("memory", True, f"{machine['memory_gib']} GiB, {free_gib:.1f} of them free"),
        Finding("disk", True, f"{units.size(shutil.disk_usage('.').free)} free here"),
        Finding("python", True, f"{machine['python']}, étude {machine['etude']}, torch {machine['torch']}"),
        *_sandboxes(),
        _kernels(),
        _cuda(),
        _package("vllm", "the engine of etude.engines.vllm; it may live in an environment of its own"),
    ]


def parity_of_run(folder: RunFolder, config: RunConfig) -> Parity:
    """Engine against trainer on the newest published weights of a run, with the numbers of ``config``."""
    device = resolve_device(config.engine.device)
    spec, published = load_spec(folder.model), to_tensors(pull(open_log(folder)).state)
    trained_as = folder.config().numerics
    if config.numerics != trained_as:
        model = training_model(spec, trained_as, device)
        load_published(model, published, trained_as)
        published = published_state(model, config.numerics)
    return check_parity(spec, published, config.numerics, device)


def parity_of_model(checkpoint: Path | None, config: RunConfig) -> Parity:
    """Engine against trainer on a checkpoint in Hugging Face's form, or on a random model of the recipe's shape.

    Raises :class:`~etude.errors.DamagedError` for a checkpoint that no run could start from: without a tokenizer or a
    chat template, too.
    """
    device = resolve_device(config.engine.device)
    if checkpoint is None:
        spec, state = spec_from_config(config.model, config.model.vocab_size), None
    else:
        load_format(checkpoint)
        spec, state = load_checkpoint(checkpoint)
    return check_parity(spec, _published(spec, state, config.numerics, device), config.numerics, device)


def gate(folder: RunFolder) -> None:
    """Let a run go on only if its engine and its trainer agree. Raises :class:`~etude.errors.MismatchError`."""
    config = folder.config()
    torch.set_num_threads(config.trainer.threads)
    parity = parity_of_run(folder, config)
    show_parity(parity, Console(width=100))
    if not parity.passed:
        raise MismatchError(verdict(parity))


def show_parity(parity: Parity, console: Console) -> None:
    """Print the comparison, layer by layer, and the verdict: largest difference and share of equal numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=DIM)
    table.add_column("", no_wrap=True)
    for way in WAYS:
        table.add_column(way)
    table.add_column("flips", justify="right")
    rows: dict[str, list[LayerDifference]] = {}
    for layer in parity.layers:
        rows.setdefault(layer.name, []).append(layer)
    for name, layers in rows.items():
        flips = [layer.flips for layer in layers if layer.flips is not None]
        style = WARN if parity.first in layers else ""
        table.add_row(Text(name, style), *(_cell(layer) for layer in layers), str(sum(flips)) if flips else "")
    console.print(table)
    console.print(Text(f"\n{verdict(parity)}", GOOD if parity.passed and parity.rung is Rung.CLEAR else WARN))


def show_calls(checkpoint: Path, console: Console) -> bool:
    """Print how the tool calls of a checkpoint's chat template are read; ``False`` if it writes some and none is."""
    calls = call_support(checkpoint)
    words = (
        calls.problem
        or f"tool calls are read as the chat template writes them ({calls.grammar and calls.grammar.name})"
    )
    console.print(Text(words, WARN if calls.problem else GOOD))
    return not calls.is_lost


def verdict(parity: Parity) -> str:
    """What the comparison came to, in a sentence; it names the first part that differs."""
    found = parity.sampled
    compared = f"{found.tokens} sampled tokens: k3 {units.small(found.k3)}, max {units.small(found.max)}"
    if parity.exact:
        return f"engine and trainer agree to the last bit, in every layer; {compared}"
    first = "only logprobs differ" if parity.first is None else f"{parity.first.name} ({parity.first.way}) is the first"
    if parity.invariant:
        return f"engine and trainer differ although the arithmetic is invariant: {first}; {compared}"
    words = {Rung.CLEAR: "agree", Rung.WARN: "agree badly", Rung.STOP: "disagree"}[parity.rung]
    return f"engine and trainer {words}; {compared}; {first} to differ in any bit"


def _published(
    spec: ModelSpec, state: Mapping[str, Tensor] | None, numerics: NumericsConfig, device: str
) -> dict[str, Tensor]:
    model = training_model(spec, numerics, device)
    if state is None:
        model.initialise(seed=0, std=SEED_STD)
    else:
        load_state(model, state)
    return published_state(model, numerics)


def _cell(layer: LayerDifference) -> Text:
    if layer.equal == 1:
        return Text("equal", GOOD)
    percent = units.percent(int(layer.equal * 1000) / 1000)
    return Text.assemble(units.small(layer.max_abs), (f"  {percent}", DIM))


def _meminfo() -> list[str]:
    file = Path("/proc/meminfo")
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _sandboxes() -> list[Finding]:
    """Each kind of sandbox, tried; but no virtual machine is booted."""
    kinds: dict[str, Callable[[], SandboxProvider]] = {
        "local": lambda: LocalSandboxes(workers=1),
        "ns": NamespaceSandboxes,
        "gvisor": GvisorSandboxes,
    }
    return [*(_tried(kind, make) for kind, make in kinds.items()), _virtual_machines()]


def _tried(kind: str, make: Callable[[], SandboxProvider]) -> Finding:
    """What a provider claims on this machine, or why it is none."""

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
        return Finding(name, False, str(error))
    missing = [capability for capability in SANDBOX_NEEDS if capability not in granted]
    claims = ", ".join(capability.replace("_", " ") for capability in sorted(granted)) or "this machine grants none"
    return Finding(name, not missing, claims + (f"; not: {', '.join(missing)}" if granted and missing else ""))


def _virtual_machines() -> Finding:
    name = "sandboxes: qemu"
    try:
        QemuSandboxes()
    except ConfigError as error:
        return Finding(name, False, str(error))
    return Finding(name, True, "programs and base system are here; whether KVM works is tried at the first boot")


def _kernels() -> Finding:
    """Compile, or find compiled, and run the product of the invariant arithmetic."""
    ones = torch.ones(4, 8)
    right = bool((InvariantArithmetic().linear(ones, ones) == 8).all())
    return Finding("numba", right, f"{version('numba')}, kernels compile and run")


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("cuda", False, f"no device for torch {torch.__version__}; everything runs on CPUs, too")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("cuda", True, ", ".join(names))


def _package(name: str, what: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, f"not installed here: {what}")
    return Finding(name, True, version(name))
