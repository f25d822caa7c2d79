"""The nouns of the native engine's scheduling: a completion in progress, and a share of one step.

Owns what a request knows of itself. Who waits, who runs and who gets which page is decided elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from etude.engines.native.pages import Node
from etude.protocols import SamplingParams


class State(StrEnum):
    """Where a request is."""

    NEW = "new"
    """Nobody has heard of it."""
    WAITING = "waiting"
    """In line; it holds no page."""
    RUNNING = "running"
    """It holds pages for all its tokens."""
    DONE = "done"
    """Finished or cancelled."""


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.NEW: frozenset({State.WAITING}),
        State.WAITING: frozenset({State.RUNNING, State.DONE}),
        State.RUNNING: frozenset({State.WAITING, State.DONE}),
        State.DONE: frozenset(),
    }
)
"""Running to waiting: its pages went to a better one, or its keys were of weights that are gone."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One completion in progress. Callers give the first four; the rest is written by the scheduler."""

    session: str
    params: SamplingParams
    token_ids: list[int]
    """Prompt, then what was sampled so far."""
    prompt_length: int
    cached: int = 0
    """How many leading ``token_ids`` have their keys in ``pages``."""
    pages: list[int] = field(default_factory=list)
    """Its pages in the order of its tokens; there is room for at least ``cached`` positions. While it runs, pages are
    added at the end and none is exchanged.
    """
    logprobs: list[float] = field(default_factory=list)
    """One per sampled token, like ``versions``."""
    versions: list[int] = field(default_factory=list)
    arrival: int = -1
    """Its place in the order of arrival; of equal priorities the earlier is served first."""
    state: State = State.NEW
    rereads: int = 0
    """How often new weights made its prompt be read again."""
    leaf: Node | None = None
    """The index node of its last full page; ``None`` while it does not run, and when its keys are of several versions:
    such are never indexed.
    """
    indexed: int = 0
    """How many of its pages are full and known to the index."""
    reader: "Request | None" = None
    """A running request that is computing pages which this one needs, too."""
    awaited: int = 0
    """How many pages ``reader`` will have indexed when there is nothing more to wait for."""
    room: int = 0
    """Pages that must be available before another look at whether this one fits."""

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in line: the lower is served first. No two requests have the same."""
        return (self.params.priority, self.arrival)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether the last sampled token ended the completion."""
        stopped = self.sampled > 0 and self.token_ids[-1] in self.params.stop_ids
        return stopped or self.sampled >= self.params.max_tokens

    def move(self, state: State) -> None:
        """Go to another state; only moves in ``TRANSITIONS`` exist."""
        assert state in TRANSITIONS[self.state], f"a request went from {self.state} to {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens ``start : start + count`` of a request, to be computed in this step."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether this work reaches the request's last token, so that a next one is sampled."""
        return self.start + self.count == len(self.request.token_ids)


@dataclass(slots=True, kw_only=True)
class Counters:
    """What was scheduled since somebody last asked."""

    generated_tokens: int = 0
    """Sampled."""
    prefill_tokens: int = 0
    """Read by computing them: prompts, and what a request without its pages has to read again."""
    reused_tokens: int = 0
    """Read by finding their pages."""
    preempted: int = 0
    """Running requests that lost their pages to better ones."""
    evicted_pages: int = 0
    """Indexed pages given up for other content."""
    rereads: int = 0
    """Running requests whose keys were thrown away because the weights changed."""
