"""A rollout as readable turns: prompt, reply and tool results as text.

    turn 0   heard  fix f in f.py     said  read f.py           answered  1 def f(x): …
    turn 1   heard  1 def f(x): …     said  edit f.py:1⏎…       answered  bad call
    turn 2   heard  bad call          said  edit f.py 1⏎…       answered

Every text appears once, in the turn where it is new: a context is read from the end of the reply that it continues. A
context that continues no reply (the first one, a sub-agent's, one that restarted after a summary) is read as a whole.
Rules, judges and reports read rollouts through this module; it does not interpret them. Pure.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.protocols import SpokenCall
from etude.types import Ids, Turn, TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenTurn:
    """One model call as text."""

    heard: str
    """New text in its context."""
    text: str
    """The model's text."""
    answered: str
    """New text of the first turn that continues this one; empty if there is none."""
    kind: TurnKind
    """Kind of the request."""
    continues: int | None
    """The turn whose reply it continues; ``None``: its context is new."""


def attributed(*, before: str = "", **texts: str) -> str:
    """Texts with the name of their source before every line, so that no text of the model can pass for one that it
    read.
    """
    return "\n".join(f"{before}{name}| {line}" for name, text in texts.items() for line in text.splitlines())


def read_turns(
    turns: Sequence[Turn], decode: Callable[[Ids], str], content: Callable[[str], str] = str
) -> tuple[SpokenTurn, ...]:
    """Every turn of a rollout, in order. ``decode`` gives the text of token ids; ``content`` removes role names and
    the like from a text that follows a reply (:mod:`etude.tokens.message_frames`).

    Each token is decoded once per context in which it is new, so the time for a conversation that only grows is
    proportional to its last context.
    """
    parents = continued(turns)
    heard = [
        decode(turn.prompt_ids) if parent is None else content(decode(turn.prompt_ids[turns[parent].length :]))
        for turn, parent in zip(turns, parents, strict=True)
    ]
    answers: dict[int, str] = {}
    for text, parent in zip(heard, parents, strict=True):
        if parent is not None:
            answers.setdefault(parent, text)
    return tuple(
        SpokenTurn(
            heard=heard[index],
            text=decode(turn.completion_ids),
            answered=answers.get(index, ""),
            kind=turn.kind,
            continues=parents[index],
        )
        for index, (turn, parent) in enumerate(zip(turns, parents, strict=True))
    )


def spoken_turns(calls: Sequence[SpokenCall]) -> tuple[SpokenTurn, ...]:
    """The turns of calls of which only the text is available."""
    answers: dict[int, str] = {}
    for call in calls:
        if call.continues is not None:
            answers.setdefault(call.continues, call.heard)
    return tuple(
        SpokenTurn(
            heard=call.heard,
            text=call.text,
            answered=answers.get(index, ""),
            kind=TurnKind.ACT,
            continues=call.continues,
        )
        for index, call in enumerate(calls)
    )


def conversations(spoken: Sequence[SpokenTurn]) -> list[list[int]]:
    """The turns of each conversation, in the order of their starts: parallel agents have one each. A context that
    restarts after a summary continues the summarised conversation.
    """
    result: list[list[int]] = []
    place: list[int] = []
    summarised: list[int] = []
    for index, turn in enumerate(spoken):
        if turn.continues is not None:
            place.append(place[turn.continues])
        else:
            place.append(summarised.pop(0) if summarised else len(result))
        if place[index] == len(result):
            result.append([])
        result[place[index]].append(index)
        if turn.kind is TurnKind.SUMMARY:
            summarised.append(place[index])
    return result


def continued(turns: Sequence[Turn]) -> list[int | None]:
    """For each turn, the earlier turn whose context and reply are a prefix of its own context: the longest one, and the
    newest of equal ones; ``None`` if there is none.

    The longest candidates are compared first. Usually the previous turn matches, and others differ early, so that there
    is about one full comparison per turn.
    """
    parents: list[int | None] = []
    seen: list[tuple[int, int]] = []
    for index, turn in enumerate(turns):
        end = bisect_right(seen, (len(turn.prompt_ids), index))
        fitting = (place for _, place in reversed(seen[:end]) if turn.continues(turns[place]))
        parents.append(next(fitting, None))
        if len(turn.completion_ids):
            insort(seen, (turn.length, index))
    return parents
