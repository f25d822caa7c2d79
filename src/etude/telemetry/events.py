"""Typed events of a run: the schema of its log.

Each event is one JSON line in ``events/<process>.jsonl``, written by :mod:`etude.telemetry.log`. Events are facts for
people and reports; no process ever acts on one (state that matters lives in the ledger). ``_s`` is seconds, ``_ms``
milliseconds.
"""

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """``etude run`` began, or began again after an interruption."""

    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """The run entered a phase: ``midtrain``, ``sft``, ``eval-before``, ``rl``, ``eval-after`` or ``done``."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """The supervisor started a process; ``restarts`` counts how often it had died before."""

    process: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsed:
    """Resident memory of the run's processes together, sandboxes aside."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationProgress:
    """Mid-training or SFT after some steps; losses are nats per token since the previous event."""

    phase: str
    """``midtrain`` or ``sft``."""
    step: int
    steps: int
    tokens: int
    loss: float
    """Weighted as it was learnt."""
    action_loss: float
    """Loss on the tokens that an agent wrote; 0 where there were none."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutLoss:
    """The loss on documents that are never learnt from, in nats per token."""

    phase: str
    step: int
    """0: before the phase."""
    tokens: int
    """Read in the phase so far."""
    loss: float
    """Mean of the sources' by their shares of the whole phase."""
    action_loss: float
    sources: dict[str, float] = field(default_factory=dict)
    """Source → its loss, tokens weighted as they would be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """Mid-training or SFT is done and will not be done again: one link of a model's descent."""

    phase: str
    steps: int
    tokens: int
    loss: float
    """Held-out loss at its end; 0 where nothing was measured."""
    digest: str
    """Digest of the weights it ended with."""
    parent: str
    """Digest of the weights it began with."""


MOST_AGES = 33
"""Ages of tokens that :class:`StepDone` tells apart: sessions of users may be older than any bound of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimiser step was computed. Written before it is saved: a step redone after a crash stands here twice."""

    step: int
    metrics: dict[str, float]
    """By the names of :data:`etude.telemetry.metrics.METRICS`; what the step cannot know is absent."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Part of the reward, or what was measured beside → mean over the rollouts that have it, none quarantined."""
    ended: dict[str, int] = field(default_factory=dict)
    """Reason why the agent stopped → rollouts of the batch: ``submit``, ``length``, ``turns``, …"""
    groups: list[int] = field(default_factory=list)
    """Indices of the simulated groups that it consumed."""
    token_ages: list[int] = field(default_factory=list)
    """Staleness in weight versions, from 0 → sampled tokens of the batch; the last of ``MOST_AGES`` has all older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSaved:
    """The trainer's work between computing a step and waiting for the next batch, one after the other."""

    step: int
    commit_s: float
    """Waiting for the version before to be visible and, where it has to be, for its checkpoint to be durable, and
    committing that step.
    """
    save_s: float
    """Copying the state for its checkpoint, which is written beside the next step; 0 for a step that has none."""
    publish_s: float
    """Handing the weights over to be published; that itself goes on beside the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMeasured:
    """One row of a step's mismatch, broken down; statistics as in :mod:`etude.telemetry.metrics`. Like that, a step
    redone after a crash stands here twice.
    """

    step: int
    by: str
    """``version``: the weights that sampled, or ``position``: the place in the completion."""
    first: int
    """The version, or the first position of the row's range, counted from 0."""
    last: int | None
    """The version again, or the last position of the range; ``None``: it is open."""
    tokens: int
    k1: float
    k3: float
    p99: float
    max: float
    equal: int
    pairs: int
    """0 by position: flips are counted per forward pass."""
    flips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchWarned:
    """The mismatch rose above ``numerics.warn_k3``; written once until it has been below again."""

    step: int
    k3: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    """A weight version became visible in the store."""

    version: int
    kind: str
    size_bytes: int
    state_bytes: int
    """Size of the whole state, uncompressed."""
    seconds: float
    """From the end of the step to the commit record."""
    blocked_s: float
    """Part of that in which the trainer stood still."""
    digest: str = ""
    """Digest of the whole state: two versions of one digest have the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSwapped:
    """An engine began to sample with a new weight version."""

    version: int
    stage_ms: float
    """Fetch, decode and verify, while serving."""
    pause_ms: float
    """No token could be sampled for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Work of an engine since its previous event."""

    busy_s: float
    window_s: float
    generated_tokens: int
    prefill_tokens: int
    reused_tokens: int
    """Prompt tokens taken from the prefix cache."""
    running: int
    waiting: int
    drafted_tokens: int = 0
    """Drafts that were verified."""
    accepted_tokens: int = 0
    """Drafts that were what was sampled."""
    steps: int = 0
    """Steps that it computed; 0 where it does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted:
    """A group was let in; its rollouts begin as soon as there is room."""

    purpose: str
    group_index: int
    version: int
    """The newest weight version that every engine served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A gateway answered a model call of a rollout; written only where traces are exported (``log.to``)."""

    session: str
    seconds: float
    """From the first byte read to the last written."""
    waited_s: float
    """Part of that, at its beginning, in which no engine worked on it."""
    first_token_s: float | None
    """Time to the first sampled token."""
    api: str
    engine: str
    """Name of the engine that answered; empty where none did."""
    status: int
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    versions: list[int] = field(default_factory=list)
    """Weight versions that sampled the answer, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """Model calls of a gateway that ended since its previous event; written where there were any."""

    window_s: float
    calls: int
    failed: int
    """Calls that were answered with an error, or whose caller hung up."""
    call_s: float
    """Sum of their durations."""
    waited_s: float
    """Part of that in which no engine worked on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutClosed:
    """A rollout ended; ``purpose`` is ``train`` or the label of an evaluation."""

    rollout_id: str
    purpose: str
    group_index: int
    status: str
    reason: str
    reward: float | None
    turns: int
    sampled_tokens: int
    seconds: float
    template: str = ""
    """Template of its task."""
    version: int = -1
    """The newest weight version that sampled in it; -1 for none."""
    disposition: str = "keep"
    """``keep``, ``quarantine`` or ``zero``."""
    flags: list[str] = field(default_factory=list)
    """Names of the detectors that found a sign of cheating in it."""
    hacked: bool = False
    cheat_reason: str = ""
    impossible: bool = False
    """True if its task cannot be passed honestly."""
    passed: bool = False
    """True if its grader gave it ``eval.pass_at`` or more, whatever was made of that."""
    session: str = ""
    """The gateway session of its model calls."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """:class:`etude.types.RolloutStage` → seconds, in their order, except that model and tools take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """A held-out evaluation is complete."""

    label: str
    """``before``, ``after``, or ``step-N`` on the way."""
    version: int
    """The weights that were served when it began; while RL goes on, newer ones may have sampled its last turns."""
    tasks: int
    sampled_pass: float
    """Share of tasks whose grader gave ``eval.pass_at`` or more."""
    sampled_stderr: float
    """Over templates; of a rate of 0 or 1, as far as its exact interval goes."""
    greedy_pass: float
    greedy_stderr: float
    sampled_parts: dict[str, float] = field(default_factory=dict)
    """Means of parts, as in :class:`StepDone`."""
    greedy_parts: dict[str, float] = field(default_factory=dict)
    clusters: list[str] = field(default_factory=list)
    """The template of each held-out task, in order, or else its id: tasks of one cluster are alike."""
    sampled_rewards: list[float | None] = field(default_factory=list)
    """One for each task; ``None``: infrastructure kept it from being tried."""
    sampled_passed: list[bool | None] = field(default_factory=list)
    greedy_rewards: list[float | None] = field(default_factory=list)
    greedy_passed: list[bool | None] = field(default_factory=list)
    sampled_calls: list[dict[str, float]] = field(default_factory=list)
    """For each turn, the share of rollouts by the tool that they called in it; what lacks to 1 had ended before."""
    greedy_calls: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAlarm:
    """The judge may not be the one that was calibrated any more."""

    kind: str
    """``model``: its endpoint says it is another one; ``agreement``: it agrees less with people's labels."""
    aspect: str
    """Empty: all of them."""
    detail: str


