"""The fleet of the demo, and what goes wrong in it and when: pure.

home, home-2, home-3      trainer on two machines and a spare one, rollouts, ledger, the run's store
east   20 ms              engine, gateway, two relays, a store, a supervisor: each region alike
eu     80 ms, eu-2, eu-3  on three machines
asia  150 ms
south 250 ms
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from bench.sync.wan import WanShape

HOME = "home"
STEPS, SHORT_STEPS = 30, 60
"""Steps of the whole demo, whose results on one machine are in ``expected.json``, and of the short one, whose tiny
model takes almost no time."""
CUT_S, SHORT_CUT_S = 30.0, 10.0
LOSS = 0.001
"""Share of packets that long-distance links lose."""
BITS_PER_S = 100e6
"""Rate of each long-distance link, in each direction."""
NEAR = WanShape(rtt_s=0.0004, loss=0.0, bits_per_s=1e9)
"""Machines of one region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region with one engine."""

    name: str
    rtt_s: float
    """From home and back."""
    machines: int = 1

    @property
    def sites(self) -> tuple[str, ...]:
        """Its machines; the first one has the region's name, its store and its supervisor."""
        return (self.name, *(f"{self.name}-{number}" for number in range(2, self.machines + 1)))


EAST = Region(name="east", rtt_s=0.02)
EU = Region(name="eu", rtt_s=0.08, machines=3)
ASIA = Region(name="asia", rtt_s=0.15)
SOUTH = Region(name="south", rtt_s=0.25)


class FaultKind(StrEnum):
    """Faults of a demo."""

    ENGINE_KILLED = "engine killed"
    RELAY_KILLED = "relay killed"
    MACHINE_KILLED = "machine killed"
    REGION_CUT = "region cut"
    TRAINER_NODE_LOST = "trainer node lost"
    SUPERVISOR_KILLED = "supervisor killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One thing that goes wrong; ``region`` is where."""

    kind: FaultKind
    region: str
    lasts_s: float = 0.0
    """Time until it is undone; 0 if the fleet itself has to recover. For the same time before it, no other fault is
    active, so that the other regions can be compared with themselves."""
    joins: bool = False
    """True if it may strike while the one before is felt: no goal is about either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The regions of a demo and its faults, one after another."""

    regions: tuple[Region, ...]
    faults: tuple[PlannedFault, ...]
    steps: int
    home_machines: int
    trainer_nodes: int
    start: tuple[str, ...] = ()
    """``SECTION.KEY=VALUE`` over the quickstart's recipe that decide which model the run starts from."""
    settings: tuple[str, ...] = ()
    """All others."""
    is_whole: bool = True
    """True if it trains with the recipe's settings, so that its pass rate can be compared."""

    @property
    def home(self) -> Region:
        """Home as a region: with machines, without a distance."""
        return Region(name=HOME, rtt_s=0.0, machines=self.home_machines)

    @property
    def all_regions(self) -> tuple[Region, ...]:
        """Home and the others."""
        return (self.home, *self.regions)

    @property
    def sites(self) -> tuple[str, ...]:
        """All machines."""
        return tuple(site for region in self.all_regions for site in region.sites)

    @property
    def region_of(self) -> Mapping[str, str]:
        """Machine → its region."""
        return {site: region.name for region in self.all_regions for site in region.sites}

    @property
    def shapes(self) -> Mapping[tuple[str, str], WanShape]:
        """The shape of the link between each two machines."""
        rtt_s = {region.name: region.rtt_s for region in self.all_regions}
        region_of = self.region_of
        return {
            (one, other): NEAR
            if region_of[one] == region_of[other]
            else far(rtt_s[region_of[one]], rtt_s[region_of[other]])
            for one, other in combinations(self.sites, 2)
        }


def far(one_s: float, other_s: float) -> WanShape:
    """The link of two regions by their round trips to home: they are as far from each other as both are from home."""
    return WanShape(rtt_s=one_s + other_s, loss=LOSS, bits_per_s=BITS_PER_S)


def whole_plan() -> FleetPlan:
    """The demo: two of the quickstart's kinds of task in fewer steps, four regions, six faults."""
    return FleetPlan(
        regions=(EAST, EU, ASIA, SOUTH),
        faults=(
            PlannedFault(kind=FaultKind.REGION_CUT, region=ASIA.name, lasts_s=CUT_S),
            PlannedFault(kind=FaultKind.ENGINE_KILLED, region=EAST.name),
            PlannedFault(kind=FaultKind.RELAY_KILLED, region=SOUTH.name, joins=True),
            PlannedFault(kind=FaultKind.MACHINE_KILLED, region=EU.name),
            PlannedFault(kind=FaultKind.TRAINER_NODE_LOST, region=HOME),
            PlannedFault(kind=FaultKind.SUPERVISOR_KILLED, region=HOME),
        ),
        steps=STEPS,
        home_machines=3,
        trainer_nodes=2,
        start=(TWO_KINDS, *IMITATED),
        settings=("parallel.dp=2", TWO_KINDS, *MEASURED),
    )


def short_plan() -> FleetPlan:
    """Two regions, one kill, one cut, and a model that learns next to nothing."""
    return FleetPlan(
        regions=(EAST, EU),
        faults=(
            PlannedFault(kind=FaultKind.REGION_CUT, region=EAST.name, lasts_s=SHORT_CUT_S),
            PlannedFault(kind=FaultKind.MACHINE_KILLED, region=EU.name),
        ),
        steps=SHORT_STEPS,
        home_machines=1,
        trainer_nodes=1,
        start=TINY,
        settings=QUICK,
        is_whole=False,
    )


TWO_KINDS = 'tasks.options.kinds=["arith","slice"]'
"""Tasks of the whole demo."""
IMITATED = ("tasks.options.stub=0.0", "tasks.options.right_edit=0.4", "midtrain.tokens=1_000_000")
"""Recipe keys that determine what its mid-training imitates."""
MEASURED = ("eval.tasks=128",)
"""Held-out tasks of 16 templates, which decide how sure a pass rate is."""
TINY = (
    "model.shape.hidden_size=32",
    "model.shape.layers=1",
    "model.shape.heads=2",
    "model.shape.kv_heads=2",
    "model.shape.head_dim=16",
    "model.shape.experts=4",
    "model.shape.expert_size=32",
    "midtrain.tokens=60_000",
    "midtrain.batch_tokens=1000",
    "midtrain.warmup_steps=5",
    "midtrain.mixture.code=0.34",
    "midtrain.mixture.sessions=0.66",
)
"""A model of seconds, which knows the form of a session and solves nothing."""
QUICK = (
    "tasks.options.kinds=['arith']",
    "rollouts.groups_per_step=4",
    "rollouts.group_size=4",
    "rollouts.concurrency=32",
    "harness.options.max_turns=4",
    "effort.weight=0.1",
    "effort.prices.call_tokens=1.0",
    "effort.prices.final_tokens=1.0",
    "eval.enabled=false",
)
"""A run of a minute; the price of effort gives a model that solves nothing something to learn."""
