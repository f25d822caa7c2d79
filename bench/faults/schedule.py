"""What goes wrong in a fault campaign, and when: drawn from a seed, before anything runs.

    seed, faults ──▶ kinds by their shares ──▶ dealt to runs ──▶ each at a point of its run's progress

A fault is due at a number of graded rollouts, not at a time: a slow machine sees the same campaign as a fast one. Pure;
what a fault does to the processes is :mod:`bench.faults.injector`'.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """A kind of fault."""

    KILL_SUPERVISOR = "kill-supervisor"
    """``kill -9`` of ``etude run``; it is resumed afterwards."""
    KILL_ENGINE = "kill-engine"
    KILL_GATEWAY = "kill-gateway"
    KILL_ROLLOUTS = "kill-rollouts"
    KILL_TRAINER = "kill-trainer"
    HANG_SUPERVISOR = "hang-supervisor"
    """``SIGSTOP``, and ``SIGCONT`` after a while."""
    HANG_ENGINE = "hang-engine"
    HANG_GATEWAY = "hang-gateway"
    HANG_ROLLOUTS = "hang-rollouts"
    HANG_TRAINER = "hang-trainer"
    FREEZE = "freeze"
    """``SIGSTOP`` of one of the four, for longer than any may be silent: the supervisor has to find and replace it."""
    KILL_SANDBOX = "kill-sandbox"
    """``kill -9`` of a sandbox's worker or of what it forks commands from."""
    HANG_SANDBOX = "hang-sandbox"
    """``SIGSTOP`` of one of them, for longer than any rollout may take: a deadline has to find it."""
    GATEWAY_5XX = "gateway-5xx"
    """The gateway answers 500, 502, 503 or 504 to whatever rollouts ask."""
    GATEWAY_RESET = "gateway-reset"
    """Connections to the gateway break, in the middle of an answer, too."""
    GATEWAY_STALL = "gateway-stall"
    """No transfer in either direction."""
    ENGINE_5XX = "engine-5xx"
    ENGINE_RESET = "engine-reset"
    ENGINE_STALL = "engine-stall"
    STORE_ERROR = "store-error"
    """Every access to the weight store fails with an I/O error."""
    STORE_SLOW = "store-slow"
    """Every access to the weight store takes long."""
    LEDGER_LOCK = "ledger-lock"
    """Another process holds the ledger's lock: no process of the run can access it."""
    LEDGER_CUT = "ledger-cut"
    """Every connection to the ledger's server is lost."""
    LEDGER_DOWN = "ledger-down"
    """The ledger's server crashes, and is back after a while."""
    DISK_FULL = "disk-full"
    """No byte can be written to the run folder; the last write before comes up short."""
    CLOCK_JUMP = "clock-jump"
    """The time of day is another one, for all processes at once."""
    DAMAGE_CHECKPOINT = "damage-checkpoint"
    """A bit of the newest checkpoint flips, or its end is missing, while the run is down."""
    DAMAGE_EVENTS = "damage-events"
    """The same in a log of events."""
    DAMAGE_SIDECAR = "damage-sidecar"
    """The same in the files that SQLite keeps beside the ledger."""
    DAMAGE_STORE = "damage-store"
    """The same in an object of the weight store."""
    LOSE_DISK = "lose-disk"
    """The machine of a run at a URL is lost with its disk; another one continues from the URL."""
    CUT_REGION = "cut-region"
    """A region of a fleet can neither send nor receive."""
    KILL_RELAY = "kill-relay"
    """``kill -9`` of a relay, the active one or the one that stands by."""
    LOSE_ENGINE_MACHINE = "lose-engine-machine"
    """A machine with an engine is lost, with its disk; an empty one comes after a while."""
    LOSE_TRAINER_NODE = "lose-trainer-node"
    """A machine with a node of the trainer is lost in the same way; its disk is shared."""
    LOSE_SUPERVISOR = "lose-supervisor"
    """``kill -9`` of the supervisor of home or of a region; its processes continue, and another one is started."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """Frequency and duration of a kind."""

    share: float
    """Relative to the others."""
    hold_s: tuple[float, float] = (0.0, 0.0)
    """The shortest and the longest time that it lasts; zero: it is over at once."""


SPECS: Mapping[Kind, FaultSpec] = MappingProxyType(
    {
        Kind.KILL_SUPERVISOR: FaultSpec(3),
        Kind.KILL_ENGINE: FaultSpec(6),
        Kind.KILL_GATEWAY: FaultSpec(8),
        Kind.KILL_ROLLOUTS: FaultSpec(7),
        Kind.KILL_TRAINER: FaultSpec(7),
        Kind.HANG_SUPERVISOR: FaultSpec(2, (0.2, 2.0)),
        Kind.HANG_ENGINE: FaultSpec(4, (0.2, 2.0)),
        Kind.HANG_GATEWAY: FaultSpec(4, (0.2, 2.0)),
        Kind.HANG_ROLLOUTS: FaultSpec(4, (0.2, 2.0)),
        Kind.HANG_TRAINER: FaultSpec(4, (0.2, 2.0)),
        Kind.FREEZE: FaultSpec(2, (30.0, 30.0)),
        Kind.KILL_SANDBOX: FaultSpec(7),
        Kind.HANG_SANDBOX: FaultSpec(3, (10.0, 12.0)),
        Kind.GATEWAY_5XX: FaultSpec(7, (0.1, 1.0)),
        Kind.GATEWAY_RESET: FaultSpec(5, (0.0, 0.5)),
        Kind.GATEWAY_STALL: FaultSpec(3, (0.2, 1.5)),
        Kind.ENGINE_5XX: FaultSpec(5, (0.1, 1.0)),
        Kind.ENGINE_RESET: FaultSpec(4, (0.0, 0.5)),
        Kind.ENGINE_STALL: FaultSpec(3, (0.2, 1.5)),
        Kind.STORE_ERROR: FaultSpec(4, (0.05, 0.6)),
        Kind.STORE_SLOW: FaultSpec(3, (0.2, 1.5)),
        Kind.LEDGER_LOCK: FaultSpec(4, (0.1, 2.0)),
        Kind.LEDGER_CUT: FaultSpec(2),
        Kind.LEDGER_DOWN: FaultSpec(1, (0.1, 2.0)),
        Kind.DISK_FULL: FaultSpec(3, (0.1, 0.8)),
        Kind.CLOCK_JUMP: FaultSpec(5, (0.2, 3.0)),
        Kind.DAMAGE_CHECKPOINT: FaultSpec(1),
        Kind.DAMAGE_EVENTS: FaultSpec(1),
        Kind.DAMAGE_SIDECAR: FaultSpec(1),
        Kind.DAMAGE_STORE: FaultSpec(1),
        Kind.LOSE_DISK: FaultSpec(1),
        Kind.CUT_REGION: FaultSpec(2, (2.0, 15.0)),
        Kind.KILL_RELAY: FaultSpec(2),
        Kind.LOSE_ENGINE_MACHINE: FaultSpec(2, (3.0, 10.0)),
        Kind.LOSE_TRAINER_NODE: FaultSpec(1, (3.0, 10.0)),
        Kind.LOSE_SUPERVISOR: FaultSpec(2, (1.0, 5.0)),
    }
)
"""Each kind's share and time. What costs a start of all processes is rarer than what costs a retry."""

