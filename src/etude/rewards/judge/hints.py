"""Hints by a judge: which turns of a session went wrong, and what would have helped just before each.

    transcript, each turn in a fence of its own ──▶ one call ──▶ {"hints": [{"turn": 3, "text": "…"}], "nonce": "…"}

What hints are for is :mod:`etude.rewards.shaping.hints`': the same policy with the hint in sight teaches the one
without. A reply that cannot be read is asked for once more and then is no hint at all: nothing is lost by that but the
hint. The text of a hint enters the context of a teacher, so it is one line of bounded length and without markers of
roles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.rewards.judge.budget import BudgetLimit
from etude.rewards.judge.judge import Judge, ResponseFormat, draw_tokens
from etude.rewards.judge.prompts import JudgeInput, Message, ReplyFault, Tokens, conversation, guarded, spelled
from etude.rewards.judge.votes import read_object
from etude.types import Hint, Json, Task

SOURCE = "judge"
"""Source of these hints."""
LONGEST_HINT = 200
"""Characters."""
TURN_CHARACTERS = 2_000
"""Shown of one turn."""
FEWEST_CHARACTERS = 80
"""Shown of each turn of an extremely long session."""
TRIES = 2
"""A reply that cannot be read is asked for once more."""

QUESTION = """\
{task}
{turns}

These are the turns of one session, numbered from 0. Name at most {most} turns in which the agent made a clear \
mistake that one short sentence, said to it just before that turn, would have prevented: a malformed call, a wrong \
argument, an error ignored. Most turns need none. Say what to do, not what was done, in at most {longest} characters.
Answer with one JSON object and nothing else:
{{"hints": [{{"turn": 0, "text": "one sentence"}}], "nonce": "{nonce}"}}"""

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "hints": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"turn": {"type": "integer"}, "text": {"type": "string"}},
                "required": ["turn", "text"],
                "additionalProperties": False,
            },
        },
        "nonce": {"type": "string"},
    },
    "required": ["hints", "nonce"],
    "additionalProperties": False,
}
"""JSON schema of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HintLimits:
    """Limits of what is shown of a session."""

    most: int
    """Hints."""
    characters: int
    """Limit of each turn."""


class HintJudge:
    """Requests hints from a judge; at most ``most`` per session."""

    def __init__(self, judge: Judge, allowance: BudgetLimit, *, most: int = 1) -> None:
        """``allowance`` is what the hints of one rollout may take."""
        self._judge = judge
        self._allowance = allowance
        self._most = most

    async def hints(self, task: Task, transcript_turns: Sequence[str]) -> tuple[Hint, ...]:
        """Hints for turns of a session, in their order, at most one for each; none for a session without turns.

        Raises :class:`~etude.errors.JudgeUnavailable` when the judge is down or late, or its budget is spent.
        """
        hints = await self.ask(task.prompt, transcript_turns) if transcript_turns else ()
        return () if isinstance(hints, ReplyFault) else hints

    async def ask(self, task: str, transcript_turns: Sequence[str]) -> tuple[Hint, ...] | ReplyFault:
        """Hints for a session of at least one turn, or why the last reply cannot be read. Raises like :meth:`hints`."""
        budget = self._judge.budget.portion(self._allowance)
        room = self._judge.params.text_characters // len(transcript_turns)
        shown = _HintLimits(most=self._most, characters=max(FEWEST_CHARACTERS, min(TURN_CHARACTERS, room)))
        judged = JudgeInput(task=task, work="\n".join(transcript_turns))
        hints: tuple[Hint, ...] | ReplyFault = ()
        for attempt in range(TRIES):
            tokens = draw_tokens(judged)
            messages = ask_for_hints(task, transcript_turns, tokens, shown)
            reply_format = ResponseFormat(about="hints", schema=SCHEMA)
            reply = await self._judge.converse(messages, reply_format, budget, seed=attempt)
            hints = read_hints(reply.text, len(transcript_turns), tokens.nonce)
            if not isinstance(hints, ReplyFault):
                return hints[: self._most]
        return hints


def ask_for_hints(task: str, turns: Sequence[str], tokens: Tokens, shown: _HintLimits) -> tuple[Message, ...]:
    """The prompt messages that ask for hints on a session."""
    fences = [guarded(text, f"turn {turn}", tokens.mark, shown.characters) for turn, text in enumerate(turns)]
    question = QUESTION.format(
        task=guarded(task, "task", tokens.mark, TURN_CHARACTERS),
        turns="\n".join(fences),
        most=shown.most,
        longest=LONGEST_HINT,
        nonce=tokens.nonce,
    )
    return conversation(tokens.mark, question)


def read_hints(reply: str, turns: int, nonce: str) -> tuple[Hint, ...] | ReplyFault:
    """The hints in a reply about a session of so many turns, the first one of each turn, or why it cannot be read."""
    fields = read_object(reply)
    if isinstance(fields, ReplyFault):
        return fields
    if fields.keys() != {"hints", "nonce"} or not isinstance(fields["hints"], list):
        return ReplyFault.WRONG_KEYS
    if fields["nonce"] != nonce:
        return ReplyFault.WRONG_NONCE
    hints: dict[int, Hint] = {}
    for entry in fields["hints"]:
        match entry:
            case {"turn": int(turn), "text": str(text), **rest} if not rest and 0 <= turn < turns:
                line = spelled(" ".join(text.split()))[:LONGEST_HINT]
                if line and turn not in hints:
                    hints[turn] = Hint(turn=turn, text=line, source=SOURCE)
            case _:
                return ReplyFault.WRONG_KEYS
    return tuple(hint for _, hint in sorted(hints.items()))
