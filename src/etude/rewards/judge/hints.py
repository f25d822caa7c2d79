"""Hints by a judge: which turns of a session went wrong, and the advice that would have helped just before each.

    transcript, each turn between its own guards ──▶ one call ──▶ {"hints": [{"turn": 3, "text": "…"}], "nonce": "…"}

:mod:`etude.rewards.shaping.hints` uses the hints: the policy with the hint in its context teaches the same policy
without it. If a reply cannot be parsed, the request is repeated once; after that there is no hint, and nothing else is
lost. The text of a hint enters the context of a teacher, so it is one line of limited length without role markers.
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
"""In characters."""
TURN_CHARACTERS = 2_000
"""Maximum number of characters that are shown of one turn."""
FEWEST_CHARACTERS = 80
"""Characters that are shown of each turn of an extremely long session."""
TRIES = 2
"""Number of requests; the second one follows a reply that cannot be parsed."""

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
    """Limits of a request for hints."""

    most: int
    """Maximum number of hints."""
    characters: int
    """Maximum length of each turn."""


class HintJudge:
    """Requests hints from a judge; at most ``most`` per session."""

    def __init__(self, judge: Judge, allowance: BudgetLimit, *, most: int = 1) -> None:
        """``allowance`` is the budget of one rollout's hints."""
        self._judge = judge
        self._allowance = allowance
        self._most = most

    async def hints(self, task: Task, transcript_turns: Sequence[str]) -> tuple[Hint, ...]:
        """Hints for turns of a session, in their order, at most one per turn; none for a session without turns.

        Raises :class:`~etude.errors.JudgeUnavailable` if the judge is down or late, or its budget is spent.
        """
        hints = await self.ask(task.prompt, transcript_turns) if transcript_turns else ()
        return () if isinstance(hints, ReplyFault) else hints

    async def ask(self, task: str, transcript_turns: Sequence[str]) -> tuple[Hint, ...] | ReplyFault:
        """Hints for a session of at least one turn, or the fault of the last reply. Raises like :meth:`hints`."""
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
    """The first hint for each turn in a reply about a session of ``turns`` turns, or the reply's fault."""
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
