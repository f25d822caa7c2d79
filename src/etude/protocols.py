"""The protocols of étude's replaceable parts, and the types that they exchange.

Stages import these, never each other; ``run/`` picks one leaf per protocol and wires them.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.types import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Finish,
    Floats,
    Ids,
    JoinedSession,
    Routes,
    SamplingMask,
    Split,
    Task,
    TokenIds,
    Turn,
    TurnKind,
    Verdict,
)

MAX_SEED = 2**63 - 1
"""The largest seed that every random generator takes."""


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Give way to others for ``seconds``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one completion."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities at ``temperature`` add up to this; 1 keeps all."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 keeps all. Applied before ``top_p``."""
    stop_ids: tuple[int, ...] = ()
    """Sampling any of these ends the completion; the token is kept."""
    seed: int | None = None
    """``None``: the engine's own stream of randomness."""
    sampled_before: int = 0
    """Tokens at the prompt's end that another engine sampled for the same completion, with this seed: its random
    numbers go on behind theirs.
    """
    priority: int = 0
    """Lower is served first, and may take the place of higher ones that are running."""
    want_routes: bool = False
    """True if the answer shall name the experts used."""
    adapter: str = ""
    """Name of an adapter that was added to the engine; empty: what the run serves."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r}: expected 0, for greedy, or from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number above 0 and up to 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r}: expected a whole number of at least 0")

    @property
    def fresh_seed(self) -> int | None:
        """The seed for an engine that draws the same random numbers again with each call of one seed: another one for
        a completion that goes on.
        """
        if self.seed is None or not self.sampled_before:
            return self.seed
        digest = blake2b(f"{self.seed} {self.sampled_before}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) & MAX_SEED

    @property
    def truncates(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary, which the record must then name."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled. All arrays have one entry per sampled token, [C]."""

    token_ids: Ids
    logprobs: Floats
    """Natural log of the probability each token was really sampled with."""
    versions: Ids
    """The weight version that sampled each token; it may change inside one completion."""
    finish: Finish
    routes: Routes | None = None
    """[P + C − 1, layers, k] of every token that was read: all but the last one; ``None`` where not asked for, or the
    model has no experts.
    """
    sampling_mask: SamplingMask | None = None
    """[C] what top-p and top-k left to draw from; ``None`` where they were off."""


