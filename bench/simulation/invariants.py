"""What must hold of a simulated run at any moment and at its end, beside :mod:`bench.faults.audit`. Pure.

    two views of the run, a moment apart ──▶ between ──▶ violations
    all that a run left that reached its end ──▶ at_end ──▶ violations

The rules are of their own: the code that is judged is not asked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from bench.faults.audit import Evidence, LedgerSnapshot, audit, compare
from etude.config.recipe import RunConfig
from etude.types import Group


class Rule(StrEnum):
    """A rule of a run, beside those of the audit."""

    WINDOW = "window"
    """No more groups are kept than the newest version and the staleness bound allow."""
    STALE = "stale"
    """No trained token is staler than the bound, older than what every engine served when its group was admitted, or
    newer than the version that it is trained by.
    """
    COMPARED = "compared"
    """A group that is trained on has two rollouts or more."""
    ORDER = "order"
    """Batches follow the order of admission."""
    VERSIONS = "versions"
    """Versions are published one after the other, each once, and no step is committed before its own."""
    LEASE = "lease"
    """A fencing token never falls, and rises with every new holder."""
    OPEN = "left_open"
    """Violation: a process that ended by itself left sessions or sandboxes open."""
    DEAD_ENGINE = "dead_engine"
    """No call goes to an engine that is known to be down while another one could take it."""
    CRASHED = "crashed"
    """No process ends with a bug, or with an error of the user."""
    STUCK = "stuck"
    """Every run reaches its end in bounded time."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    rule: str
    """A :class:`Rule`, or a goal of the audit."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFact:
    """A lease as the ledger has it."""

    holder: str
    token: int
    beats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    at_s: float
    snapshot: LedgerSnapshot
    leases: Mapping[str, LeaseFact]
    published: int
    """The newest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """All that a run left that reached its end."""

    evidence: Evidence
    trained: Sequence[Group]
    """Consumed groups in order of admission, with their turns."""
    published: Sequence[int]
    """Versions in the order in which they were published."""
    sessions: Sequence[str]
    """Sessions that a process opened and did not end, although it ended by itself."""
    admitted: Mapping[int, int]
    """Group → the version that its process knew, by its events; a killed process has not written all of them."""
    sandboxes: int
    """Open sandboxes."""


def between(before: RunView, after: RunView, config: RunConfig) -> list[Violation]:
    """Violations by what changed between two moments, and by how the later one is."""
    changes = [Violation(finding.wrong, finding.what) for finding in compare(before.snapshot, after.snapshot)]
    return [*changes, *_window(after, config), *_committed(after), *_leases(before, after)]


def at_end(remains: Remains, config: RunConfig) -> list[Violation]:
    """Violations in what a run left behind."""
    return [
        *(Violation(finding.wrong, finding.what) for finding in audit(remains.evidence)),
        *_staleness(remains, config.rollouts.max_staleness),
        *_order(remains.evidence.snapshot),
        *_versions(remains.published, config.trainer.steps),
        *(Violation(Rule.OPEN, f"session {session} was never ended") for session in remains.sessions),
        *[Violation(Rule.OPEN, f"{remains.sandboxes} sandboxes are open")] * bool(remains.sandboxes),
    ]


def _window(view: RunView, config: RunConfig) -> Iterator[Violation]:
    rollouts, steps = config.rollouts, config.trainer.steps
    groups = sum(group.state != "dropped" for group in view.snapshot.groups.values())
    most = min(view.published + rollouts.max_staleness + 1, steps) * rollouts.groups_per_step
    if groups > most:
        yield Violation(Rule.WINDOW, f"{groups} groups are kept at version {view.published}, {most} may be")


def _committed(view: RunView) -> Iterator[Violation]:
    newest = max(view.snapshot.steps_done, default=0)
    if newest > view.published:
        yield Violation(Rule.VERSIONS, f"step {newest} is committed, version {view.published} is the newest")


def _leases(before: RunView, after: RunView) -> Iterator[Violation]:
    for name, old in before.leases.items():
        new = after.leases.get(name)
        if new is None or new.token < old.token:
            yield Violation(Rule.LEASE, f"lease {name} went from token {old.token} to {new}")
        elif new.token == old.token and new.holder and (new.beats < old.beats or new.holder != old.holder):
            yield Violation(Rule.LEASE, f"lease {name} changed hands under token {old.token}: {old}, {new}")


def _staleness(remains: Remains, most: int) -> Iterator[Violation]:
    steps = {index: group.step for index, group in remains.evidence.snapshot.groups.items()}
    for group in remains.trained:
        trained_by = (steps[group.index] or 0) - 1
        for rollout in group.rollouts:
            versions = {int(version) for turn in rollout.turns for version in turn.versions}
            oldest = max(trained_by - most, remains.admitted.get(group.index, 0))
            if wrong := [version for version in sorted(versions) if not oldest <= version <= trained_by]:
                fresh = f"versions {oldest} … {trained_by} may"
                yield Violation(Rule.STALE, f"group {group.index} has tokens of versions {wrong}, {fresh}")
        if len(group.rollouts) < 2:
            yield Violation(Rule.COMPARED, f"group {group.index} was trained on with {len(group.rollouts)} rollout")


def _order(snapshot: LedgerSnapshot) -> Iterator[Violation]:
    trained = [group for _, group in sorted(snapshot.groups.items()) if group.step is not None]
    for one, other in pairwise(trained):
        if one.step is not None and other.step is not None and one.step > other.step:
            yield Violation(Rule.ORDER, f"group {one.index} is step {one.step}'s, group {other.index} {other.step}'s")


def _versions(published: Sequence[int], steps: int) -> Iterator[Violation]:
    if list(published) != list(range(1, steps + 1)):
        yield Violation(Rule.VERSIONS, f"versions were published in the order {list(published)}, of {steps}")
