"""Data types that travel between étude's stages.

Every noun is frozen and checks its own invariants once, at birth; everyone after that trusts them. Nothing here does
I/O or knows a stage. Array legend: P prompt tokens of a turn, C sampled tokens of a turn, L tokens of a trajectory.

    Task ──▶ Rollout (Turns) ──▶ Trajectory ──▶ Batch ──▶ WeightVersion
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from etude.sandbox_spec import EnvironmentSpec

Ids: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = Sequence[int] | Ids
"""Token ids as callers hold them; an engine takes either."""
Floats: TypeAlias = npt.NDArray[np.float32]
"""One real number per token."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""One truth value per token."""
Routes: TypeAlias = npt.NDArray[np.uint16]
"""[tokens, sparse layers, experts per token] which experts each token was sent to, best first."""
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Any value that JSON can carry."""

UNSAMPLED = -1
"""The weight version of a token that no model sampled (prompts, tool output)."""
NO_ROUTE = 0xFFFF
"""Stands for an expert where no engine named it: the trainer's own router decides."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Between which a temperature is that is not 0: what is divided by it stays a number in float32, which ends at 1e38."""
SHA256_HEX = 64
"""Length of a SHA-256 in hex."""


def as_list(token_ids: TokenIds) -> list[int]:
    """Convert token ids of any container to a list of Python ints."""
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)


