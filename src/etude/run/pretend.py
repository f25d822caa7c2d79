"""Checks of a recipe for a machine, or a fleet of machines, with GPUs that this machine does not have.

    recipe ──▶ numerics as resolved there ──▶ GPUs of each process ──▶ memory of each process

This module owns the questions; the answers come from :mod:`etude.run.resolve`, :mod:`etude.run.gpus` and
:mod:`etude.run.memory_plan`, as in a run on that machine. Of a checkpoint, ``config.json`` suffices.
"""

from collections.abc import Iterator, Sequence

from etude.config.fleet import FleetConfig
from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.errors import ConfigError
from etude.models.spec import ModelSpec
from etude.run.gpu_machine import GpuMachine
from etude.run.gpus import divide_gpus, engine_gpus
from etude.run.memory_plan import DeviceUse, MemoryPlan, device_uses
from etude.run.numerics import count_parameters
from etude.run.preflight import MachineFinding, spec_of_recipe
from etude.run.resolve import resolve


def resolved_there(config: RunConfig) -> RunConfig:
    """The configuration as a machine with GPUs would resolve it. Raises as :func:`~etude.run.resolve.resolve` does."""
    sections = {
        name: section.model_copy(update={"device": "cuda"} if section.device == "auto" else {})
        for name, section in (("engine", config.engine), ("trainer", config.trainer))
    }
    return resolve(config.model_copy(update=sections))


def check_pretended(
    config: RunConfig, machine: GpuMachine, fleet: FleetConfig | None = None
) -> Iterator[MachineFinding]:
    """Check numerics, placement and memory of a recipe on a machine, or on a fleet of such machines.

    Raises :class:`~etude.errors.ConfigError` if the recipe would not run there: the message names the key and the fix.
    """
    config = resolved_there(config)
    numerics, spec = config.numerics, spec_of_recipe(config)
    yield MachineFinding(name="model", words=f"{formatting.brief(count_parameters(spec))} parameters")
    words = (
        f"trainer on {config.trainer.device}, engine on {config.engine.device}, {numerics.arithmetic} arithmetic in "
    )
    yield MachineFinding(name="numerics", words=f"{words}{numerics.dtype}, router replay {numerics.replay}")
    if fleet is None:
        shares = divide_gpus(config, machine.gpus)
        placed = "; ".join(f"{name} on {', '.join(map(str, gpus))}" for name, gpus in shares.items())
        yield MachineFinding(name="placement", words=placed or "trainer and engine share a GPU")
    else:
        yield MachineFinding(name="placement", words=_check_fleet(config, fleet, machine))
    yield from _check_memory(config, spec, machine, fleet)


def uses_there(
    config: RunConfig, plan: MemoryPlan, machine: GpuMachine, fleet: FleetConfig | None = None
) -> Sequence[DeviceUse]:
    """Processes on each GPU of a machine; on a fleet, each process has its own machine."""
    if fleet is None:
        return device_uses(config, plan, machine.gpus)
    return [DeviceUse(device="each GPU", processes=(side,)) for side in (plan.trainer, plan.engine)]


def _check_fleet(config: RunConfig, fleet: FleetConfig, machine: GpuMachine) -> str:
    """Describe the placement of processes on the machines of a fleet. Raises :class:`~etude.errors.ConfigError`."""
    nodes, ranks, gpus = fleet.trainer.nodes, config.parallel.ranks, engine_gpus(config)
    if ranks % nodes or ranks // nodes > machine.gpus:
        raise ConfigError(
            f"trainer.nodes = {nodes} of {machine.gpus} GPUs and parallel.dp * parallel.cp = {ranks} ranks: each node "
            f"has as many ranks as any other, one a GPU; set trainer.nodes = {max(1, ranks // machine.gpus)}"
        )
    if gpus > machine.gpus and gpus % machine.gpus:
        raise ConfigError(
            f"an engine of {gpus} GPUs does not fill machines of {machine.gpus}: its sizes in "
            f"engine.options.arguments must come to a multiple"
        )
    engines, each = sum(region.engines for region in fleet.regions), -(-gpus // machine.gpus)
    where = f"{each} machines each" if each > 1 else f"{gpus} GPUs each"
    return f"trainer on {nodes} machines, {ranks // nodes} ranks on each; {engines} engines of {where}"


def _check_memory(
    config: RunConfig, spec: ModelSpec, machine: GpuMachine, fleet: FleetConfig | None
) -> Iterator[MachineFinding]:
    plan = MemoryPlan.of(config, spec, machine.memory_bytes)
    if plan.engine.problem:
        raise ConfigError(plan.engine.problem)
    for use in uses_there(config, plan, machine, fleet):
        if use.device == "cpu":
            continue  # the memory of a host is unknown
        if words := use.compare(machine.memory_bytes):
            raise ConfigError(words)
    of_each = ", ".join(
        f"{side.name} {formatting.size(side.total)}" for side in (plan.trainer, plan.engine) if side.parts
    )
    yield MachineFinding(name="memory", words=f"of {formatting.size(machine.memory_bytes)} a GPU: {of_each}")