OFFLINE = frozenset(
    {Kind.DAMAGE_CHECKPOINT, Kind.DAMAGE_EVENTS, Kind.DAMAGE_SIDECAR, Kind.DAMAGE_STORE, Kind.LOSE_DISK}
)
"""Kinds that happen to files of a run that is down."""
SERVED = frozenset({Kind.LEDGER_CUT, Kind.LEDGER_DOWN, Kind.LOSE_DISK})
"""Kinds that happen to runs whose ledger is on a server, which are at a URL."""
EMBEDDED = frozenset({Kind.DAMAGE_SIDECAR})
"""Kinds that happen to runs whose ledger is a file."""
FLEET = frozenset(
    {Kind.CUT_REGION, Kind.KILL_RELAY, Kind.LOSE_ENGINE_MACHINE, Kind.LOSE_TRAINER_NODE, Kind.LOSE_SUPERVISOR}
)
"""Kinds that happen to runs on a fleet, and the only ones that do."""
LAST_SHARE = 0.85
"""Share of a run's progress after which no fault happens, so that every fault finds its run alive."""
FILES_SHARE = 0.3
"""Share of a run's progress before which no file is damaged, so that some files exist."""
LONGEST_DELAY_S = 0.4
"""A fault comes up to this much after its point of progress: as long as a step takes, so that it finds any of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    number: int
    """In its campaign, from 0."""
    kind: Kind
    at: int
    """Graded rollouts of its run after which it is due."""
    delay_s: float
    """Additional delay."""
    hold_s: float
    """Duration; 0: instantaneous."""
    pick: float
    """In [0, 1): decides among victims, bytes, statuses, directions."""


class Place(StrEnum):
    """Place of a run: one machine or a fleet."""

    FOLDER = "folder"
    """On one machine, with its ledger in a file."""
    URL = "url"
    """On one machine and at a URL, with its ledger on a server."""
    FLEET = "fleet"
    """On the machines of several regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSchedule:
    """The faults of one run, in the order in which they are due."""

    number: int
    place: Place = Place.FOLDER
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """Size of one run."""

    faults: int
    """At most."""
    rollouts: int
    """Number of rollouts that it grades."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of a campaign, and the faults that can happen in it."""

    faults: int
    size: RunSize
    """Size of a run on one machine."""
    fleet_size: RunSize | None = None
    """Size of a run on a fleet; ``None`` if fleets are not possible here."""
    server: bool = False
    """True if every other run on one machine has its ledger on a server."""
    only: frozenset[Kind] = frozenset(Kind)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The possible faults."""
        barred = frozenset() if self.server and self.faults > self.size.faults else SERVED
        return self.only - barred - (FLEET if self.fleet_size is None else frozenset())

    def size_of(self, place: Place) -> RunSize:
        """The size of a run there."""
        size = self.fleet_size if place is Place.FLEET else self.size
        assert size is not None, "no fleet is planned where there is none"
        return size


def plan(seed: int, extent: Extent) -> tuple[FaultSchedule, ...]:
    """The runs of a campaign with all their faults; the same for the same arguments, whatever the machine.

    Raises ``ValueError`` for a campaign without faults, or without kinds of them, or runs too short for theirs.
    """
    sizes = [size for size in (extent.size, extent.fleet_size) if size is not None]
    if extent.faults < 1 or not extent.kinds or not all(1 <= s.faults <= s.rollouts * LAST_SHARE for s in sizes):
        raise ValueError(f"no campaign of {extent}: it needs a fault, and a rollout or more for each of a run")
    draw = random.Random(f"faults {seed}")
    schedules: list[FaultSchedule] = []
    number = 0
    for place, kinds in _dealt(apportion(extent.faults, extent.kinds), extent, draw):
        size = extent.size_of(place)
        faults = [_drawn(number + nth, kind, (nth, len(kinds)), draw, size) for nth, kind in enumerate(kinds)]
        schedules.append(FaultSchedule(number=len(schedules), place=place, faults=_gathered(faults, size)))
        number += len(kinds)
    return tuple(schedules)


def apportion(faults: int, kinds: frozenset[Kind] = frozenset(Kind)) -> list[Kind]:
    """Numbers of each kind by their shares: only the most likely ones if there are few, and each at least once if
    possible.
    """
    shares = {kind: spec.share for kind, spec in SPECS.items() if kind in kinds}
    given = Counter(sorted(shares, key=lambda kind: -shares[kind])[:faults])
    whole = sum(shares.values())
    for _ in range(faults - given.total()):
        given[max(shares, key=lambda kind: faults * shares[kind] / whole - given[kind])] += 1
    return list(given.elements())


def _dealt(kinds: list[Kind], extent: Extent, draw: random.Random) -> list[tuple[Place, list[Kind]]]:
    """Kinds run by run, each where it can happen, and as many in one run as in another; no run is without any."""
    draw.shuffle(kinds)
    hands: list[tuple[Place, list[Kind]]] = [(place, []) for place in _places(kinds, extent)]
    for kind in sorted(kinds, key=lambda kind: kind not in SERVED | EMBEDDED):
        fitting = [hand for place, hand in hands if place in _places_of(kind)]
        min(fitting, key=len).append(kind)
    for _, hand in hands:
        draw.shuffle(hand)
    return [(place, hand) for place, hand in hands if hand]


def _places(kinds: Sequence[Kind], extent: Extent) -> list[Place]:
    """The place of each run, for all that is to happen."""
    far = sum(kind in FLEET for kind in kinds)
    near, least = len(kinds) - far, 2 if any(kind in SERVED for kind in kinds) else 1
    places = [Place.URL if extent.server and run % 2 else Place.FOLDER
              for run in range(max(least, -(-near // extent.size.faults)))]  # fmt: skip
    return places + [Place.FLEET] * (-(-far // extent.size_of(Place.FLEET).faults) if far else 0)


def _places_of(kind: Kind) -> frozenset[Place]:
    """Places in which a kind can happen."""
    if kind in FLEET:
        return frozenset({Place.FLEET})
    if kind in SERVED:
        return frozenset({Place.URL})
    return frozenset({Place.FOLDER}) if kind in EMBEDDED else frozenset({Place.FOLDER, Place.URL})


def _drawn(number: int, kind: Kind, place: tuple[int, int], draw: random.Random, size: RunSize) -> Fault:
    """A fault in the ``place[0]``-th of ``place[1]`` equal parts of its run's progress."""
    shortest_s, longest_s = SPECS[kind].hold_s
    progress = LAST_SHARE * (place[0] + draw.random()) / place[1]
    return Fault(
        number=number,
        kind=kind,
        at=int(progress * size.rollouts),
        delay_s=draw.uniform(0.0, LONGEST_DELAY_S),
        hold_s=draw.uniform(shortest_s, longest_s),
        pick=draw.random(),
    )


def _gathered(faults: Sequence[Fault], size: RunSize) -> tuple[Fault, ...]:
    """The faults in order of progress; files are damaged together, while the run is down anyway if it ever is."""
    damages = [fault for fault in faults if fault.kind in OFFLINE]
    if not damages:
        return tuple(faults)
    kills = [fault for fault in faults if fault.kind is Kind.KILL_SUPERVISOR][-1:]
    at = max((kills or damages)[-1].at, int(FILES_SHARE * size.rollouts))
    others = [fault for fault in faults if fault not in kills and fault not in damages]
    down = [replace(fault, at=at) for fault in (*kills, *damages)]
    return tuple(sorted([*down, *others], key=lambda fault: fault.at))
