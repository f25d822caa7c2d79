"""A rollout read turn by turn: nothing twice, nothing lost, every answer at the turn that it answers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.protocols import SpokenCall
from etude.rewards.transcript import attributed, continued, conversations, read_turns, spoken_turns
from etude.types import Finish, Ids, Turn, TurnKind


def make_turn(prompt: str, text_of: str, kind: TurnKind = TurnKind.ACT) -> Turn:
    """Every letter is a token."""
    return Turn(
        prompt_ids=np.array([ord(letter) for letter in prompt], np.int32),
        completion_ids=np.array([ord(letter) for letter in text_of], np.int32),
        logprobs=np.zeros(len(text_of), np.float32),
        versions=np.zeros(len(text_of), np.int32),
        finish=Finish.STOP,
        kind=kind,
    )


def decode(token_ids: Ids) -> str:
    return "".join(map(chr, token_ids.tolist()))


def test_a_conversation_that_grows_is_read_once() -> None:
    turns = [make_turn("fix.", "read"), make_turn("fix.read|1 x|", "edit"), make_turn("fix.read|1 x|edit|ok|", "end")]
    first, second, third = read_turns(turns, decode)
    assert (first.heard, first.text, first.answered) == ("fix.", "read", "|1 x|")
    assert (second.heard, second.text, second.answered) == ("|1 x|", "edit", "|ok|")
    assert (third.heard, third.text, third.answered) == ("|ok|", "end", "")
    assert [turn.continues for turn in (first, second, third)] == [None, 0, 1]


def test_a_context_that_begins_anew_is_read_whole() -> None:
    turns = [
        make_turn("fix.", "read"),
        make_turn("fix.read|sum up|", "x=1", TurnKind.SUMMARY),
        make_turn("fix.x=1", "end"),
    ]
    spoken = read_turns(turns, decode)
    assert [turn.continues for turn in spoken] == [None, 0, None]
    assert spoken[1].kind is TurnKind.SUMMARY
    assert (spoken[1].answered, spoken[2].heard) == ("", "fix.x=1")


def test_an_edited_history_goes_on_from_the_reply_that_is_still_there() -> None:
    turns = [make_turn("a", "b"), make_turn("ab1", "c"), make_turn("ab2", "d"), make_turn("ab1c3", "e")]
    spoken = read_turns(turns, decode)
    assert [turn.continues for turn in spoken] == [None, 0, 0, 1]
    assert [turn.heard for turn in spoken] == ["a", "1", "2", "3"]
    assert spoken[0].answered == "1"  # what it led to first


def test_a_turn_that_said_nothing_is_gone_on_from_by_none() -> None:
    assert continued([make_turn("a", ""), make_turn("a", "b"), make_turn("abc", "d")]) == [None, None, 1]


def plainly(turns: list[Turn]) -> list[int | None]:
    """The expected result, by comparing every turn with every earlier one."""
    results: list[int | None] = []
    for index, turn in enumerate(turns):
        text = decode(turn.prompt_ids)
        wholes = [(decode(t.prompt_ids) + decode(t.completion_ids), n) for n, t in enumerate(turns[:index])]
        fitting = [(len(w), n) for w, n in wholes if text.startswith(w) and len(turns[n].completion_ids)]
        results.append(max(fitting)[1] if fitting else None)
    return results


few = st.text(alphabet="ab", max_size=5)


@given(st.lists(st.tuples(few, few), max_size=12))
def test_any_tree_is_found_as_by_comparing_everything(pairs: list[tuple[str, str]]) -> None:
    turns = [make_turn(prompt, text) for prompt, text in pairs]
    assert continued(turns) == plainly(turns)
    spoken = read_turns(turns, decode)
    for index, turn in enumerate(spoken):
        before = (
            "" if turn.continues is None else decode(turns[turn.continues].prompt_ids) + spoken[turn.continues].text
        )
        assert before + turn.heard == decode(turns[index].prompt_ids)


def test_long_conversations_decode_every_token_once() -> None:
    context, turns = "", []
    for number in range(300):
        context += f"|{number}|"
        turns.append(make_turn(context, "said"))
        context += "said"
    decoded = 0

    def count(token_ids: Ids) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids)

    read_turns(turns, count)
    assert decoded == len(context)


TEXTS = st.text(alphabet="ab\n\r\u2028 |heardsi:", max_size=30)


@given(TEXTS, TEXTS)
def test_nothing_said_passes_for_something_heard(heard: str, text: str) -> None:
    lines = attributed(heard=heard, said=text).splitlines()
    assert [line.removeprefix("heard| ") for line in lines if line.startswith("heard|")] == heard.splitlines()
    assert [line.removeprefix("said| ") for line in lines if line.startswith("said|")] == text.splitlines()
    assert len(lines) == len(heard.splitlines()) + len(text.splitlines())


def test_agents_side_by_side_are_conversations_and_a_summary_begins_none() -> None:
    calls = [("both", None), ("a", None), ("b", None), ("b is 1", 2), ("a is 1", 1), ("done", 0)]
    turns = spoken_turns([SpokenCall(heard=heard, text="ok", continues=before) for heard, before in calls])
    assert conversations(turns) == [[0, 5], [1, 4], [2, 3]]
    assert [turn.answered for turn in turns] == ["done", "a is 1", "b is 1", "", "", ""]

    side, main = make_turn("side.", "act"), make_turn("main.", "sum", TurnKind.SUMMARY)
    turns = read_turns([main, make_turn("main: sum.", "act"), side, make_turn("side.act|ok|", "end")], decode)
    assert conversations(turns) == [[0, 1], [2, 3]]
