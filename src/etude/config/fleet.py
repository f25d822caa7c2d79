"""``fleet.toml``: the machines that a run's processes are placed on, by region, and the launcher that places them.

A recipe says what is trained; a fleet says where. One fleet serves many recipes.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section

LAUNCHERS = Registry(
    "launcher",
    "launcher",
    {
        "local": "etude.run.launchers.local:LocalLauncher",
        "ray": "etude.run.launchers.ray:RayLauncher",
        "kubernetes": "etude.run.launchers.kubernetes:render_manifests",
        "slurm": "etude.run.launchers.slurm:render_sbatch",
    },
)
"""Launchers by name: a class that is a :class:`~etude.fleet.launcher.ProcessLauncher`, made of its options and a
:class:`~etude.fleet.launcher.LaunchContext`; of those in :data:`RENDERED` a function that writes files for them.
"""
RENDERED = frozenset({"kubernetes", "slurm"})
"""Launchers that get files, by `etude fleet render`: they keep the processes themselves."""
REGION_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""Form of a region's name, the same in a process's name and in a label of Kubernetes."""
COMMANDS = ("serve", "gateway", "rollouts", "train", "relay", "sandboxes")
"""Processes that may ask for resources, by their command."""


class RayOptions(Section):
    """A Ray cluster that is there already; Ray places and keeps processes, and carries no data."""

    address: str = "auto"
    """Address of its head, ``HOST:6379``; ``auto`` is the cluster that this machine belongs to."""
    region_label: str = ""
    """Label of the nodes that names their region, where one cluster has machines of several. Empty: a cluster for each
    region, and in each region `etude fleet run` beside it.
    """


class KubernetesConfig(Section):
    """``[kubernetes]``: the cluster that manifests are written for."""

    image: str = ""
    """Container image with étude in it."""
    namespace: str = "default"
    secret: str = "etude"
    """Name of the Secret whose keys become environment variables: ``ETUDE_RUN_KEY``, and those of the object store."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that is a GPU."""
    region_label: str = ""
    """Label of the nodes that names their region, where one cluster has machines of several, such as
    ``topology.kubernetes.io/region``. Empty: a cluster for each region.
    """


class SlurmConfig(Section):
    """``[slurm]``: the job that an sbatch file asks for."""

    partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    """Longest time of the job, as ``sbatch --time`` has it."""
    prologue: str = ""
    """Shell lines before the first process, such as ``source /opt/etude/bin/activate``."""


LAUNCHER_OPTIONS = OptionsOf("fleet", "launcher", {"ray": RayOptions}, names=LAUNCHERS)


class ResourcesConfig(Section):
    """``[resources.COMMAND]``: the part of a machine that one process of that command needs."""

    cpus: float = Field(default=1.0, gt=0)
    gpus: int = Field(default=0, ge=0)
    memory_gib: float = Field(default=0.0, ge=0)
    """0 asks for none in particular."""


class TrainerNodesConfig(Section):
    """``[trainer]``: the nodes of the trainer, all in the home region."""

    nodes: int = Field(default=1, ge=1)
    """Machines that train together; the recipe's ``parallel.dp`` · ``parallel.cp`` ranks are divided among them."""
    port: int = Field(default=29400, ge=1024, le=65535)
    """Port of the first node at which the others meet it."""


SCALED = ("engines", "gateways", "sandbox_hosts")
"""Numbers of a region that may follow the trainer."""
PRODUCTIONS = Registry("regions.lending.production", "production", {"metrics": "etude.run.lending:MetricsProduction"})
"""Ways to ask production for its load: a class that is a :class:`~etude.fleet.lending.Production`, made of the
:class:`LendingConfig`.
"""