class Split(StrEnum):
    """Side of the held-out split; held-out tasks are never trained on."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case: a call of the function and its expected value, ``Case(arguments=([3],), expected=3)``."""

    arguments: tuple[Json, ...]
    expected: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionChecks:
    """Checks by calls of one function in one file.

    ``visible`` cases may be shown to the agent; of ``hidden`` ones the arguments enter its world, once it is gone.
    """

    path: str
    function: str
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]

    def __post_init__(self) -> None:
        if not self.hidden:
            raise ValueError(f"task for {self.function!r} has no hidden case: it could not be graded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Calls of one function from outside of its process, which never learns the expected results.

    ``module`` is imported in the graded world, with the working folder and the image's ``PYTHONPATH`` to find it by.
    """

    module: str
    function: str
    """Its name in the module, dotted for one of a class."""
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestChecks:
    """Checks by hidden tests on the agent's artefacts, in a sandbox that the agent never entered."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    files: Mapping[str, str]
    """Hidden test files, relative to the working folder; they replace what the agent has there."""
    must_pass: tuple[str, ...]
    """Node ids, each of which must be seen to pass: those that the task is about, then those that passed before."""
    about: int
    """Number of ``must_pass`` that fail in the world that the agent was given."""
    artefacts: tuple[str, ...]
    """Files and folders, relative to the working folder, that are carried over from the agent's sandbox."""
    command: tuple[str, ...] = ("python3", "-m", "pytest")
    """Command that runs the tests; node ids and options are added."""
    probes: tuple[Probe, ...] = ()
    visible: tuple[str, ...] = ()
    """Node ids or files in the agent's sandbox that its own ``test`` runs; none: all that are there."""
    timeout_s: float = 120.0
    """For one whole run of the tests."""

    def __post_init__(self) -> None:
        if not self.must_pass or not 0 < self.about <= len(self.must_pass):
            raise ValueError(f"{self.about} of {len(self.must_pass)} tests are what the task is about: expected some")

    @property
    def grading_s(self) -> float:
        """Longest time of one grading: the tests, in a fresh sandbox, with canaries six times, and every probe."""
        return self.timeout_s * (8 + len(self.probes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChecks:
    """Checks by the task author's program, which writes a reward file, in a sandbox of its own (Harbor)."""

    files: Mapping[str, str]
    """The verifier's files, relative to ``/tests``."""
    command: tuple[str, ...] = ("bash", "/tests/test.sh")
    artefacts: tuple[str, ...] = (".",)
    """Files and folders, relative to the working folder, that are carried over from the agent's sandbox."""
    canary: str = ""
    """File of the verifier's tests, one of which is made to fail in some runs that rewarded work is put to."""
    canary_tests: tuple[str, ...] = ()
    """Tests of the canary file that fail without the work, of which it is one; none: all. Another, by failing, would
    give it away.
    """
    rewards: tuple[float, ...] = (0.0, 1.0)
    """All that a verifier with a canary pays. Anything else is no verdict, so a failed test costs a whole step."""
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    """For one whole run of the verifier."""

    @property
    def grading_s(self) -> float:
        """Longest time of one grading: the work, in a fresh sandbox, the work once more, and four with the canary."""
        return self.timeout_s * (7 if self.canary else 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of the task's database, and its expected rows, as JSON."""

    sql: str
    rows: tuple[tuple[Json, ...], ...]
    setup: str = ""
    """SQL that is run before, in the same transaction, which is rolled back afterwards."""
    fails_with: str = ""
    """SQLSTATE that the question must fail with instead, such as ``23505``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryChecks:
    """Checks of a database: the migration is applied to a fresh copy, which is then queried."""

    path: str
    """The SQL file that the agent leaves."""
    queries: tuple[Query, ...]
    unseen: str = ""
    """SQL that is run on the fresh copy before the migration: the rows give way to some that the agent has not seen."""

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError(f"the task about {self.path!r} asks its database nothing: it could not be graded")


AnswerMatch: TypeAlias = Literal["exact", "normalised", "choice", "math"]
"""Rule by which an answer is compared with the right one; :mod:`etude.rewards.graders.answers` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChecks:
    """Checks of an answer: the agent's last message is compared with the right one."""

    answer: str
    facts: tuple[str, ...] = ()
    """Pieces of the material that the answer takes, as they stand there: what a good summary keeps."""
    match: AnswerMatch = "exact"
    after: str = ""
    """Text behind whose last occurrence the agent's answer stands; empty: the whole message is read."""

    def __post_init__(self) -> None:
        if not self.answer.split():
            raise ValueError("the right answer of a task has no word: nothing could be compared with it")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedChecks:
    """Checks by a grader that is chosen by its name, with options that its own class reads."""

    grader: str
    """A name in the recipe's ``tasks.graders``, a built-in one, ``module:Name`` or an entry point."""
    options: Mapping[str, Json] = field(default_factory=dict)


Checks: TypeAlias = FunctionChecks | TestChecks | ScriptChecks | QueryChecks | AnswerChecks | NamedChecks
"""Checks that grade a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMessage:
    """One message of a conversation that a task begins with."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task for an agent, and how it is graded."""

    task_id: str
    """Digest of what is asked and of the right answer; the cases may differ between two tasks of one id."""
    family: str
    """Environment that made it, e.g. ``bugfix``."""
    template: str
    """The abstract problem behind the instance; whole templates are held out."""
    split: Split
    prompt: str
    """Instruction to the agent."""
    files: Mapping[str, str]
    """Files of the agent's sandbox beside its image: path, relative to the working folder → text."""
    checks: Checks
    environment: EnvironmentSpec | None = None
    """Specification of its sandbox; ``None``: nothing but ``files``."""
    history: tuple[PromptMessage, ...] = ()
    """Conversation before the prompt, for a harness of a single turn."""

    @property
    def function_checks(self) -> FunctionChecks:
        """The checks of a task that is graded by calls of a function. Raises ``ValueError`` for any other task."""
        if not isinstance(self.checks, FunctionChecks):
            raise ValueError(f"task {self.task_id!r} is graded by {type(self.checks).__name__}, not by calls")
        return self.checks

    @property
    def grading_s(self) -> float:
        """Seconds that the runs of one grading take at most together; 0 where the grader's own limits are all."""
        return self.checks.grading_s if isinstance(self.checks, TestChecks | ScriptChecks) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A token sequence to train on: the unit of mid-training."""

    token_ids: Ids
    """[L]"""
    weights: Floats
    """[L] how much the prediction of each token counts; the first token is never predicted."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.weights):
            raise ValueError(f"document has {len(self.token_ids)} tokens but {len(self.weights)} weights")


class Finish(StrEnum):
    """Reason for which the model stopped sampling a turn."""

    STOP = "stop"
    """It sampled its end-of-turn token, which is the last of ``completion_ids``."""
    LENGTH = "length"
    """It was cut: it ran out of its token allowance, or its caller wanted no more."""


class TurnKind(StrEnum):
    """Purpose of a turn."""

    ACT = "act"
    """The next thing to say or do."""
    SUMMARY = "summary"
    """A summary, from which the context starts anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpace:
    """The possible routes of a model, against which an engine's record is checked."""

    layers: int
    """Layers with experts."""
    slots: int
    """Experts that each token is sent to."""
    experts: int

    def check(self, routes: Routes, rows: int) -> None:
        """Raise ``ValueError`` unless ``routes`` are those of ``rows`` tokens.

        A token has, layer by layer, either ``slots`` different experts that exist or ``NO_ROUTE`` in every slot.
        """
        expected = (rows, self.layers, self.slots)
        if routes.shape != expected or routes.dtype != np.uint16:
            raise ValueError(f"routes are {routes.dtype}{list(routes.shape)}, expected uint16{list(expected)}")
        ordered = np.sort(routes, axis=-1)
        unknown = (ordered == NO_ROUTE).all(-1)
        beyond = ordered[..., -1] >= self.experts
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong = np.argwhere((beyond | twice) & ~unknown)
        if len(wrong):
            row, layer = wrong[0].tolist()
            raise ValueError(
                f"{len(wrong)} routes name an expert twice or beyond the {self.experts} there are, the first at token "
                f"{row}, sparse layer {layer}: {routes[row, layer].tolist()}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The sampling mask of each token: the part of the vocabulary that top-p and top-k left.

    Token t was drawn from ``token_ids[offsets[t]:offsets[t + 1]]``, ascending ids; an empty set stands for the whole
    vocabulary.
    """

    offsets: npt.NDArray[np.int64]
    """[C + 1] ascending from 0."""
    token_ids: Ids
    """[Σ kept]"""

    def __post_init__(self) -> None:
        ascend = len(self.offsets) > 0 and self.offsets[0] == 0 and bool((np.diff(self.offsets) >= 0).all())
        if not ascend or self.offsets[-1] != len(self.token_ids):
            raise ValueError(f"sampling masks of {len(self.token_ids)} ids have offsets {self.offsets!r}")

    @classmethod
    def of_rows(cls, rows: Sequence[Ids]) -> Self:
        """The masks of tokens from the set of each."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(offsets=offsets, token_ids=np.concatenate([np.zeros(0, np.int32), *rows]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Ids]:
        return (self[token] for token in range(len(self)))

    def __getitem__(self, token: int) -> Ids:
        return self.token_ids[self.offsets[token] : self.offsets[token + 1]]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[C] tokens in each set; 0 where nothing was cut."""
        sizes: npt.NDArray[np.int64] = np.diff(self.offsets)
        return sizes

    def holds(self, token_ids: Ids) -> bool:
        """True if each of ``token_ids`` [C] is in its set."""
        sizes = self.sizes
        matches = np.repeat(token_ids, sizes) == self.token_ids
        hits = np.bincount(np.repeat(np.arange(len(self)), sizes)[matches], minlength=len(self))
        return bool((hits[sizes > 0] == 1).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Reference to the routes and the sampling mask of a turn: a file that is named by its own digest."""

    digest: str
    """SHA-256 of its bytes, in hex."""
    size_bytes: int

    def __post_init__(self) -> None:
        if len(self.digest) != SHA256_HEX or not set(self.digest) <= set("0123456789abcdef"):
            raise ValueError(f"payload digest {self.digest!r} is not a SHA-256 in hex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call inside a rollout, exactly as the engine saw and sampled it."""

    prompt_ids: Ids
    """[P] everything the model was conditioned on."""
    completion_ids: Ids
    """[C] what it sampled."""
    logprobs: Floats
    """[C] natural log of the probability with which each token was sampled."""
    versions: Ids
    """[C] the weight version that sampled each token."""
    finish: Finish
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    kind: TurnKind = TurnKind.ACT
    """Purpose, as far as its harness named it."""
    routes: Routes | None = None
    """[P + C − 1, layers, k] of every token that was read: all but the last one sampled."""
    sampling_mask: SamplingMask | None = None
    """[C] what top-p and top-k left to draw from; ``None`` where they were off."""
    payload: PayloadRef | None = None
    """File of routes and sampling mask while they are not in memory; never beside them."""

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"a turn needs one logprob and one version per sampled token, got lengths {lengths}")
        if len(self.versions) and int(self.versions.min()) < 0:
            raise ValueError(f"a sampled token has no weight version: {self.versions!r}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature!r} of a turn is negative")
        self._check_payload()

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was sampled behind it."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def continues(self, earlier: "Turn") -> bool:
        """True if the prompt begins with all tokens of an earlier turn, its prompt and what it sampled.

        Views of one array are known to agree as far as both go; others are compared, what says no soonest first.
        """
        middle, end = len(earlier.prompt_ids), earlier.length
        return (
            len(self.prompt_ids) >= end
            and np.array_equal(self.prompt_ids[middle:end], earlier.completion_ids)
            and (
                _same_memory(self.prompt_ids, earlier.prompt_ids)
                or np.array_equal(self.prompt_ids[:middle], earlier.prompt_ids)
            )
        )

    def _check_payload(self) -> None:
        read, sampled = self.length - 1, len(self.completion_ids)
        if self.payload is not None and (self.routes is not None or self.sampling_mask is not None):
            raise ValueError(f"a turn refers to payload {self.payload.digest} and holds routes or sampling masks, too")
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != read):
            raise ValueError(f"a turn that read {read} tokens has routes of shape {list(self.routes.shape)}")
        if self.sampling_mask is not None and (
            len(self.sampling_mask) != sampled or not self.sampling_mask.holds(self.completion_ids)
        ):
            raise ValueError(
                f"the {sampled} tokens of a turn are not all in its sampling mask of {len(self.sampling_mask)} sets"
            )


def _same_memory(one: Ids, other: Ids) -> bool:
    return one.ctypes.data == other.ctypes.data and one.strides == other.strides


class RolloutStatus(StrEnum):
    """Final status of a rollout."""

    GRADED = "graded"
    """It has a reward, be the model's output good, bad or malformed."""
    FAILED_INFRA = "failed_infra"
    """A machine failed; masked and retried, never a reward of zero."""
    DROPPED = "dropped"
    """Given up for the counted reason in ``reason``."""


class Disposition(StrEnum):
    """Treatment of a graded rollout, in order of severity."""

    KEEP = "keep"
    QUARANTINE = "quarantine"
    """Not trained on; kept and readable, and counted under its reason."""
    ZERO = "zero"
    """Trained on with a reward of zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cheat policy's judgement of one graded rollout."""

    disposition: Disposition
    reason: str = ""
    """The detector or part that decided; empty if kept."""
    flags: tuple[str, ...] = ()
    """Every detector and ``cheat_`` part that spoke, sorted, low ones included."""
    hacked: bool = False
    """True where it counts as a hack: something of weight was detected, rewarded or not."""
    graded: float
    """The grade, whatever became of it."""
    impossible: bool = False
    """True where the task cannot be passed honestly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Advice that would have helped the model just before one of its turns."""

    turn: int
    """Index of the turn in its rollout."""
    text: str
    source: str
    """Author: the name of a rule, or of a judge."""

    def __post_init__(self) -> None:
        if self.turn < 0 or not self.text:
            raise ValueError(f"hint {self.text!r} for turn {self.turn}: expected some text and a turn from 0 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Point at which a rollout left another one of its group: earlier turns are shared, sampled once."""

    rollout_id: str
    """The one that sampled them."""
    turns: int
    """Number of turns that they share: all of them, where that one ended before it came to branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Knowledge of a live session beside its turns: what a baseline without groups compares by.

    All but ``propensity`` is known before the model says anything.
    """

    user: str
    """Pseudonym."""
    day: int
    """Days since 1970-01-01 UTC, by the server's clock, when the session was opened."""
    template: str
    """The kind of request, in the product's words; empty where it has none."""
    arm: str
    """The arm of the routing table that served it."""
    prompt_tokens: int
    """Tokens of its first prompt."""
    weight: float = 1.0
    """Weight in the gradient: below 1 where a cap holds its user."""
    propensity: float = 1.0
    """Estimated chance that what its reward asks for is answered, of the part with the lowest; 1: nothing is asked."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"a live session has weight {self.weight!r}, expected a number above 0")
        if not 0 < self.propensity <= 1:
            raise ValueError(f"a live session has propensity {self.propensity!r}, expected a chance")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSession:
    """A live session as models look back on it: what it was, what was answered, and what it came to."""

    session_id: str
    observation: Observation
    ended_at: float
    """Seconds since 1970, by the server's clock."""
    sampled_tokens: tuple[int, ...]
    """Sampled tokens of each turn."""
    answers: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Part of the reward → what was answered, of the session or of each of its turns; ``None``: nothing was."""
    reward: float = 0.0
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn, as a :class:`Rollout` has it."""


class RolloutStage(StrEnum):
    """A part of a rollout's time, in their order."""

    SESSION = "session"
    """A gateway opens a session."""
    SANDBOX = "sandbox"
    """A sandbox is made and filled."""
    MODEL = "model"
    """The agent waits for the model, or its harness computes."""
    TOOLS = "tools"
    """The agent uses its sandbox: commands and files."""
    GRADING = "grading"
    """The work is looked over and graded."""
    SCORING = "scoring"
    """The turns are fetched, judges and other parts of the reward called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task, whole and readable."""

    rollout_id: str
    group_index: int
    slot: int
    """Position in its group, 0 … group size − 1."""
    attempt: int
    """0 for the first try of this slot; infrastructure failures raise it."""
    status: RolloutStatus
    reward: float | None
    """Present exactly when graded."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts that ``reward`` was combined from."""
    reason: str = ""
    """Reason for which the agent stopped (graded), or the failure."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Actions of the agent: tool name → calls."""
    turns: tuple[Turn, ...] = ()
    seconds: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """:class:`RolloutStage` → seconds, of those that it came to; together nearly ``seconds``."""
    verdict: Verdict | None = None
    """``None`` where rollouts are not monitored for cheating, and nothing masked it."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn by itself, beside ``reward``; empty where turns are not rewarded."""
    hints: tuple[Hint, ...] = ()
    """At most one for each turn."""
    branch: Branch | None = None
    """``None`` where it was sampled from its beginning."""
    observation: Observation | None = None
    """``None`` where no user was served: of a simulated rollout."""
    session_id: str = ""
    """The gateway session of its calls; empty where it never had one, and of live sessions."""

    @property
    def is_quarantined(self) -> bool:
        """True if it is kept out of training."""
        return self.verdict is not None and self.verdict.disposition is Disposition.QUARANTINE

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.status is RolloutStatus.GRADED):
            raise ValueError(f"rollout {self.rollout_id}: status {self.status} with reward {self.reward!r}")
        if self.status is RolloutStatus.GRADED and not self.turns:
            raise ValueError(f"rollout {self.rollout_id} is graded but has no turn")
        turns = len(self.turns)
        if self.turn_rewards and len(self.turn_rewards) != turns:
            raise ValueError(f"rollout {self.rollout_id}: {len(self.turn_rewards)} turn rewards for {turns} turns")
        beyond = [hint.turn for hint in self.hints if hint.turn >= turns]
        if beyond or len({hint.turn for hint in self.hints}) < len(self.hints):
            raise ValueError(f"rollout {self.rollout_id} of {turns} turns has two hints for a turn, or for one beyond")
        if self.branch is not None and not 0 < self.branch.turns <= turns:
            raise ValueError(f"rollout {self.rollout_id} of {turns} turns shares {self.branch.turns} with another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task whose rewards are compared with each other."""

    index: int
    """Admission order over the whole run; batches are formed in this order."""
    task: Task
    admitted_version: int
    """The newest published weight version when the group was admitted."""
    rollouts: tuple[Rollout, ...]
    epoch: int = 1
    """Time, from 1, that the task is admitted for training in this run."""
    lost: int = 0
    """Slots given up to infrastructure: rollouts that were planned and are missing."""
    weight: float = 1.0
    """Importance weight of the task: how likely it is to be drawn if all tasks are, over how likely it was."""

    @property
    def is_live(self) -> bool:
        """True if it is a user's session, which has no other rollout to be compared with."""
        return any(rollout.observation is not None for rollout in self.rollouts)

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"group {self.index} has importance weight {self.weight!r}, expected a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One append-only trainable token sequence from a rollout (one per branch of its conversation).

    Example: prompt of 3, two sampled tokens → ``loss_mask = [0, 0, 0, 1, 1]``, ``versions = [-1, -1, -1, 7, 7]``.
    """

    rollout_id: str
    token_ids: Ids
    """[L]"""
    loss_mask: Mask
    """[L] true where a model sampled the token and it is to be trained on."""
    logprobs: Floats
    """[L] the engine's logprob of each sampled token; 0 elsewhere."""
    versions: Ids
    """[L] the sampling weight version; ``UNSAMPLED`` elsewhere."""
    temperatures: Floats
    """[L] the sampling temperature; 1 elsewhere."""
    turn_starts: tuple[int, ...]
    """Index of the first sampled token of each turn, ascending."""
    advantages: Floats
    """[L] 0 where not sampled."""
    routes: Routes | None = None
    """[L, layers, k] which experts the engine used; ``NO_ROUTE`` where it is not known."""
    sampling_mask: SamplingMask | None = None
    """[L] from what each token was drawn; empty where not sampled or not cut."""
    old_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    """[L] of sampled tokens, the trainer's by the weights that sampled, and a reference's; ``None``: not asked for."""

    def __post_init__(self) -> None:
        for name, array in ((one.name, getattr(self, one.name)) for one in fields(self)):
            if isinstance(array, np.ndarray | SamplingMask) and len(array) != len(self.token_ids):
                raise ValueError(f"trajectory of {self.rollout_id}: {name} is not [{len(self.token_ids)}]")
        if bool((self.versions == UNSAMPLED)[self.loss_mask].any()):
            raise ValueError(f"trajectory of {self.rollout_id}: a trained token has no weight version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one optimiser step."""

    step: int
    """The step this batch belongs to; it turns weight version ``step - 1`` into ``step``."""
    trajectories: tuple[Trajectory, ...]
    """The trajectories with a signal: groups whose rewards are all equal are left out."""
    num_loss_tokens: int
    num_lost_tokens: float
    """Token count that stands for lost rollouts, each as much as those of its group that are there, and for tasks that
    were drawn more or less often than others: the loss is divided by both.
    """
    num_lost_trajectories: float
    num_sampled_trajectories: int
    """Number of trajectories that there would be, had every group a signal."""
    num_groups: int
    num_degenerate_groups: int
    """Groups left out because all their rewards are equal."""
    rewards: Floats
    """[rollouts] of all groups, degenerate ones included."""
    staleness: Ids
    """[sampled tokens of all groups] trainer's version − the token's version."""


class SignalKind(StrEnum):
    """Kind of what a product says about a live session."""

    KEPT = "kept"
    """1, or the share of the edit that survived."""
    REVERTED = "reverted"
    """1."""
    EDITED = "edited"
    """0 to 1: how much was changed afterwards."""
    FOLLOW_UP = "follow_up"
    """1 where the user came back dissatisfied, 0 where not."""
    TESTS = "tests"
    """Share that passed."""
    THUMBS = "thumbs"
    """+1 or −1."""
    LATENCY = "latency"
    """Seconds."""
    ABANDONED = "abandoned"
    """1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One thing that a product says about a live session, or one of its turns."""

    event_id: str
    """The client's own; the same one again is a duplicate."""
    session_id: str
    kind: SignalKind
    value: float
    turn: int | None
    """Index of the turn that it is about; ``None``: the whole session."""
    span: tuple[int, int] | None
    """Characters of the turn's text, from and up to; ``None``: all of it."""
    user: str
    """Pseudonym."""
    sent_at: float
    """Seconds since 1970 by the client's clock: recorded, but never used to decide anything."""
    received_at: float
    """Seconds since 1970 by the server's clock."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"signal {self.event_id} has value {self.value!r}, expected a finite number")
        if self.turn is not None and self.turn < 0:
            raise ValueError(f"signal {self.event_id} is about turn {self.turn}: turns count from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSession:
    """A session of a product's user who consented to training; all times are the server's, in seconds since 1970."""

    session_id: str
    """Unique for ever: also the id of its rollout, and of the task that its group is of."""
    owner: str
    """Id of the production key that it was opened with."""
    name: str
    """The product's own name for it; a product may use one again. Empty where it gave none."""
    user: str
    """Pseudonym; empty where the product did not say who asked."""
    template: str
    """The kind of request, in the product's words; empty where it has none."""
    region: str
    """Region that the user is in, in the product's words; empty where it did not say."""
    consent: bool
    opened_at: float
    ended_at: float | None
    """``None`` while calls may follow."""
    arm: str
    """The arm of the routing table that served it; empty where there was no table."""
    first_version: int | None
    last_version: int | None
    """The oldest and the newest weight version that sampled some of it; ``None``: none did so far."""
    turns: int
    """Number of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAnswer:
    """The answer to one call of a live session: all that is kept of it."""

    session: LiveSession
    """Its session, as it was when it was opened."""
    first: int
    """Index of the first of its turns in the session."""
    turns: tuple[Turn, ...]
    """The replies, more than one with ``n`` > 1; their prompts are the same."""
    completion: str
    """Id of the answer, without the prefix of its API."""
    follows: int | None
    """Index of the turn whose reply the call continued; ``None``: none."""
    earlier: Turn | None
    """The turn of ``follows``."""
    message: str
    """The user's message that came with the call; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSession:
    """A live session whose window is over, with all that was said about it in time."""

    session: LiveSession
    turns: tuple[Turn, ...]
    """Token for token; prompts of one branch are views of one array."""
    messages: tuple[str, ...]
    """[turns] the user's message that came with the call of each turn; empty where the call had none."""
    follows: tuple[int | None, ...]
    """[turns] the turn whose reply the call of each turn continued; ``None``: none."""
    signals: tuple[Signal, ...]
    """Each event once, in the order in which they were received; a turn that they name is one of ``turns``."""

    def __post_init__(self) -> None:
        session, turns = self.session, len(self.turns)
        if not turns == len(self.messages) == len(self.follows) == session.turns:
            raise ValueError(
                f"session {session.session_id} of {session.turns} turns has {turns} turns, {len(self.messages)} "
                f"messages and {len(self.follows)} links between turns"
            )
        strays = [one.event_id for one in self.signals if one.turn is not None and one.turn >= turns]
        if strays:
            raise ValueError(f"session {session.session_id} of {turns} turns has signals about others: {strays[:3]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The name, type and shape of one tensor, as checkpoints spell them (e.g. ``F32``, ``[96, 288]``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPack:
    """One immutable object of the weight store: frames of some chunks."""

    digest: str
    """SHA-256 of its bytes, in hex; it also names the object."""
    size_bytes: int
    first: int
    last: int
    """The lowest and the highest chunk with a frame in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """The record of one published weight version: a link of the chain, without the bytes."""

    version: int
    base: int | None
    base_digest: str | None
    """The version that the packs are a change of, and its state's digest; ``None`` when they hold everything."""
    digest: str
    """Digest of the whole state after this version, 32 hex digits."""
    layout: str
    """SHA-256 of the layout: which tensors, what chunk size."""
    packs: tuple[WeightPack, ...]
    step: int
    recipe: str
    """Recipe that made it, for people."""
    writer: str
    """Process that committed it, for people and for retries."""
    created: str
    """UTC, ISO 8601."""

    @property
    def kind(self) -> Literal["full", "delta"]:
        """``full`` if the packs hold whole tensors or changes against ``base``."""
        return "full" if self.base is None else "delta"

    @property
    def size_bytes(self) -> int:
        """Size of the packs together."""
        return sum(pack.size_bytes for pack in self.packs)
