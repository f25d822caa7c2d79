"""Typed events of a run: the schema of its log.

Each event is one JSON line in ``events/<process>.jsonl``, written by :mod:`etude.telemetry.log`. Events are facts for
people and reports; no process acts on one (the state of a run is in the ledger). ``_s`` is seconds, ``_ms``
milliseconds.
"""

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """``etude run`` started, or resumed after an interruption."""

    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """The run entered a phase: ``midtrain``, ``sft``, ``eval-before``, ``rl``, ``eval-after`` or ``done``."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """The supervisor started a process; ``restarts`` is the number of its deaths before."""

    process: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsed:
    """Total memory of the run's processes, without sandboxes; what several of them share counts once."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationProgress:
    """Mid-training or SFT after some steps; losses are nats per token since the previous event."""

    phase: str
    """``midtrain`` or ``sft``."""
    step: int
    steps: int
    tokens: int
    loss: float | None
    """Weighted as in training; ``None`` if no token had a weight."""
    action_loss: float | None
    """Loss on the tokens that an agent wrote; ``None`` if there were none."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutLoss:
    """The loss on documents that are never trained on, in nats per token."""

    phase: str
    step: int
    """0: before the phase."""
    tokens: int
    """Tokens read in the phase so far."""
    loss: float
    """Mean over sources, weighted by their shares of the whole phase."""
    action_loss: float | None
    """Loss on the tokens that an agent wrote; ``None`` if there are none."""
    sources: dict[str, float] = field(default_factory=dict)
    """Source → its loss, with tokens weighted as in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """Mid-training or SFT is complete and will not be repeated: one step of a model's lineage."""

    phase: str
    steps: int
    tokens: int
    loss: float | None
    """Held-out loss at its end; ``None`` if not measured."""
    digest: str
    """Digest of the final weights."""
    parent: str
    """Digest of the initial weights."""