class LendingConfig(Section):
    """``[regions.lending]``: when a region's lent engines run, which is while production leaves their machines idle.

    Without it they always run, until somebody stops them: Kubernetes for pods of production, or `etude fleet drain`.
    """

    places: int = Field(default=0, ge=0)
    """Calls that one of production's engines answers well at a time; 0: nothing is lent or taken back by itself."""
    slo_first_token_s: float = Field(default=1.0, gt=0)
    """95th percentile of production's time to a first token that is not to be exceeded."""
    production: Annotated[str, AfterValidator(PRODUCTIONS)] = "metrics"
    """Source of production's load: ``metrics``, or a class of your own (``module:Class``)."""
    metrics: tuple[str, ...] = ()
    """URLs of the Prometheus pages of all of production's engines, or of its gateways: vLLM's, SGLang's or étude's."""
    own: int = Field(default=1, ge=0)
    """Engines of production on machines that are never lent, besides these."""
    margin: float = Field(default=0.15, ge=0, le=1)
    """Share of production's calls that there is room for besides, at least; it grows where that was too little."""
    lead_s: float = Field(default=120.0, ge=0)
    """Seconds from a machine's return until production's engine serves on it."""
    calm_s: float = Field(default=60.0, ge=0)
    """Seconds for which a machine is not needed before it is lent."""

    @model_validator(mode="after")
    def _check_lending(self) -> Self:
        if self.places and self.production == "metrics" and not self.metrics:
            raise ValueError("regions.lending: metrics is empty: name the pages that production's load is read from, "
                             "such as metrics = ['http://HOST:8000/metrics'], or set places = 0")  # fmt: skip
        if not self.places:
            self.refuse_idle("regions.lending", ["slo_first_token_s", "metrics", "own", "margin", "lead_s", "calm_s"],
                             "with places = 0, by which nothing is lent by itself")  # fmt: skip
        return self


class ReplicaBounds(Section):
    """Bounds of a number of processes that the run changes by itself."""

    most: int = Field(default=0, ge=0)
    """0: the number stays as it is."""
    fewest: int = Field(default=1, ge=0)
    cost_per_hour: float = Field(default=0.0, ge=0)
    """Price of one of them, in any currency: the cheapest region grows first."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.most:
            self.refuse_idle(
                "scaling", ["fewest", "cost_per_hour"], "with most = 0, by which the number stays as it is"
            )
        elif self.fewest > self.most:
            raise ValueError(f"scaling: fewest = {self.fewest} is more than most = {self.most}")
        return self

    def check_within(self, key: str, number: int) -> None:
        """Raise ``ValueError`` if the first ``number`` of a key is outside of them."""
        if self.most and not self.fewest <= number <= self.most:
            raise ValueError(f"{key} = {number} is not within its bounds in [scaling], {self.fewest} to {self.most}")


FIXED = ReplicaBounds()


class RegionScaling(Section):
    """``[regions.scaling]``: numbers of a region's processes that follow the trainer."""

    engines: ReplicaBounds = FIXED
    gateways: ReplicaBounds = FIXED
    sandbox_hosts: ReplicaBounds = FIXED

    @property
    def is_fixed(self) -> bool:
        """True if none of the numbers may change."""
        return not (self.engines.most or self.gateways.most or self.sandbox_hosts.most)


class FleetScaling(Section):
    """``[scaling]``: numbers of the run's processes that follow the trainer."""

    rollouts: ReplicaBounds = FIXED
    cost_per_hour: float = Field(default=0.0, ge=0)
    """Most money for all processes whose number changes by itself; 0 for no bound."""


class RegionConfig(Section):
    """``[[regions]]``: one place with machines that are near each other."""

    name: str
    """Small letters, digits and hyphens."""
    store: str = ""
    """URL of the region's own object store, where there are several regions."""
    gateways: int = Field(default=1, ge=0)
    """Gateways that hand calls to the region's engines."""
    engines: int = Field(default=0, ge=0)
    lent_engines: int = Field(default=0, ge=0)
    """Engines on machines that production may take back when it needs them."""
    lending: LendingConfig = LendingConfig()
    """When those run."""
    scaling: RegionScaling = RegionScaling()
    """Bounds between which the numbers of processes follow the trainer."""
    relays: int = Field(default=2, ge=1)
    """Processes that bring weights here: one is active, the others stand by. The home region needs none."""
    sandbox_hosts: int = Field(default=0, ge=0)
    """Machines that lend sandboxes."""

    @model_validator(mode="after")
    def _check_region(self) -> Self:
        if REGION_NAME.fullmatch(self.name) is None:
            raise ValueError(f"regions: name = {self.name!r}: expected small letters, digits and hyphens")
        if self.engines and not self.gateways:
            raise ValueError(f"regions: {self.name} has engines and no gateway that would hand them calls: set "
                             f"gateways = 1 or more")  # fmt: skip
        if self.lent_engines > self.engines:
            raise ValueError(f"regions: {self.name}: lent_engines = {self.lent_engines} are more than its engines = "
                             f"{self.engines}")  # fmt: skip
        if self.lending.places and not self.lent_engines:
            raise ValueError(f"regions: {self.name} has [regions.lending] and no lent_engines: set lent_engines = 1 or "
                             f"more")  # fmt: skip
        for key in SCALED:
            self.bounds(key).check_within(f"regions: {self.name}: {key}", getattr(self, key))
        if (
            self.scaling.gateways.most
            and not self.scaling.gateways.fewest
            and (self.engines or self.scaling.engines.most)
        ):
            raise ValueError(f"regions: {self.name}: scaling.gateways.fewest = 0 would leave its engines without a "
                             f"gateway: set 1 or more")  # fmt: skip
        if self.scaling.engines.most and self.lent_engines:
            raise ValueError(f"regions: {self.name} has scaling.engines and lent_engines, whose machines are not the "
                             f"run's to give up: make them a region of their own")  # fmt: skip
        return self

    def bounds(self, key: str) -> ReplicaBounds:
        """Bounds of one of the numbers in :data:`SCALED`."""
        bounds = getattr(self.scaling, key)
        assert isinstance(bounds, ReplicaBounds)
        return bounds

    @property
    def automatic(self) -> tuple[str, ...]:
        """Keys by which its processes come and go by themselves."""
        keys = {"regions.lending": self.lending.places, "regions.scaling": not self.scaling.is_fixed}
        return tuple(key for key, is_set in keys.items() if is_set)

    def is_lent(self, replica: int) -> bool:
        """True for an engine that production takes back when it needs the machine: the last ones are."""
        return replica >= self.engines - self.lent_engines


