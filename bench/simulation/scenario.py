"""One simulated run under fire, drawn from a seed: its recipe, machines, workload, and what goes wrong when. Pure.

A fault is due at a virtual time. Runs differ in all that decisions rest on: groups, staleness, attempts, engines,
regions and the way there, the number of rollouts processes, how long anything takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.simulation.calibration import RunCalibration, TrainerTimes
from etude.simulation.engine import EngineRates
from etude.simulation.run import RegionModel
from etude.simulation.workload import RolloutWork, Workload


class Kind(StrEnum):
    """A kind of fault in a simulated run."""

    KILL_ROLLOUTS = "kill-rollouts"
    """``kill -9`` of a rollouts process: between two events, or right before or after one of its commits."""
    KILL_TRAINER = "kill-trainer"
    """The same for the trainer."""
    KILL_MACHINE = "kill-machine"
    """The same for all processes at once."""
    LOSE_ROLLOUTS = "lose-rollouts"
    """A rollouts process is gone for good, where there is another one."""
    KILL_GATEWAY = "kill-gateway"
    """It forgets all sessions of its region."""
    KILL_ENGINE = "kill-engine"
    """It loses its calls, and restarts with the newest weights of its region, or with older ones."""
    OLD_ENGINE = "old-engine"
    """It restarts immediately with older weights, when no call is in progress whose loss would reveal it."""
    CUT_REGION = "cut-region"
    """A region can neither send nor receive."""
    SLOW_LINK = "slow-link"
    """A round trip to a region takes much longer."""
    LATE_WEIGHTS = "late-weights"
    """Versions that are published meanwhile take long to a region."""
    STORE_AWAY = "store-away"
    """Publishing fails, and a starting engine finds no weights."""
    LEDGER_DOWN = "ledger-down"
    """No process reaches the ledger; each ends with that error and is started again."""
    LOST_REPLY = "lost-reply"
    """The connection breaks under a commit, which was kept or not."""
    NO_SANDBOXES = "no-sandboxes"
    """No sandbox can be started."""
    NO_HEARTBEATS = "no-heartbeats"
    """A rollouts process continues, but its heartbeats are lost until another one takes over its slots."""


HOLDS: Mapping[Kind, tuple[float, float]] = MappingProxyType(
    {
        Kind.KILL_ROLLOUTS: (0.2, 12.0),
        Kind.KILL_TRAINER: (0.2, 6.0),
        Kind.KILL_MACHINE: (0.2, 6.0),
        Kind.LOSE_ROLLOUTS: (0.0, 0.0),
        Kind.KILL_GATEWAY: (0.0, 0.0),
        Kind.KILL_ENGINE: (0.0, 6.0),
        Kind.OLD_ENGINE: (0.0, 0.0),
        Kind.CUT_REGION: (0.5, 8.0),
        Kind.SLOW_LINK: (1.0, 8.0),
        Kind.LATE_WEIGHTS: (1.0, 8.0),
        Kind.STORE_AWAY: (0.5, 6.0),
        Kind.LEDGER_DOWN: (0.1, 4.0),
        Kind.LOST_REPLY: (0.0, 0.0),
        Kind.NO_SANDBOXES: (0.2, 4.0),
        Kind.NO_HEARTBEATS: (6.0, 12.0),
    }
)
"""Kind → the shortest and the longest time that it lasts, or until a process that was killed is started again."""
SHARES: Mapping[Kind, float] = MappingProxyType({Kind.KILL_ENGINE: 3.0, Kind.OLD_ENGINE: 3.0, Kind.LOSE_ROLLOUTS: 2.0})
"""Kinds that are likelier than others: of those, many come at a moment at which they change nothing."""
BRIEF = 0.4
"""Share of faults that last for a tenth of their time: only their victims may notice them."""
FEWEST, MOST = 8, 16
"""Faults of a run."""
FIRST_S, LONGEST_GAP_S = 0.3, 2.0
"""The earliest fault, and the longest time between two."""
LEASE_S = 4.0
"""Term of leases: processes unavailable for longer lose their leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    at_s: float
    hold_s: float
    pick: float
    """In [0, 1): decides among victims."""
    moment: int
    """Number of commits before a kill or a lost reply, from 0; a kill with 0 happens immediately."""
    is_kept: bool
    """True if the commit itself succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All of one simulated run."""

    seed: int
    config: RunConfig
    calibration: RunCalibration
    regions: tuple[RegionModel, ...]
    processes: int
    """Processes that fill slots."""
    faults: tuple[Fault, ...]

    @property
    def described(self) -> str:
        """One line for people."""
        rollouts = self.config.rollouts
        engines = ", ".join(f"{region.engines} in {region.name}" for region in self.regions)
        return (
            f"{self.config.trainer.steps} steps of {rollouts.groups_per_step} × {rollouts.group_size}, staleness "
            f"{rollouts.max_staleness}, {rollouts.max_attempts} attempts, {self.processes} rollouts processes, engines "
            f"{engines}"
        )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(f"simulation {seed}")
    groups, size, staleness = random.randint(1, 3), random.randint(2, 4), random.randint(0, 2)
    window = (staleness + 1) * groups * size
    rollouts = {
        "groups_per_step": groups,
        "group_size": size,
        "max_staleness": staleness,
        "concurrency": random.randint(size, window),
        "max_attempts": random.choice((1, 2, 4, 8)),
        "max_resamples": random.choice((0, 0, 2)),
        "timeout_s": 30.0,
    }
    config = parse_config(
        {"rollouts": rollouts, "trainer": {"steps": random.randint(3, 6)}, "ledger": {"lease_s": LEASE_S}},
        source="bench simulation",
    )
    return Scenario(
        seed=seed,
        config=config,
        calibration=_calibration(random),
        regions=_regions(random),
        processes=random.randint(1, 2),
        faults=_faults(random),
    )


