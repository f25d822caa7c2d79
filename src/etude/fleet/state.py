"""The desired and the observed state of a fleet, as the bytes of objects. Pure.

    home ──Desired, by generation──▶ supervisor of each region ──Observed──▶ readers of the fleet's state

Owns the two classes and their JSON. :mod:`etude.run.fleet_state` stores and reads the objects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import orjson

from etude.config.fleet import FleetConfig
from etude.fleet.specs import GroupMember, ProcessSpec, ProcessStatus, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The processes to run in all regions."""

    fleet: FleetConfig
    specs: tuple[ProcessSpec, ...]

    def dump(self) -> bytes:
        """Write it as JSON."""
        specs = [asdict(spec) for spec in self.specs]
        return orjson.dumps({"fleet": self.fleet.model_dump(mode="json"), "specs": specs})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the JSON of :meth:`dump`. Raises ``ValueError`` for anything else."""
        try:
            tree = orjson.loads(data)
            fleet = FleetConfig.model_validate_json(orjson.dumps(tree["fleet"]))
            return cls(fleet=fleet, specs=tuple(map(_spec, tree["specs"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no desired state: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The processes as last observed by a supervisor."""

    generation: int
    """Generation of the desired state that the supervisor reconciles with."""
    host: str
    """The supervisor's machine."""
    statuses: Mapping[str, ProcessStatus]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Program → its version on that machine: étude, Python, torch."""

    @property
    def shape(self) -> tuple[object, ...]:
        """The parts that do not change all the time."""
        states = {
            name: (status.incarnation, status.exit_status, status.is_pending, status.is_lost)
            for name, status in self.statuses.items()
        }
        return self.generation, self.host, states

    def dump(self) -> bytes:
        """Write it as JSON."""
        return orjson.dumps({**asdict(self), "statuses": {name: asdict(each) for name, each in self.statuses.items()}})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the JSON of :meth:`dump`. Raises ``ValueError`` for anything else."""
        try:
            tree = orjson.loads(data)
            statuses = {name: ProcessStatus(**fields) for name, fields in tree["statuses"].items()}
            return cls(**{**tree, "statuses": statuses})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no observed state: {error}") from error


def lasting_changes(before: FleetConfig, after: FleetConfig) -> Sequence[str]:
    """Keys of a fleet that differ between two specs but may not change during a run: processes read them at their
    start.
    """
    places = [{region.name: region.store for region in fleet.regions} for fleet in (before, after)]
    lasting = {name: (getattr(before, name), getattr(after, name)) for name in ("launcher", "home", "options")}
    lasting["trainer"] = before.trainer, after.trainer
    lasting["regions[].name and .store"] = places[0], places[1]
    return [name for name, (one, other) in lasting.items() if one != other]


def _spec(tree: dict[str, Any]) -> ProcessSpec:
    """Build a spec from its fields."""
    group = tree["group"]
    return ProcessSpec(**{
        **tree,
        "command": tuple(tree["command"]),
        "secrets": tuple(tree["secrets"]),
        "resources": Resources(**tree["resources"]),
        "group": None if group is None else GroupMember(**group),
    })  # fmt: skip