class FleetConfig(Section):
    """A fleet: launcher and regions."""

    launcher: Annotated[str, AfterValidator(LAUNCHERS)] = "local"
    """Places processes and keeps them: this machine, a Ray cluster, Kubernetes, Slurm, or a launcher of your own."""
    home: str
    """The region with trainer, rollouts and ledger."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(LAUNCHER_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[options]``: keys of the launcher alone."""
    rollouts: int = Field(default=1, ge=1)
    """Rollouts processes, all in the home region."""
    trainer: TrainerNodesConfig = TrainerNodesConfig()
    resources: dict[str, ResourcesConfig] = Field(default_factory=dict)
    """``[resources.serve]`` and the like; a command without one needs a CPU."""
    regions: tuple[RegionConfig, ...]
    scaling: FleetScaling = FleetScaling()
    """Bounds between which the number of rollouts processes follows the trainer, and of the cost of all that does."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    slurm: SlurmConfig = SlurmConfig()

    def check_automatic(self, launcher: str) -> None:
        """Raise ``ValueError`` if processes are to come and go by themselves with a launcher that cannot let them."""
        tables = [table for region in self.regions for table in region.automatic]
        tables += ["scaling.rollouts"] if self.scaling.rollouts.most else []
        if launcher in RENDERED and tables:
            raise ValueError(f"{tables[0]} has no effect with launcher = {launcher!r}, whose files say once and for "
                             f"all what runs: leave it out, or choose 'ray' or 'local'")  # fmt: skip

    @property
    def ray(self) -> RayOptions:
        """Options of a Ray cluster, of which alone they may be asked."""
        assert isinstance(self.options, RayOptions), self.launcher
        return self.options

    @property
    def home_region(self) -> RegionConfig:
        """The region with the trainer."""
        return next(region for region in self.regions if region.name == self.home)

    @property
    def regions_by_name(self) -> Mapping[str, RegionConfig]:
        """All regions."""
        return {region.name: region for region in self.regions}

    @model_validator(mode="after")
    def _check_regions(self) -> Self:
        names = [region.name for region in self.regions]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"regions: the name {twice[0]!r} is used twice: each region needs its own")
        if self.home not in names:
            raise ValueError(f"home = {self.home!r} is not a region: expected one of {', '.join(map(repr, names))}")
        if not self.home_region.gateways:
            raise ValueError(f"regions: {self.home} is home and has no gateway: set gateways = 1 or more")
        if not any(region.engines for region in self.regions):
            raise ValueError("regions: no region has engines: set engines = 1 or more in one of them")
        if len(names) > 1 and (bare := [region.name for region in self.regions if not region.store]):
            raise ValueError(f"regions: {bare[0]} has no store: where there are several regions each has an object "
                             f"store of its own, such as store = 's3://BUCKET/runs/NAME'")  # fmt: skip
        self.check_automatic(self.launcher)
        self.scaling.rollouts.check_within("rollouts", self.rollouts)
        if unknown := [command for command in self.resources if command not in COMMANDS]:
            raise ValueError(f"unknown key 'resources.{unknown[0]}': resources has {', '.join(COMMANDS)}")
        if self.launcher == "slurm" and len(names) > 1:
            raise ValueError(f"launcher = 'slurm': one job has one cluster, and there are {len(names)} regions: write "
                             f"a fleet for each")  # fmt: skip
        return self
