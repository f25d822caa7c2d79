"""The processes of a run on a fleet: process specs from a recipe and a fleet. Pure functions; nothing is started here.

    serve        engines, in their regions        rollouts     at home, near the ledger
    gateway      in each region with engines      train        at home, one per node, all in one group
    relay        in each region except home       sandboxes    machines that lend sandboxes, in their regions
    production, product, feedback, release        engines and gateway for users, user signals, releases: at home

A run on one machine is a fleet of one region, :func:`one_machine`.
"""

from collections.abc import Iterator
from dataclasses import replace

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.recipe import RunConfig
from etude.config.rollouts import CommandOptions
from etude.config.tasks import RemoteOptions
from etude.config.training import ModelShape
from etude.errors import ConfigError
from etude.fleet.specs import ETUDE, GroupMember, ProcessSpec, Resources
from etude.run.phase_folders import phases_of, ranks_of
from etude.run.process_name import FEEDBACK, PRODUCT, PRODUCTION, RELEASE, ROLLOUTS, SANDBOXES, ProcessName

FINITE = frozenset({"midtrain", "sft", "parity", "train", "rollouts"})
"""Commands that end when their work is done; the others serve until they are stopped."""
LIKE = {"midtrain": "train", "sft": "train", "parity": "serve"}
"""Command before the loop → the command of the loop whose resources and place it uses."""
RUN_KEY, SANDBOXES_KEY, JUDGE_KEY = "ETUDE_RUN_KEY", "ETUDE_SANDBOXES_KEY", "ETUDE_JUDGE_KEY"
STORE_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Credentials of an S3 store; not set where machines have their own role."""
WEIGHTS_KEY, DATABASE_PASSWORD = "ETUDE_WEIGHTS_KEY", "PGPASSWORD"
LEDGER_COMMANDS = frozenset({"train", "rollouts", FEEDBACK.command, RELEASE.command, PRODUCT.command})
"""Commands whose processes open the ledger, or what lies beside it."""
ENGINE_PORT, GATEWAY_PORT, SANDBOXES_PORT = 8600, 8500, 8700
"""Default ports of processes with their own machine or pod, unless the recipe sets one."""
ANY_ADDRESS = "0.0.0.0"


def one_machine(config: RunConfig) -> FleetConfig:
    """A fleet of one machine, with the recipe's numbers of engines and gateways."""
    home = RegionConfig(name="home", engines=config.engine.replicas, gateways=config.gateway.replicas)
    return FleetConfig(home=home.name, regions=(home,))


def process_spec(name: ProcessName, fleet: FleetConfig, run: str, *, port: int = 0) -> ProcessSpec:
    """Describe one étude process of a run; ``run`` is the run's folder or URL."""
    return ProcessSpec(
        name=str(name),
        command=(ETUDE, name.command, "--run", run, *_words_of(name)),
        region=name.region or fleet.home,
        resources=resources_of(name.command, fleet),
        secrets=_secrets_of(name.command),
        ends=name.command in FINITE,
        port=port,
    )


def _secrets_of(command: str) -> tuple[str, ...]:
    """Names of the secrets that a process of a run needs, as far as the run uses them."""
    password = (DATABASE_PASSWORD,) if command in LEDGER_COMMANDS else ()
    return (RUN_KEY, WEIGHTS_KEY, *STORE_SECRETS, *password)


def _words_of(name: ProcessName) -> Iterator[str]:
    """The arguments that tell a process its replica number and its region."""
    if name.replica:
        yield from ("--replica", str(name.replica))
    if name.region:
        yield from ("--region", name.region)


def is_gated(config: RunConfig) -> bool:
    """True if engine and trainer are compared before RL: if both are étude's, or if transformers computes the model."""
    return config.engine.kind == "native" or config.model.impl == "hf"


def is_gated_early(config: RunConfig) -> bool:
    """True if the parity gate can start during mid-training: with random weights of the recipe's shape, on a CPU, where
    it takes no memory from the phase.
    """
    return is_gated(config) and isinstance(config.model.shape, ModelShape) and config.engine.device == "cpu"


def plan_phases(config: RunConfig, fleet: FleetConfig, run: str) -> tuple[ProcessSpec, ...]:
    """Plan everything before the loop of a new run, in order."""
    gate = ("parity",) if is_gated(config) else ()
    return tuple(spec for command in (*phases_of(config), *gate) for spec in plan_phase(command, config, fleet, run))


def plan_phase(command: str, config: RunConfig, fleet: FleetConfig, run: str) -> tuple[ProcessSpec, ...]:
    """Plan a phase before the loop: the parity gate, one process at home, or mid-training or SFT, one on each node of
    the trainer.

    Raises :class:`~etude.errors.ConfigError` if a phase's ranks cannot be divided among the nodes.
    """
    if ranks_of(config, command) == 1:
        return (process_spec(ProcessName(command=command), fleet, run),)
    return tuple(_plan_ranks(command, config, fleet, run))


def plan_loop(config: RunConfig, fleet: FleetConfig, run: str) -> tuple[ProcessSpec, ...]:
    """Plan the processes of the asynchronous phase, in all regions.

    Raises :class:`~etude.errors.ConfigError` if the trainer's ranks cannot be divided among its nodes, and for remote
    sandboxes without a server.
    """
    return (
        *(spec for region in fleet.regions for spec in _plan_region(config, fleet, region, run)),
        *_plan_ranks("train", config, fleet, run),
        *_plan_rollouts(config, fleet, run),
        *(process_spec(name, fleet, run) for name in _live_processes(config)),
    )