def turn_of(
    prompt_ids: TokenIds, params: SamplingParams, completion: Completion, kind: TurnKind = TurnKind.ACT
) -> Turn:
    """Make the turn of a completion that an engine sampled for ``prompt_ids`` [P] with ``params``.

    Raises ``ValueError`` where the record does not fit the tokens, as :class:`~etude.types.Turn` does.
    """
    return Turn(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish=completion.finish,
        temperature=params.temperature,
        kind=kind,
        routes=completion.routes,
        sampling_mask=completion.sampling_mask,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A streamed part of a completion, [c] tokens."""

    token_ids: Ids
    logprobs: Floats
    versions: Ids
    sampling_mask: SamplingMask | None = None
    """[c] as of a completion; ``None`` also where the engine tells it only at the end."""
    completion: Completion | None = None
    """The whole, with the last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Health report of an engine."""

    version: int
    """The weight version it samples with now."""
    digest: str
    """The state digest of those weights."""
    running: int
    waiting: int


class Engine(Protocol):
    """Samples tokens: token ids in, token ids out, no text."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion; calls of one ``session`` may share a prefix cache.

        Raises :class:`~etude.errors.EngineUnavailable` when no answer can be had, and its kind
        :class:`~etude.errors.EngineBusy` when the engine has as much waiting as it takes.
        """
        ...

    def stream(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and hand out its tokens as they come; closing the iterator cancels it.

        Raises like :meth:`generate`.
        """
        ...

    async def health(self) -> EngineHealth:
        """Say which weights are being served."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of one command in a sandbox."""

    exit_code: int
    """The process's exit status; 128 + signal number when a signal ended it."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """True when output beyond the cap was thrown away."""
    seconds: float


class Sandbox(Protocol):
    """An isolated environment with an agent's files, in which its commands run.

    A path is relative to the sandbox's working folder, or absolute inside of it where the provider is ``CONFINED``;
    one that would leave the sandbox is a ``ValueError``. Any method raises :class:`~etude.errors.SandboxError` when the
    sandbox failed or is closed, and its kind :class:`~etude.errors.Unsupported` for what its provider does not claim;
    :class:`~etude.errors.AgentFault` where it works, and what runs or was written inside is in the way.
    """

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command in the working folder. A failing command is a result. ``environment`` is added to the
        sandbox's own variables.
        """
        ...

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or ``None`` if there is none; ``ValueError`` for what is no plain file."""
        ...

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and the folders above it; it belongs to whom commands run as."""
        ...

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """An uncompressed tar of files and whole folders, by the paths they were asked for; what is missing is left
        out. Links are links in it, and nothing but files, folders and links is. ``ValueError`` beyond the limit.
        """
        ...

    async def load(self, tar: bytes) -> None:
        """Unpack a tar such as :meth:`export` makes into the working folder. ``ValueError`` for a name that would leave
        the sandbox, also through a link, and for anything but files, folders and links; then nothing is unpacked.
        """
        ...

    async def stats(self) -> SandboxStats:
        """Resources in use now."""
        ...

    async def kill_processes(self) -> None:
        """Kill everything that runs inside, services too; files stay, and commands can be run.

        Nothing that was started before runs any more when this returns, however much it multiplies: to be called before
        what an agent left is looked at.
        """
        ...

    async def snapshot(self) -> Image:
        """The files as they are, as an image that lives as long as the provider (``SNAPSHOT``)."""
        ...

    async def fork(self, count: int = 1) -> "Sequence[Sandbox]":
        """Independent copies of this sandbox (``FORK``, ``LIVE_FORK``); all of them, or none and an error."""
        ...

    async def close(self) -> None:
        """Kill what still runs and remove everything; calling it twice is harmless."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes."""

    async def capabilities(self) -> frozenset[Capability]:
        """Capabilities that it has on this machine, found out by trying."""
        ...

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """A fresh sandbox that holds ``files``, in which the entry point of its image runs, and its health checks have
        succeeded. Raises :class:`~etude.errors.SandboxError`, and its kind :class:`~etude.errors.Unsupported` for a
        spec that asks for what is not claimed.
        """
        ...

    async def close(self) -> None:
        """Close every sandbox and helper process."""
        ...


class Images(Protocol):
    """Finds stored images."""

    def open(self, reference: str) -> Image:
        """The image of a digest. Raises :class:`~etude.errors.ConfigError` for one that is not stored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyContext:
    """The run that a task family is made for, beside its own options."""

    seed: int
    heldout_every: int
    """Holdout ratio: one template in this many is held out."""
    texts_heldout_every: int
    """The same for modules of the standard library, as for mid-training."""
    folder: Path
    """``tasks.folder``."""
    images: Path | None
    """Folder of images of base systems; ``None``: the user's."""


class TaskFamily(Protocol):
    """A reproducible set of tasks on either side of the hold-out, or an endless stream of them.

    One is made by calling what ``tasks.family`` names with its options and a :class:`FamilyContext`.
    """

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split; ``None`` where new ones are made for as long as they are asked for."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split, below its size if it has one; the same arguments always give the same
        task.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A harness's access to the model: an OpenAI-compatible base URL and a key for one rollout."""

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenCall:
    """One model call in words."""

    heard: str
    """New text in its context."""
    text: str
    """The model's reply."""
    continues: int | None = None
    """The earlier call whose reply it goes on from; ``None``: its conversation began with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessResult:
    """Result of a harness at the end of its session."""

    reason: str
    """Reason for which it stopped: ``submit``, ``turns``, ``length``, ``context``, ``time``; an external command's
    ``timeout``, ``exit N``.
    """
    counts: Mapping[str, int]
    """Actions of the agent: tool name → calls; ``malformed`` counts the unreadable ones."""
    answer: str = ""
    """Its last words, where the task asks for some."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Other measurements of the harness: recorded with the parts of the reward, and no part of it."""
    spoken: tuple[SpokenCall, ...] = ()
    """All calls in words, where tokens are not known: of a model behind somebody else's API."""
    printed: str = ""
    """The end of what an external command printed, on one line: for people who look for why it failed."""


class Harness(Protocol):
    """Drives the model through one task in one sandbox."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Work until the agent submits or a limit is reached. Infrastructure trouble raises.

        :class:`~etude.errors.OutOfTime`, which the sandbox raises, is passed on by a harness that has nothing to say of
        what went before.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grader's result for one rollout's work."""

    value: float
    parts: Mapping[str, float]
    """The named figures that ``value`` comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """A finished rollout, as a reward function sees it."""

    task: Task
    grade: Grade
    result: HarnessResult
    turns: Sequence[Turn]
    """The turns in tokens."""
    transcript: str
    """The whole conversation as text, every line behind its speaker."""


RewardFunction: TypeAlias = Callable[[RewardInput], float | Awaitable[float]]
"""One part of the reward; a plain function runs in a thread. Where it raises, the part's value is missing."""


class Grader(Protocol):
    """Grades the files that an agent left behind, outside of the agent's sandbox."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade a finished rollout. Infrastructure trouble raises; bad work has a low grade."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderContext:
    """The run that a named grader is made for, beside its own options."""

    open_sandbox: Callable[[Task], Awaitable[Sandbox]]
    """A fresh sandbox of a task, in which no agent has been; the grader closes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one rollout, as it is stored; :func:`etude.rewards.score.score` alone decides it."""

    value: float
    parts: Mapping[str, float]
    """The named values that are recorded with it."""
    verdict: Verdict | None = None
    """``None`` where rollouts are not monitored for cheating, and nothing masks."""
    masked: str = ""
    """The reason why it must not be trained on, though graded; empty: it may be."""


class JoinedSessions(Protocol):
    """Takes live sessions whose windows are over, to learn from them."""

    def take(self, sessions: Sequence[JoinedSession]) -> Sequence[str]:
        """Take some sessions, in the order in which their windows ended; returns once they are stored for good.

        Returns the outcome of each, such as ``admitted`` or ``stale``, by which it is counted. A session that comes
        again, as after ``kill -9``, is recognised by its id and not taken twice. Raises
        :class:`~etude.errors.InfrastructureError` when the sink is out of reach: then all of them come again.
        """
        ...
