"""Rollouts as they are shown: nouns that the terminal, the page and exports share.

:mod:`etude.run.rollout_reader` makes them. Owns what is known of a rollout once it is read, and its JSON; how it looks
is :mod:`etude.dashboard.rollout_text`'s and the page's, what other tools read :mod:`etude.dashboard.rollout_export`'s.
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
    """Amount that it adds to the reward; ``None``: it was only recorded, or the grader alone knows."""
    source: str
    """Source that the recipe names, such as ``judge.clarity``; empty of the grader's own parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVote:
    """One vote of a judge about a rollout."""

    aspect: str
    score: int | None
    """``None``: it said that it cannot tell."""
    lowest: int
    highest: int
    """Ends of the rubric's scale."""
    reason: str
    """Reason that it gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLine:
    """One line of a change to a file."""

    mark: str
    """``+`` added, ``-`` removed, a space for what stayed."""
    number: int | None
    """Line number in the file after the change, of a removed line before it; ``None`` where it is not known."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """One tool call of a turn."""

    tool: str
    arguments: Mapping[str, str]
    """By name, each as text; what was no text in the call is JSON here."""
    path: str
    """File that it changes; empty where it changes none that is known."""
    diff: tuple[ReadLine, ...]
    """Change that it asks for, with lines around it as far as they are known; empty where it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """One file of a task, and what became of it."""

    path: str
    before: str
    """Text that the sandbox began with."""
    diff: tuple[ReadLine, ...]
    """All accepted changes together; empty: nothing was changed by a call that is understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadToken:
    """One sampled token, as it is shown."""

    token_id: int
    text: str
    """Text that it spells; a special one by its name, U+FFFD for a part of a character."""
    logprob: float
    """The engine's."""
    version: int
    """The weight version that sampled it."""
    mismatch: float | None
    """The trainer's logprob under that version − the engine's."""
    kept: int | None
    """Tokens of the vocabulary that it was drawn from; ``None`` where nothing was cut, or it is no longer known."""
    routes: tuple[tuple[int, ...], ...] | None
    """[sparse layers, experts per token] of the pass that it was drawn from."""
    advantage: float | None
    """Advantage with which it is trained on; 0 where there is no signal, ``None`` where it cannot be said."""
    has_loss: bool | None
    """True if it carries loss; ``None`` where that cannot be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSummary:
    """A self-summary and the context that it replaced."""

    scratch: str
    """Reasoning before it, which is forgotten."""
    text: str
    """Text from which the next context goes on."""
    tokens_before: int
    """Tokens of the context that was summarised."""
    tokens_after: int | None
    """Tokens of the one that begins after it; ``None`` where none does."""
    facts: Mapping[str, bool | None]
    """Fact that the answer takes → whether the summary has it; ``None`` where it had not been seen by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """One model call, as it is shown."""

    number: int
    """From 0."""
    kind: str
    continues: int | None
    """The turn whose reply its context goes on from; ``None``: the context began anew."""
    heard: str
    """Text that is new in its context."""
    said: str
    """Its reply, as it was sampled, without special tokens."""
    thinking: str
    """Reasoning in the reply, where the chat format marks it."""
    content: str
    """The reply without reasoning and calls."""
    calls: tuple[ReadCall, ...]
    finish: str
    temperature: float
    prompt_tokens: int
    new_tokens: int
    """Tokens that are new in the prompt."""
    sampled_tokens: int
    versions: Mapping[int, int]
    """Weight version → tokens that it sampled."""
    reward: float | None
    """Reward that it earned by itself, beside the rollout's."""
    hint: Hint | None
    advantage: float | None
    """Advantage of its loss tokens; 0 where there is no signal, ``None`` where it cannot be said."""
    loss_tokens: int | None
    """Sampled tokens that carry loss; ``None`` where that cannot be said."""
    summary: ReadSummary | None
    tokens: tuple[ReadToken, ...] | None
    """``None`` unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadComparison:
    """Comparison of a rollout with the others of its group."""

    penalty: float
    """Taken off for effort."""
    compared: float
    """Reward after penalties."""
    rollouts: int
    """Rollouts that are compared: graded and not quarantined."""
    quarantined: int
    lost: int
    """Slots given up to infrastructure."""
    weight: float
    """Factor of the group's advantages for these two."""
    has_signal: bool
    """True if any turn of the group has an advantage; else nothing is trained on."""
    step_tokens: int | None
    """Loss tokens of the whole batch of its optimiser step; ``None`` before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRollout:
    """One rollout, as it is shown."""

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
    """Time, from 1, that its task was admitted; 1 of an evaluation."""
    template: str
    prompt: str
    files: tuple[ChangedFile, ...]
    """Files that the task brought along, beside its image."""
    status: str
    reason: str
    reward: float | None
    parts: tuple[ReadPart, ...]
    counts: Mapping[str, int]
    """Actions of the agent: tool name → calls."""
    seconds: float
    verdict: Verdict | None
    votes: tuple[ReadVote, ...]
    """Votes of the run's judge, as far as its cache still has them."""
    branch_of: str | None
    """The rollout that sampled its first turns."""
    branch_turns: int
    """Number of those."""
    comparison: ReadComparison | None
    """``None`` where nothing is trained on; of an open group what it would be if the group ended now."""
    turns: tuple[ReadTurn, ...]
    notes: tuple[str, ...]
    """Figures that could not be made, and why."""
    observed: ObservedSession | None = None
    """Knowledge of a live session beside its turns; ``None`` of every other rollout."""

    @property
    def sampled_tokens(self) -> int:
        """Sum over all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled it, ascending."""
        return tuple(sorted({version for turn in self.turns for version in turn.versions}))


Shown: TypeAlias = ReadRollout | RolloutMatch
"""A rollout with its turns, or as a search finds it."""


def to_json(rollout: Shown) -> dict[str, Json]:
    """One of these objects as JSON; its keys are the fields."""
    fields: dict[str, Json] = orjson.loads(orjson.dumps(rollout, option=orjson.OPT_NON_STR_KEYS))
    return fields
