"""What must hold of a run whatever went wrong in it, and what does not: the judge of a fault campaign.

    ledger snapshot at one moment, ledger snapshot later ──▶ compare ──▶ what is gone
    everything a run that is over left ──▶ audit ──▶ what is wrong

Pure: who reads is :mod:`bench.faults.evidence`. It judges by what lies on disk and what the events say, by
rules of its own; the code that it judges is not asked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from bench.report import Goal
from etude.types import Finish, RolloutStatus

STATES: Mapping[str, int] = MappingProxyType({"open": 0, "ready": 1, "claimed": 2, "consumed": 3, "dropped": 4})
"""State of a group → how far it is on its way; no group goes back."""
ENDS = frozenset({"submit", "turns", "length", "context"})
"""Finish reasons of an agent's session that the model itself causes."""


class Wrong(StrEnum):
    """Things that must not be."""

    LOST = "lost"
    DOUBLE_TRAINED = "double_trained"
    INFRA_SCORED_ZERO = "infra_scored_zero"
    UNBOUNDED_WAITS = "unbounded_waits"


NEVER = (
    Goal(
        Wrong.LOST.value,
        "at most",
        0.0,
        "Graded rollouts, committed steps and admitted prompts that are gone without a reason.",
    ),
    Goal(Wrong.DOUBLE_TRAINED.value, "at most", 0.0, "Groups and tasks that more than one step was trained on."),
    Goal(Wrong.INFRA_SCORED_ZERO.value, "at most", 0.0, "Rollouts that failed by infrastructure and have a reward."),
    Goal(
        Wrong.UNBOUNDED_WAITS.value,
        "at most",
        0.0,
        "Times that a run neither continued nor ended with a named error in time.",
    ),
)
"""The goals of a campaign: how often each was found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    wrong: Wrong
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFact:
    """A group for training, as the ledger has it."""

    index: int
    task_id: str
    epoch: int
    size: int
    state: str
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFact:
    """An ended rollout for training, as the ledger has it."""

    rollout_id: str
    group_index: int
    slot: int
    attempt: int
    status: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The ledger at one moment."""

    groups: Mapping[int, GroupFact] = field(default_factory=dict)
    rollouts: Mapping[str, RolloutFact] = field(default_factory=dict)
    steps_done: frozenset[int] = frozenset()

    @property
    def graded(self) -> int:
        """Graded rollouts: how far the run has got."""
        return sum(rollout.status == RolloutStatus.GRADED for rollout in self.rollouts.values())

    @property
    def progress(self) -> tuple[int, int, int]:
        """Something that changes whenever the run gets on."""
        return len(self.rollouts), len(self.steps_done), sum(STATES.get(g.state, 0) for g in self.groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Finish reason of a graded rollout's session, and its stored turns."""

    rollout_id: str
    reason: str
    turns: int
    last_finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Fields of an event of an ended rollout."""

    rollout_id: str
    status: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Computed:
    """Fields of a step's event about its batch; a repeated step has two events."""

    step: int
    batch: tuple[float, ...]
    """Mean reward, tokens, staleness: equal for equal batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Plan of the run."""

    steps: int
    groups_per_step: int
    max_turns: int
    max_attempts: int
    """Attempts of a slot before it may be given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weight versions of a run that is over."""

    versions: tuple[int, ...]
    faults: tuple[str, ...]
    """Versions and links that are missing or unreadable."""
    published: str
    """Digest of the newest version."""
    lineage: str
    """Digest of the version that the newest checkpoint would publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence that a finished run left."""

    terms: Terms
    snapshot: LedgerSnapshot
    drawn: tuple[tuple[str, int], ...]
    """Task ids that the dataset's cursor has passed."""
    endings: tuple[Ending, ...]
    closings: tuple[Closing, ...]
    computed: tuple[Computed, ...]
    weights: Weights


def compare(before: LedgerSnapshot, after: LedgerSnapshot) -> list[Finding]:
    """Records that disappeared, or made an impossible transition."""
    result = [
        Finding(Wrong.LOST, f"step {step} was committed and is not") for step in before.steps_done - after.steps_done
    ]
    for rollout_id, rollout in before.rollouts.items():
        if after.rollouts.get(rollout_id) != rollout:
            result.append(Finding(Wrong.LOST, f"{rollout} became {after.rollouts.get(rollout_id)}"))
    for index, group in before.groups.items():
        result += _group_changes(group, after.groups.get(index))
    return result


def _group_changes(before: GroupFact, after: GroupFact | None) -> Iterator[Finding]:
    is_other = after is None or (after.task_id, after.epoch) != (before.task_id, before.epoch)
    if after is None or is_other or STATES.get(after.state, -1) < STATES.get(before.state, -1):
        yield Finding(Wrong.LOST, f"{before} became {after}")
    elif before.step is not None and after.step != before.step:
        yield Finding(Wrong.DOUBLE_TRAINED, f"group {before.index} was step {before.step}'s and became {after.step}'s")
    elif before.state == "consumed" and after.state != "consumed":
        yield Finding(Wrong.LOST, f"group {before.index} was consumed and is {after.state}")


def audit(evidence: Evidence) -> list[Finding]:
    """Violations of a run that reached its end."""
    return [
        *_steps(evidence.snapshot, evidence.terms),
        *_prompts(evidence.snapshot, evidence.drawn),
        *_slots(evidence.snapshot, evidence.terms),
        *_rewards(evidence),
        *_redone(evidence.computed),
        *_weights(evidence.weights, evidence.terms),
    ]


def _steps(snapshot: LedgerSnapshot, terms: Terms) -> Iterator[Finding]:
    """Every step is committed once, on groups of its own."""
    expected = set(range(1, terms.steps + 1))
    if snapshot.steps_done != expected:
        odd = sorted(snapshot.steps_done ^ expected)
        yield Finding(Wrong.LOST, f"steps {odd} of {terms.steps} are committed and should not be, or the reverse")
    sizes = Counter(group.step for group in snapshot.groups.values() if group.state == "consumed")
    for step in sorted(expected):
        if sizes[step] < terms.groups_per_step:
            yield Finding(Wrong.LOST, f"step {step} was trained on {sizes[step]} groups of {terms.groups_per_step}")
        if sizes[step] > terms.groups_per_step:
            yield Finding(Wrong.DOUBLE_TRAINED, f"step {step} has {sizes[step]} groups of {terms.groups_per_step}")


def _prompts(snapshot: LedgerSnapshot, drawn: Sequence[tuple[str, int]]) -> Iterator[Finding]:
    """Every task that was drawn in an epoch is admitted, once, and every admitted one has come somewhere."""
    for index in sorted(set(range(len(snapshot.groups))) - set(snapshot.groups)):
        yield Finding(Wrong.LOST, f"group {index} was admitted and is gone")
    admitted = Counter((group.task_id, group.epoch) for group in snapshot.groups.values())
    for (task_id, epoch), times in admitted.items():
        if times > 1:
            yield Finding(Wrong.DOUBLE_TRAINED, f"task {task_id} was admitted {times} times in epoch {epoch}")
    for task_id, epoch in sorted(set(drawn) - set(admitted)):
        yield Finding(Wrong.LOST, f"task {task_id} was drawn in epoch {epoch} and never admitted")
    for group in snapshot.groups.values():
        if group.state not in STATES or group.state == "claimed":
            yield Finding(Wrong.LOST, f"group {group.index} is {group.state!r} at the end of the run")
        if group.state == "dropped" and not group.reason:
            yield Finding(Wrong.LOST, f"group {group.index} was dropped without a reason")


def _slots(snapshot: LedgerSnapshot, terms: Terms) -> Iterator[Finding]:
    """A consumed group has one graded rollout in each slot, but for the lesser half, tried as often as may be."""
    filled = Counter(
        (rollout.group_index, rollout.slot)
        for rollout in snapshot.rollouts.values()
        if rollout.status == RolloutStatus.GRADED
    )
    for (index, slot), times in filled.items():
        if times > 1:
            yield Finding(Wrong.DOUBLE_TRAINED, f"slot {slot} of group {index} has {times} graded rollouts")
    tried = Counter((rollout.group_index, rollout.slot) for rollout in snapshot.rollouts.values())
    for group in snapshot.groups.values():
        if group.state != "consumed":
            continue
        empty = [slot for slot in range(group.size) if not filled[group.index, slot]]
        for slot in empty:
            if (times := tried[group.index, slot]) < terms.max_attempts:
                yield Finding(Wrong.LOST, f"slot {slot} of consumed group {group.index} was tried {times} times only")
        if 2 * len(empty) > group.size:
            yield Finding(Wrong.LOST, f"group {group.index} was trained on without its slots {empty} of {group.size}")


def _rewards(evidence: Evidence) -> Iterator[Finding]:
    """A reward has a session that the model itself ended; nothing else has one."""
    rollouts = evidence.snapshot.rollouts
    for rollout in rollouts.values():
        if (rollout.reward is not None) != (rollout.status == RolloutStatus.GRADED):
            yield Finding(Wrong.INFRA_SCORED_ZERO, f"rollout {rollout.rollout_id}: {rollout.status}, {rollout.reward}")
    for ending in evidence.endings:
        if (fault := _unfinished(ending, evidence.terms)) is not None:
            yield Finding(Wrong.INFRA_SCORED_ZERO, f"rollout {ending.rollout_id} has a reward, but {fault}")
    for closing in evidence.closings:
        stored = rollouts.get(closing.rollout_id)
        if stored is None:
            yield Finding(Wrong.LOST, f"rollout {closing.rollout_id} ended {closing.status} and is gone")
        elif (stored.status, stored.reward) != (closing.status, closing.reward):
            yield Finding(
                Wrong.INFRA_SCORED_ZERO if stored.status == RolloutStatus.GRADED else Wrong.LOST,
                f"rollout {closing.rollout_id} ended {closing.status}, {closing.reward}; "
                f"the ledger has {stored.status}, {stored.reward}",
            )


def _unfinished(ending: Ending, terms: Terms) -> str | None:
    """The reason why a session cannot have ended as recorded; ``None`` if it can."""
    if ending.reason not in ENDS:
        return f"it ended with {ending.reason!r}, which is not the model's doing"
    if not ending.turns:
        return "it has no turn"
    if ending.reason == "turns" and ending.turns < terms.max_turns:
        return f"it ran out of turns after {ending.turns} of {terms.max_turns}"
    if (ending.reason == "length") != (ending.last_finish is Finish.LENGTH) and ending.reason != "context":
        return f"it ended with {ending.reason!r} and its last turn with {ending.last_finish}"
    return None


def _redone(computed: Sequence[Computed]) -> Iterator[Finding]:
    """A step that was redone was redone on the same batch."""
    batches: dict[int, tuple[float, ...]] = {}
    for done in computed:
        if batches.setdefault(done.step, done.batch) != done.batch:
            yield Finding(
                Wrong.DOUBLE_TRAINED, f"step {done.step} was computed on {batches[done.step]}, then {done.batch}"
            )


def _weights(weights: Weights, terms: Terms) -> Iterator[Finding]:
    """Every step's weights can be had, and the last ones are those that were trained."""
    if missing := sorted(set(range(terms.steps + 1)) ^ set(weights.versions)):
        yield Finding(Wrong.LOST, f"weight versions {missing} are missing, or there and should not be")
    for fault in weights.faults:
        yield Finding(Wrong.LOST, f"weights: {fault}")
    if weights.published != weights.lineage:
        yield Finding(
            Wrong.LOST, f"published weights {weights.published[:12]}, the checkpoint's are {weights.lineage[:12]}"
        )
