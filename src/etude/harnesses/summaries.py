"""The text protocol of self-summaries: pure.

    … ─▶ observation + request ─▶ scratch + summary ┊ the context starts anew ┊ task + kept state + summary ─▶ …

    summarise                  what the harness asks for, behind the last observation, in the same context
    looked at a and b, …       scratch: thoughts that are not carried over
    summary                    a line of its own; a reply without it is a summary as a whole
    tax 42

Owns how a summary is read out of a reply and how a context begins after it, to the letter: models are mid-trained on
transcripts made with these functions and then meet the same text from the real harness. Does not decide when to ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HEADING = "summary"
"""The line before a summary, in the reply and in the context after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary that a model wrote of its own context."""

    scratch: str
    """Its thoughts before; dropped."""
    text: str
    """Text that it goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """State that the harness carries over itself, independent of the summary."""

    summaries: int
    """Number of times that the context started anew."""
    open_items: Sequence[tuple[int, str]] = ()
    """Number and text of the to-do items that are not done."""


def read_summary(reply: str) -> Summary:
    """Split a reply at its first heading."""
    lines = reply.strip().split("\n")
    place = next((number for number, line in enumerate(lines) if line.strip() == HEADING), None)
    if place is None:
        return Summary(scratch="", text=reply.strip())
    return Summary(scratch="\n".join(lines[:place]).strip(), text="\n".join(lines[place + 1 :]).strip())


def ask_for_summary(observation: str, request: str) -> str:
    """The message that asks for a summary, after the result of the last action."""
    return f"{observation}\n{request}" if observation else request


def open_again(prompt: str, summary: str, state: KeptState) -> str:
    """The first message of a context after ``kept.summaries`` summaries: task, open items and summary."""
    items = [f"todo {number} {text}" for number, text in state.open_items]
    return "\n".join([prompt, *items, f"{HEADING} {state.summaries}", summary])


def open_truncated(prompt: str, observation: str) -> str:
    """The first message of a context that keeps nothing but the task and the result of the last action."""
    return f"{prompt}\n{observation}"
