"""A rollout as its reader sees it: every turn in words and figures, and what the trainer makes of it.

Owns the nouns that the page of a rollout (:mod:`etude.dashboard.rollout_text`) and ``etude show --json`` are made from;
their fields are the keys of the JSON, and stay. Does not own how the figures come about
(:mod:`etude.cli.commands.rollout_view`). What is not known is ``None``, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from etude.ledger.archive import RolloutMatch
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """One of the named numbers that were recorded with a reward."""

    name: str
    value: float
    """As its source gave it."""
    worth: float | None
    """What it adds to the reward; ``None``: it was only recorded, or the grader alone knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadToken:
    """One sampled token."""

    token_id: int
    text: str
    """What it spells; a special one by its name, U+FFFD for a part of a character."""
    logprob: float
    """The engine's."""
    version: int
    """The weight version that sampled it."""
    mismatch: float | None
    """The trainer's logprob under that version − the engine's."""
    kept: int | None
    """Tokens of the vocabulary that it was drawn from; ``None`` where nothing was cut, or nobody knows any more."""
    routes: tuple[tuple[int, ...], ...] | None
    """[sparse layers, experts per token] of the pass that it was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSummary:
    """What a self-summary made of its context."""

    scratch: str
    """What was thought before, and is forgotten."""
    text: str
    """What the next context goes on from."""
    tokens_before: int
    """Of the context that was summarised."""
    tokens_after: int | None
    """Of the one that begins after it; ``None`` where none does."""
    facts: Mapping[str, bool | None]
    """What the answer takes → whether the summary has it; ``None`` where it had not been seen by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadHint:
    """What somebody would have told the model before a turn."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """One model call."""

    number: int
    """From 0."""
    kind: str
    continues: int | None
    """The turn whose reply its context goes on from; ``None``: the context began anew."""
    heard: str
    """What is new in its context."""
    said: str
    finish: str
    temperature: float
    prompt_tokens: int
    new_tokens: int
    """Of the prompt: those that are new in it."""
    sampled_tokens: int
    versions: Mapping[int, int]
    """Weight version → tokens that it sampled."""
    reward: float | None
    """What it earned by itself, beside the rollout's."""
    hint: ReadHint | None
    advantage: float | None
    """Of its loss tokens; 0 where there is no signal, ``None`` where it cannot be said."""
    loss_tokens: int | None
    """Sampled tokens that carry loss; ``None`` where that cannot be said."""
    summary: ReadSummary | None
    tokens: tuple[ReadToken, ...] | None
    """``None`` unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadComparison:
    """What a rollout is worth beside the others of its group."""

    penalty: float
    """Taken off for effort."""
    compared: float
    """What is left of the reward."""
    rollouts: int
    """Those that are compared: graded and not quarantined."""
    quarantined: int
    lost: int
    """Slots given up to infrastructure."""
    weight: float
    """Factor of the group's advantages for these two."""
    has_signal: bool
    """Whether any turn of the group has an advantage; else nothing is trained on."""
    step_tokens: int | None
    """Loss tokens of the whole batch of its optimiser step; ``None`` before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVerdict:
    """What was made of a rollout by whoever looked for cheating in it."""

    disposition: str
    reason: str
    flags: tuple[str, ...]
    graded: float
    """The grader's word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRollout:
    """One attempt at a task."""

    rollout_id: str
    purpose: str
    group: int
    slot: int
    attempt: int
    step: int | None
    """The optimiser step that claimed its group."""
    group_state: str
    """Where its group is on its way to the trainer (:class:`~etude.ledger.states.GroupState`)."""
    task_id: str
    template: str
    prompt: str
    status: str
    reason: str
    reward: float | None
    parts: tuple[ReadPart, ...]
    counts: Mapping[str, int]
    """What the agent did: tool name → calls."""
    seconds: float
    verdict: ReadVerdict | None
    branch_of: str | None
    """The rollout that sampled its first turns."""
    branch_turns: int
    """How many those are."""
    comparison: ReadComparison | None
    """``None`` where nothing is trained on; of an open group what it would be if the group ended now."""
    turns: tuple[ReadTurn, ...]
    notes: tuple[str, ...]
    """What could not be said, and why."""

    @property
    def sampled_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled it, ascending."""
        return tuple(sorted({version for turn in self.turns for version in turn.versions}))


Shown: TypeAlias = ReadRollout | RolloutMatch
"""A rollout with its turns, or as a search finds it."""


def to_json(rollout: Shown) -> dict[str, Json]:
    """One object; its keys are the fields."""
    fields: dict[str, Json] = orjson.loads(orjson.dumps(rollout, option=orjson.OPT_NON_STR_KEYS))
    return fields
