"""The text protocol of self-summaries: pure.

    … ─▶ observation + request ─▶ scratch + summary ┊ new context ┊ task + kept state + summary ─▶ …

    summarise                  the harness's request, after the last observation, in the same context
    looked at a and b, …       scratch: thoughts that are dropped
    summary                    a line of its own; without it, the whole reply is the summary
    tax 42

Owns the parsing of a summary and the exact first message of the next context: models are mid-trained on transcripts
made with these functions and then see the same text from the real harness. Does not decide when to request a summary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HEADING = "summary"
"""The line before a summary, in the reply and in the context after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A model's summary of its own context."""

    scratch: str
    """Thoughts before the summary; dropped."""
    text: str
    """Text from which the model continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """State that the harness itself carries into the next context, in addition to the summary."""

    summaries: int
    """Number of restarts of the context."""
    open_items: Sequence[tuple[int, str]] = ()
    """Number and text of the open to-do items."""


def read_summary(reply: str) -> Summary:
    """Split a reply at its first heading."""
    lines = reply.strip().split("\n")
    place = next((number for number, line in enumerate(lines) if line.strip() == HEADING), None)
    if place is None:
        return Summary(scratch="", text=reply.strip())
    return Summary(scratch="\n".join(lines[:place]).strip(), text="\n".join(lines[place + 1 :]).strip())


def ask_for_summary(observation: str, request: str) -> str:
    """The message with the result of the last action and the request for a summary."""
    return f"{observation}\n{request}" if observation else request


def open_again(prompt: str, summary: str, state: KeptState) -> str:
    """The first message of a context after ``state.summaries`` summaries: task, open items and summary."""
    items = [f"todo {number} {text}" for number, text in state.open_items]
    return "\n".join([prompt, *items, f"{HEADING} {state.summaries}", summary])


def open_truncated(prompt: str, observation: str) -> str:
    """The first message of a context that keeps only the task and the result of the last action."""
    return f"{prompt}\n{observation}"
