"""Selection of turns for hints: the earliest turns with the mistake, one hint each."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.hints import HintRule
from etude.errors import JudgeUnavailable
from etude.harnesses import tools
from etude.harnesses.summaries import ask_for_summary
from etude.rewards.shaping.hints import HINT_CHARACTERS, TOOL_RULES, HintFinder, Rule, chosen, ruled
from etude.rewards.transcript import read_turns
from etude.types import Finish, Hint, Ids, Split, Task, Turn
from records import CHECKS

TASK = Task(task_id="a", family="f", template="t", split=Split.TRAIN, prompt="fix f", files={}, checks=CHECKS)
STYLE = Rule.of(HintRule(name="style", where="said", pattern=r"^edit \S+:[0-9]", text="edit FILE N"))


def session(*pairs: str) -> list[Turn]:
    """A growing conversation: prompt and reply of each turn; every letter is a token."""
    context, turns = "", []
    for heard, text in zip(pairs[::2], pairs[1::2], strict=True):
        context += heard
        turns.append(
            Turn(
                prompt_ids=np.array([ord(letter) for letter in context], np.int32),
                completion_ids=np.array([ord(letter) for letter in text], np.int32),
                logprobs=np.zeros(len(text), np.float32),
                versions=np.zeros(len(text), np.int32),
                finish=Finish.STOP,
            )
        )
        context += text
    return turns


def decode(token_ids: Ids) -> str:
    return "".join(map(chr, token_ids.tolist()))


WRONG = session(
    "fix f", "edit f.py:3\nx", tools.BAD_CALL, "edit f.py 3\nx", tools.OK, "edit f.py 99\n", tools.BAD_EDIT, "submit"
)


class Scripted:
    """A provider that has hints for some turns, or is out of reach."""

    def __init__(self, *hints: Hint, trouble: JudgeUnavailable | None = None) -> None:
        self._hints = hints
        self._trouble = trouble
        self.pages: list[Sequence[str]] = []

    async def hints(self, task: Task, transcript_turns: Sequence[str]) -> tuple[Hint, ...]:
        self.pages.append(transcript_turns)
        if self._trouble is not None:
            raise self._trouble
        return self._hints


def find(turns: Sequence[Turn], *rules: Rule, most: int = 9, provider: Scripted | None = None) -> tuple[Hint, ...]:
    finder = HintFinder(rules, most=most, fits=lambda ids: len(ids) < 200, provider=provider)
    return asyncio.run(finder.find(TASK, turns, read_turns(turns, decode)))


def test_the_turn_that_made_the_mistake_is_hinted_at_not_the_one_that_read_of_it() -> None:
    assert [(hint.turn, hint.source) for hint in find(WRONG, *TOOL_RULES)] == [(0, "malformed call"), (2, "bad edit")]
    assert [hint.turn for hint in find(WRONG, STYLE)] == [0]


def test_every_answer_to_a_call_that_went_wrong_has_a_hint() -> None:
    for observation in (tools.BAD_CALL, tools.BAD_EDIT, tools.NO_FILE, tools.NO_TODO):
        (hint,) = find(session("fix f", "x", observation, "submit"), *TOOL_RULES)
        assert hint.turn == 0
        (question,) = find(session("fix f", "x", ask_for_summary(observation, "Sum up."), "submit"), *TOOL_RULES)
        assert question == hint


@pytest.mark.parametrize("observation", [tools.OK, tools.PASS, "1 bad call", "bad calls", "FAIL bad edit", "todo 1"])
def test_other_answers_have_none(observation: str) -> None:
    assert find(session("fix f", "x", observation, "submit"), *TOOL_RULES) == ()


def test_of_several_rules_the_first_speaks() -> None:
    assert [hint.source for hint in find(WRONG, STYLE, *TOOL_RULES)] == ["style", "bad edit"]
    assert [hint.source for hint in find(WRONG, *TOOL_RULES, STYLE)] == ["malformed call", "bad edit"]


def test_the_earliest_turns_are_hinted_at_first() -> None:
    assert [hint.turn for hint in find(WRONG, *TOOL_RULES, most=1)] == [0]


def test_turns_that_cannot_be_hinted_at_have_none() -> None:
    late = session("x" * 200, "edit f.py:3\nx", tools.BAD_CALL, "submit")
    assert find(late, STYLE) == ()
    assert find(session("fix f", "", tools.BAD_CALL, "submit"), *TOOL_RULES) == ()


def test_a_judge_is_asked_where_rules_leave_room() -> None:
    message = Scripted(Hint(turn=0, text="no", source="judge"), Hint(turn=3, text="test first", source="judge"))
    results = find(WRONG, STYLE, most=2, provider=message)
    assert [(hint.turn, hint.source) for hint in results] == [(0, "style"), (3, "judge")]
    assert [page.split("|")[0] for page in message.pages[0]] == ["heard"] * 4
    busy = Scripted()
    assert len(find(WRONG, STYLE, most=1, provider=busy)) == 1
    assert busy.pages == []


def test_a_judge_that_cannot_be_asked_costs_hints_and_no_rollout() -> None:
    away = Scripted(trouble=JudgeUnavailable("the judge is down"))
    assert [hint.source for hint in find(WRONG, STYLE, provider=away)] == ["style"]
    assert len(away.pages) == 1


def test_a_judges_hints_for_turns_that_are_not_there_are_none() -> None:
    assert find(WRONG, provider=Scripted(Hint(turn=17, text="x", source="judge"))) == ()


def test_long_hints_are_cut() -> None:
    (hint,) = find(WRONG, provider=Scripted(Hint(turn=1, text="x" * 5000, source="judge")))
    assert len(hint.text) == HINT_CHARACTERS


hints = st.builds(Hint, turn=st.integers(0, 9), text=st.sampled_from(["a", "b"]), source=st.just("s"))


@given(st.lists(hints), st.sets(st.integers(0, 9)), st.integers(1, 5))
def test_the_choice_holds_its_bounds(named: list[Hint], teachable: set[int], most: int) -> None:
    results = chosen(named, teachable, most)
    turns = [hint.turn for hint in results]
    assert turns == sorted(set(turns))
    assert len(turns) <= most
    assert set(turns) <= teachable
    left_out = {hint.turn for hint in named if hint.turn in teachable} - set(turns)
    assert not left_out or (len(turns) == most and max(turns) < min(left_out))
    assert all(hint == next(other for other in named if other.turn == hint.turn) for hint in results)


def test_rules_of_recipes_are_looked_for_in_lines() -> None:
    rule = Rule.of(HintRule(name="wait", where="said", pattern="^wait", text="Do not."))
    spoken = read_turns(session("fix f", "ok\nwait", "no", "a wait"), decode)
    assert [hint.turn for hint in ruled(spoken, [rule])] == [0]