OUTAGE_TOLD_S = 60.0
"""Time after which an outage that goes on is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Something that a process waits for is away, or it is back: then ``seconds`` is 0."""

    what: str
    """``rollouts``, or a store's URL."""
    seconds: float
    """For how long it has been away."""
    reason: str
    """The last failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionServed:
    """A region of a run with several, as one rollouts process sees it."""

    region: str
    """Its name in the fleet."""
    version: int
    """The weight version that all its engines serve; -1 for none yet."""
    open: int
    """Sessions in it."""
    sessions: int
    """Sessions that it was given since the last such event."""
    payload_bytes: int
    """Size of the routes and sampling masks that came of its sessions since then."""
    is_away: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChanged:
    """A rule of ``[[alerts]]`` began to hold, or holds no more."""

    alert: str
    """Name of the rule."""
    firing: bool
    value: float
    """The newest value of what it watches; NaN is never one."""
    summary: str
    """The rule and the value in a line for people."""
    to: list[str] = field(default_factory=list)
    """The receivers: ``log``, ``page``, ``webhook``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed:
    """A sink does not take events, or lost some; the run goes on."""

    sink: str
    reason: str
    lost: int
    """Events that it will never get, so far; 0: they wait."""


Event: TypeAlias = (
    RunStarted
    | PhaseStarted
    | ProcessStarted
    | MemoryUsed
    | ImitationProgress
    | HeldoutLoss
    | PhaseEnded
    | StepDone
    | GroupAdmitted
    | ModelCall
    | StepSaved
    | MismatchMeasured
    | MismatchWarned
    | WeightsPublished
    | WeightsSwapped
    | EngineStats
    | GatewayStats
    | RolloutClosed
    | EvalDone
    | JudgeAlarm
    | Outage
    | RegionServed
    | AlertChanged
    | SinkFailed
)
"""Everything that can stand in a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """An event with its time and its process."""

    at_s: float
    """Unix time."""
    process: str
    event: Event