def _regions(random: Random) -> tuple[RegionModel, ...]:
    home = RegionModel(name="home", engines=random.randint(1, 3))
    if random.random() < 0.5:
        return (home,)
    rtt_s, arrival_s = random.uniform(0.02, 0.3), random.uniform(0.0, 2.0)
    return (home, RegionModel(name="far", engines=random.randint(1, 2), rtt_s=rtt_s, arrival_s=arrival_s))


def _calibration(random: Random) -> RunCalibration:
    rates = EngineRates(step_s=0.002, sequence_s=0.0005, prompt_s=0.0001, max_running=random.choice((4, 16)))
    times = TrainerTimes(
        fixed_s=random.uniform(0.1, 0.6),
        token_s=1e-4,
        save_s=random.uniform(0.0, 0.2),
        publish_s=random.uniform(0.05, 0.5),
    )
    groups = tuple(tuple(_work(random) for _ in range(3)) for _ in range(8))
    swap_s, call_s = random.uniform(0.0, 0.5), random.uniform(0.01, 0.1)
    return RunCalibration(engine=rates, trainer=times, swap_s=swap_s, call_s=call_s, workload=Workload(groups))


def _work(random: Random) -> RolloutWork:
    return RolloutWork(
        turns=random.randint(1, 3),
        sampled_tokens=round(random.lognormvariate(4.3, 0.6)),
        prompt_tokens=random.randint(20, 200),
        sandbox_s=random.uniform(0.01, 0.2),
        tools_s=random.uniform(0.0, 0.4),
        grading_s=random.uniform(0.02, 0.4),
    )


def _faults(random: Random) -> tuple[Fault, ...]:
    at_s, faults = FIRST_S, list[Fault]()
    for _ in range(random.randint(FEWEST, MOST)):
        (kind,) = random.choices(list(Kind), [SHARES.get(each, 1.0) for each in Kind])
        at_s += random.uniform(0.0, LONGEST_GAP_S)
        faults.append(
            Fault(
                kind=kind,
                at_s=at_s,
                hold_s=_hold_s(kind, random),
                pick=random.random(),
                moment=random.randint(0, 3),
                is_kept=random.random() < 0.5,
            )
        )
    return tuple(faults)


def _hold_s(kind: Kind, random: Random) -> float:
    shortest_s, longest_s = HOLDS[kind]
    is_brief = random.random() < BRIEF and kind is not Kind.NO_HEARTBEATS
    return random.uniform(shortest_s, max(shortest_s, longest_s / 10) if is_brief else longest_s)
