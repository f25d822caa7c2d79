"""Rollouts as data for display, shared by the terminal, the page and exports.

:mod:`etude.run.rollout_reader` creates them. Owns the displayed facts of a rollout, and its JSON;
:mod:`etude.dashboard.rollout_text` and the page own its appearance, :mod:`etude.dashboard.rollout_export` other
formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from etude.ledger.archive import RolloutMatch
from etude.types import Hint, Json, ObservedSession, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """One named part of a recorded reward."""

    name: str
    value: float
    """Value as its source gave it."""
    worth: float | None
    """Contribution to the reward; ``None`` if the part was only recorded, or only the grader knows its contribution."""
    source: str
    """Source in the recipe, such as ``judge.clarity``; empty for the grader's own parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVote:
    """One vote of a judge about a rollout."""

    aspect: str
    score: int | None
    """``None`` if the judge abstained."""
    lowest: int
    highest: int
    """Ends of the rubric's scale."""
    reason: str
    """Reason given by the judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLine:
    """One line of a change to a file."""

    mark: str
    """``+`` added, ``-`` removed, a space for unchanged."""
    number: int | None
    """Line number in the file after the change, for a removed line before it; ``None`` if unknown."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """One tool call of a turn."""

    tool: str
    arguments: Mapping[str, str]
    """By name, each as text; other values are converted to JSON."""
    path: str
    """File that the call changes; empty if it changes none, or an unknown one."""
    diff: tuple[ReadLine, ...]
    """Requested change, with as many surrounding lines as are known; empty if nothing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """One file of a task, and its change during the rollout."""

    path: str
    before: str
    """Original text in the sandbox."""
    diff: tuple[ReadLine, ...]
    """All accepted changes together; empty if no parsed call changed the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadToken:
    """One sampled token for display."""

    token_id: int
    text: str
    """Decoded text; the name of a special token, U+FFFD for a part of a character."""
    logprob: float
    """The engine's logprob."""
    version: int
    """The weight version that sampled it."""
    mismatch: float | None
    """The trainer's logprob under that version − the engine's."""
    kept: int | None
    """Number of tokens in the sampling mask; ``None`` if nothing was truncated, or the number is unknown."""
    routes: tuple[tuple[int, ...], ...] | None
    """[sparse layers, experts per token] of the forward pass that it was sampled from."""
    advantage: float | None
    """Advantage with which it is trained; 0 if there is no signal, ``None`` if unknown."""
    has_loss: bool | None
    """True if it has loss; ``None`` if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSummary:
    """A self-summary and the context that it replaced."""

    scratch: str
    """Reasoning before the summary, which is discarded."""
    text: str
    """Text with which the next context continues."""
    tokens_before: int
    """Tokens of the context that was summarised."""
    tokens_after: int | None
    """Tokens of the context that begins after it; ``None`` if there is none."""
    facts: Mapping[str, bool | None]
    """Fact that the answer needs → whether the summary has it; ``None`` if it had not been seen by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """One model call for display."""

    number: int
    """From 0."""
    kind: str
    continues: int | None
    """The turn whose reply its context continues; ``None`` if the context is new."""
    heard: str
    """New text in its context."""
    said: str
    """The sampled reply, without special tokens."""
    thinking: str
    """Reasoning in the reply, if the chat format marks it."""
    content: str
    """The reply without reasoning and calls."""
    calls: tuple[ReadCall, ...]
    finish: str
    temperature: float
    prompt_tokens: int
    new_tokens: int
    """New tokens in the prompt."""
    sampled_tokens: int
    versions: Mapping[int, int]
    """Weight version → number of tokens that it sampled."""
    reward: float | None
    """The turn's own reward, in addition to the rollout's."""
    hint: Hint | None
    advantage: float | None
    """Advantage of its loss tokens; 0 if there is no signal, ``None`` if unknown."""
    loss_tokens: int | None
    """Sampled tokens with loss; ``None`` if unknown."""
    summary: ReadSummary | None
    tokens: tuple[ReadToken, ...] | None
    """``None`` unless the rollout was read with tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadComparison:
    """Comparison of a rollout with the others of its group."""

    penalty: float
    """Deduction for effort."""
    compared: float
    """Reward after penalties."""
    rollouts: int
    """Number of compared rollouts: graded and not quarantined."""
    quarantined: int
    lost: int
    """Number of slots lost to infrastructure failures."""
    weight: float
    """Factor of the group's advantages: its task's importance weight, times the compensation for quarantined and lost
    rollouts.
    """
    has_signal: bool
    """True if any turn of the group has an advantage; else nothing is trained on."""
    step_tokens: int | None
    """Loss tokens of the whole batch of its optimiser step; ``None`` before that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRollout:
    """One rollout for display."""

    rollout_id: str
    purpose: str
    group: int
    slot: int
    attempt: int
    step: int | None
    """The optimiser step that claimed its group."""
    group_state: str
    """State of its group on the way to the trainer (:class:`~etude.ledger.states.GroupState`)."""
    task_id: str
    epoch: int
    """Epoch of its task's admission, from 1; 1 for an evaluation."""
    template: str
    prompt: str
    files: tuple[ChangedFile, ...]
    """The task's own files, in addition to its image."""
    status: str
    reason: str
    reward: float | None
    parts: tuple[ReadPart, ...]
    counts: Mapping[str, int]
    """Actions of the agent: tool name → number of calls."""
    seconds: float
    verdict: Verdict | None
    votes: tuple[ReadVote, ...]
    """Votes of the run's judge that are still in its cache."""
    branch_of: str | None
    """The rollout that sampled its first turns."""
    branch_turns: int
    """Number of these turns."""
    comparison: ReadComparison | None
    """``None`` if nothing is trained on; for an open group, the comparison as if it ended now."""
    turns: tuple[ReadTurn, ...]
    notes: tuple[str, ...]
    """Figures that could not be computed, with the reasons."""
    observed: ObservedSession | None = None
    """Facts of a live session besides its turns; ``None`` for other rollouts."""

    @property
    def sampled_tokens(self) -> int:
        """Sum over all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled it, ascending."""
        return tuple(sorted({version for turn in self.turns for version in turn.versions}))


Shown: TypeAlias = ReadRollout | RolloutMatch
"""A rollout with its turns, or a search result."""


def to_json(rollout: Shown) -> dict[str, Json]:
    """Convert one of these objects to JSON; its keys are the fields."""
    fields: dict[str, Json] = orjson.loads(orjson.dumps(rollout, option=orjson.OPT_NON_STR_KEYS))
    return fields