def _plan_rollouts(config: RunConfig, fleet: FleetConfig, run: str) -> Iterator[ProcessSpec]:
    """Plan the rollouts processes, which need the keys of a judge's model and of remote sandboxes if the recipe has
    them.
    """
    keys: tuple[str, ...] = (JUDGE_KEY,) if config.judge.kind == "model" else ()
    if isinstance(config.sandboxes.options, RemoteOptions):
        config.sandboxes.options.check_servers(on_fleet=any(region.sandbox_hosts for region in fleet.regions))
        keys += (SANDBOXES_KEY,)
    for replica in range(fleet.rollouts):
        spec = process_spec(ProcessName(command=ROLLOUTS.command, replica=replica), fleet, run)
        yield replace(spec, secrets=(*spec.secrets, *keys))


def _live_processes(config: RunConfig) -> Iterator[ProcessName]:
    """The processes that collect user signals and release versions to users, if the recipe has them."""
    if config.feedback.window_s:
        yield FEEDBACK
    if config.release.enabled:
        yield from (RELEASE, PRODUCT)
        yield from (ProcessName(command=PRODUCTION.command, replica=n) for n in range(config.release.engines))


def _plan_region(config: RunConfig, fleet: FleetConfig, region: RegionConfig, run: str) -> Iterator[ProcessSpec]:
    where = "" if region.name == fleet.home else region.name
    for replica in range(region.engines):
        name = ProcessName(command="serve", replica=replica, region=where)
        spec = process_spec(name, fleet, run, port=config.engine.port or ENGINE_PORT)
        yield replace(spec, is_lent=region.is_lent(replica))
    for replica in range(region.gateways):
        name = ProcessName(command="gateway", replica=replica, region=where)
        yield process_spec(name, fleet, run, port=config.gateway.port or GATEWAY_PORT)
    for replica in range(region.relays if where else 0):
        yield ProcessSpec(
            name=str(ProcessName(command="relay", replica=replica, region=where)),
            command=(ETUDE, "weights", "relay", f"{fleet.home_region.store}/weights", f"{region.store}/weights"),
            region=region.name,
            resources=resources_of("relay", fleet),
            secrets=(WEIGHTS_KEY, *STORE_SECRETS),
        )
    is_external = isinstance(config.harness.options, CommandOptions)
    reach, keys = (("--run", run), (RUN_KEY,)) if is_external else ((), ())
    for replica in range(region.sandbox_hosts):
        name = ProcessName(command=SANDBOXES.command, replica=replica, region=where)
        port = SANDBOXES_PORT + replica  # hosts may share a machine
        listen = ("--host", ANY_ADDRESS, "--port", str(port), "--announce", region.store if where else run)
        yield ProcessSpec(
            name=str(name),
            command=(ETUDE, "sandboxes", "serve", *listen, *reach, *_words_of(name)),
            region=region.name,
            resources=resources_of(name.command, fleet),
            secrets=(SANDBOXES_KEY, *STORE_SECRETS, *keys),
            port=port,
        )


def _plan_ranks(command: str, config: RunConfig, fleet: FleetConfig, run: str) -> Iterator[ProcessSpec]:
    """Plan one process per node of the trainer: it starts the node's ranks, or is the only rank."""
    nodes, ranks = fleet.trainer.nodes, ranks_of(config, command)
    if ranks % nodes:
        key = "parallel.dp" if command == "train" else "parallel.imitation_dp"
        raise ConfigError(
            f"trainer.nodes = {nodes} of the fleet does not divide the ranks of `etude {command}`, {ranks}: each "
            f"node has as many as any other; set {key} to a multiple of {nodes}"
        )
    for node in range(nodes):
        name = ProcessName(command=command, replica=node)
        group = GroupMember(name=command, rank=node, size=nodes, port=fleet.trainer.port) if nodes > 1 else None
        yield ProcessSpec(
            name=str(name),
            command=(ETUDE, command, "--run", run),
            region=fleet.home,
            resources=resources_of(command, fleet),
            secrets=_secrets_of(command),
            group=group,
            ends=True,
        )


def resources_of(command: str, fleet: FleetConfig) -> Resources:
    """The resources that a fleet gives to each process of a command; a phase before the loop uses those of another
    command (``LIKE``).
    """
    section = fleet.resources.get(LIKE.get(command, command))
    return Resources() if section is None else Resources(**section.model_dump())


def settings_of(fleet: FleetConfig) -> list[str]:
    """Recipe settings that follow from a fleet: its GPUs, and the rows of endpoints that its home region needs.

    ``auto`` as a device would look for a GPU on this machine instead of the fleet's. Engines with GPUs get no
    replicas: a recipe with several would divide the GPUs of one machine.
    """
    sections = {"train": "trainer.device", "serve": "engine.device"}
    devices = [f'{key}="cuda"' for command, key in sections.items() if resources_of(command, fleet).gpus]
    if resources_of("serve", fleet).gpus:
        return devices
    home = fleet.home_region
    return [*devices, f"engine.replicas={max(1, home.engines)}", f"gateway.replicas={home.gateways}"]
