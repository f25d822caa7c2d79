"""Habits of the imitated agent that training has to unlearn.

They are edits in a style that no tool understands, unless a reminder names the right one; and stubs in unread files.
"""

from collections import Counter
from itertools import pairwise
from random import Random

from etude.config.tasks import BugfixOptions
from etude.harnesses import tools
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.transcripts import REMINDER, STUBS, BugfixDemonstrations, Message

SESSIONS = 200


def sessions(**habits: float) -> list[list[Message]]:
    demonstrations = BugfixDemonstrations(BugfixFamily(BugfixOptions(), seed=0), BugfixOptions.model_validate(habits))
    rng = Random(0)
    return [demonstrations.session(rng) for _ in range(SESSIONS)]


def test_a_wrong_edit_is_a_malformed_call_and_then_the_same_edit_rightly() -> None:
    wrong = 0
    for session in sessions(bad_call=0.8):
        for output, answered, again in zip(session, session[1:], session[2:], strict=False):
            if output.role == "assistant" and isinstance(tools.parse_call(output.content), tools.Malformed):
                wrong += 1
                edit = tools.parse_call(again.content)
                assert answered.content == tools.BAD_CALL
                assert isinstance(edit, tools.EditFile)
                assert output.content == f"edit {edit.path}:{edit.line}\n{edit.text}"
    assert wrong > SESSIONS / 2


def test_an_edit_after_a_reminder_is_written_rightly_at_once() -> None:
    seen = Counter[str]()
    for session in sessions(bad_call=1.0, reminded=0.5):
        for output, answer in pairwise(session):
            if answer.role == "assistant":
                called = type(tools.parse_call(answer.content))
                assert called is not tools.Malformed or output.content != REMINDER
                seen[called.__name__] += 1
    assert 0.3 < seen["Malformed"] / seen["EditFile"] < 0.7


def test_a_reminder_does_not_say_that_it_is_time_to_edit() -> None:
    """Every action follows a reminder equally often, so that obedience teaches only the style."""
    moves, reminded = Counter[str](), Counter[str]()
    for session in sessions(bad_call=0.8, reminded=0.5):
        for output, answer in pairwise(session):
            if answer.role == "assistant" and output.content != tools.BAD_CALL:
                called = type(tools.parse_call(answer.content)).__name__.replace("Malformed", "EditFile")
                moves[called] += 1
                reminded[called] += output.content == REMINDER
    assert {"ReadFile", "EditFile", "RunTests", "Submit"} <= set(moves)
    for move, count in moves.items():
        assert 0.35 < reminded[move] / count < 0.65, move


def test_without_habits_every_call_can_be_read() -> None:
    for session in sessions():
        for message in session:
            assert message.content != REMINDER
            assert message.role != "assistant" or not isinstance(tools.parse_call(message.content), tools.Malformed)


def test_demonstrations_write_stubs_into_unread_files_and_real_lines_into_read_ones() -> None:
    edits = Counter[tuple[bool, bool]]()
    for session in sessions(read_first=0.5, stub=1.0, test_after=0.9, retry=0.9):
        has_read, lines = False, list[str]()
        for message in (message for message in session if message.role == "assistant"):
            call = tools.parse_call(message.content)
            has_read |= isinstance(call, tools.ReadFile)
            if isinstance(call, tools.EditFile):
                lines.append(call.text)
                edits[has_read, call.text.strip() in STUBS] += 1
        assert len(lines) == len(set(lines)), "a line is never tried twice"
    assert set(edits) == {(True, False), (False, True)}
    assert min(edits.values()) > SESSIONS / 4
