"""Single turns are charged for calls that were turned away, and for nothing else."""

import pytest

from etude.harnesses import tools
from etude.rewards.shaping.hints import malformed_call_rewards
from etude.rewards.transcript import SpokenTurn
from etude.types import TurnKind


def spoken(text: str, answered: str) -> SpokenTurn:
    return SpokenTurn(heard="", text=text, answered=answered, kind=TurnKind.ACT, continues=None)


def test_each_turn_is_charged_for_itself() -> None:
    turns = [
        spoken("read a.py", "1 def f():"),
        spoken("open a.py", tools.BAD_CALL),
        spoken("read b.py", tools.NO_FILE),
        spoken("edit a.py 1\nx", tools.OK),
        spoken("submit", ""),
    ]
    assert malformed_call_rewards(turns) == (0.0, -1.0, -1.0, 0.0, 0.0)


@pytest.mark.parametrize("shown", ["1 bad call", "FAIL f(1) = 2 want 3", tools.PASS, f"text\n{tools.NO_FILE}"])
def test_bad_news_and_files_that_hold_such_words_are_no_malformed_calls(shown: str) -> None:
    assert malformed_call_rewards([spoken("test", shown)]) == (0.0,)


def test_nothing_was_said() -> None:
    assert malformed_call_rewards([]) == ()