MOST_AGES = 33
"""Number of token ages that :class:`StepDone` counts: users' sessions may be older than any bound of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimiser step was computed. Written before it is saved: a step repeated after a crash is logged twice."""

    step: int
    metrics: dict[str, float]
    """Values by their names in :data:`etude.telemetry.metrics.METRICS`; unmeasured ones are absent."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Part of the reward, or other measurement → mean over the unquarantined rollouts that have it."""
    ended: dict[str, int] = field(default_factory=dict)
    """Reason why the agent stopped → rollouts of the batch: ``submit``, ``length``, ``turns``, …"""
    groups: list[int] = field(default_factory=list)
    """Indices of the simulated groups that it consumed."""
    token_ages: list[int] = field(default_factory=list)
    """Staleness in weight versions, from 0 → sampled tokens of the batch; the last of ``MOST_AGES`` includes older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSaved:
    """The trainer's consecutive work between computing a step and waiting for the next batch."""

    step: int
    commit_s: float
    """Wait until the previous version is visible and, if required, its checkpoint is durable, and commit of that step.
    """
    save_s: float
    """Copy of the state for its checkpoint, which is written during the next step; 0 for a step without one."""
    publish_s: float
    """Transfer of the weights to the publisher, which works during the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMeasured:
    """One row of a step's mismatch by version or position; statistics as in :mod:`etude.telemetry.metrics`. A step
    repeated after a crash is logged twice.
    """

    step: int
    by: str
    """``version``: the weights that sampled, or ``position``: the position in the completion."""
    first: int
    """The version, or the first position of the row's range, from 0."""
    last: int | None
    """The version again, or the last position of the range; ``None``: unbounded."""
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
    """The mismatch exceeded ``numerics.warn_k3``; written once until it has been below again."""

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
    """Part of that in which the trainer was blocked."""
    digest: str = ""
    """Digest of the whole state: versions with equal digests have the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSwapped:
    """An engine started to sample with a new weight version."""

    version: int
    stage_ms: float
    """Fetch, decode and verify, while serving."""
    pause_ms: float
    """Time in which no token could be sampled."""


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
    """Verified draft tokens."""
    accepted_tokens: int = 0
    """Draft tokens equal to the sampled ones."""
    steps: int = 0
    """Steps that it computed; 0 if it does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted:
    """A group was admitted; its rollouts start as soon as there is capacity."""

    purpose: str
    group_index: int
    version: int
    """Newest weight version that every engine served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A gateway answered a model call of a rollout; written only if traces are exported (``log.to``)."""

    session: str
    seconds: float
    """From the first byte read to the last written."""
    waited_s: float
    """Part of that, at its start, in which no engine worked on it."""
    first_token_s: float | None
    """Time to the first sampled token."""
    api: str
    engine: str
    """Name of the engine that answered; empty if none did."""
    status: int
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    versions: list[int] = field(default_factory=list)
    """Weight versions that sampled the answer, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """Model calls of a gateway that ended since its previous event; written if there were any."""

    window_s: float
    calls: int
    failed: int
    """Calls that ended with an error, or whose caller disconnected."""
    call_s: float
    """Sum of their durations."""
    waited_s: float
    """Part of that in which no engine worked on them."""
    cpu_s: float = 0.0
    """Processor time of the gateway; 0 in logs of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsStats:
    """Places of a rollouts process that are in use."""

    running: int
    """Rollouts that run or wait for their next attempt: the most at a time since the previous event."""
    capacity: int
    """``rollouts.concurrency``."""
    sandboxes: int = 0
    """Sandboxes that are open or requested on several hosts now; 0 where there are none."""
    sandbox_room: int = 0
    """Further sandboxes that these hosts could take now."""


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
    """Newest weight version that sampled in it; -1 for none."""
    disposition: str = "keep"
    """``keep``, ``quarantine`` or ``zero``."""
    flags: list[str] = field(default_factory=list)
    """Names of the detectors that found a sign of cheating in it."""
    hacked: bool = False
    cheat_reason: str = ""
    impossible: bool = False
    """True if its task cannot be passed honestly."""
    passed: bool = False
    """True if its grader gave it ``eval.pass_at`` or more, before any later change of the reward."""
    session: str = ""
    """The gateway session of its model calls."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """:class:`etude.types.RolloutStage` → seconds, in their order, except that model and tools alternate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """A held-out evaluation is complete."""

    label: str
    """``before``, ``after``, or ``step-N`` in between."""
    version: int
    """Weights served at its start; during RL, newer ones may have sampled its last turns."""
    tasks: int
    sampled_pass: float
    """Share of tasks whose grader gave ``eval.pass_at`` or more."""
    sampled_stderr: float
    """Standard error over templates; for a rate of 0 or 1, the extent of its exact interval."""
    greedy_pass: float
    greedy_stderr: float
    sampled_parts: dict[str, float] = field(default_factory=dict)
    """Means of parts, as in :class:`StepDone`."""
    greedy_parts: dict[str, float] = field(default_factory=dict)
    clusters: list[str] = field(default_factory=list)
    """Template of each held-out task, in order, or its id if it has none: tasks of one cluster are similar."""
    sampled_rewards: list[float | None] = field(default_factory=list)
    """One per task; ``None``: infrastructure prevented the attempt."""
    sampled_passed: list[bool | None] = field(default_factory=list)
    greedy_rewards: list[float | None] = field(default_factory=list)
    greedy_passed: list[bool | None] = field(default_factory=list)
    sampled_calls: list[dict[str, float]] = field(default_factory=list)
    """For each turn: tool → share of rollouts that called it; the remainder to 1 had ended before."""
    greedy_calls: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFailed:
    """An evaluation during RL gave no result; training and later evaluations continue."""

    label: str
    """``step-N``."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAlarm:
    """The judge may no longer be the calibrated one."""

    kind: str
    """``model``: its endpoint reports another one; ``agreement``: it agrees less with people's labels."""
    aspect: str
    """Empty: all aspects."""
    detail: str


OUTAGE_TOLD_S = 60.0
"""Time after which a continuing outage is reported again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A dependency of a process is unavailable, or available again: then ``seconds`` is 0."""

    what: str
    """``rollouts``, or a store's URL."""
    seconds: float
    """Duration of the outage so far."""
    reason: str
    """The last failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionServed:
    """A region of a run with several, from the view of one rollouts process."""

    region: str
    """Its name in the fleet."""
    version: int
    """Weight version that all its engines serve; -1 for none yet."""
    open: int
    """Open sessions in it."""
    sessions: int
    """Sessions assigned to it since the last such event."""
    payload_bytes: int
    """Size of the routes and sampling masks from its sessions since then."""
    is_away: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChanged:
    """A rule of ``[[alerts]]`` started or stopped firing."""

    alert: str
    """Name of the rule."""
    firing: bool
    value: float
    """Newest value that it watches; never NaN."""
    summary: str
    """The rule and the value in one line for people."""
    to: list[str] = field(default_factory=list)
    """The receivers: ``log``, ``page``, ``webhook``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailed:
    """A sink does not accept events, or lost some; the run continues."""

    sink: str
    reason: str
    lost: int
    """Events that it lost so far; 0: they wait."""


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
    | RolloutsStats
    | RolloutClosed
    | EvalDone
    | EvalFailed
    | JudgeAlarm
    | Outage
    | RegionServed
    | AlertChanged
    | SinkFailed
)
"""Every event of a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """An event with its time and its process."""

    at_s: float
    """Unix time."""
    process: str
    event: Event
