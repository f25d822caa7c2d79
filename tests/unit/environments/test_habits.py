"""A planted habit: edits in a style that no tool understands, unless somebody reminds of the right one."""

from collections import Counter
from itertools import pairwise
from random import Random

from etude.config.imitation import TranscriptConfig
from etude.config.tasks import TaskConfig
from etude.environments.bugfix import BugfixFamily
from etude.environments.transcripts import REMINDER, BugfixPractice, Message
from etude.sandboxes import tools

SESSIONS = 200


def sessions(**habits: float) -> list[list[Message]]:
    practice = BugfixPractice(BugfixFamily(TaskConfig(), seed=0), TranscriptConfig(**habits))
    rng = Random(0)
    return [practice.session(rng) for _ in range(SESSIONS)]


def test_a_wrong_edit_is_a_malformed_call_and_then_the_same_edit_rightly() -> None:
    wrong = 0
    for session in sessions(bad_call=0.8):
        for said, answered, again in zip(session, session[1:], session[2:], strict=False):
            if said.role == "assistant" and isinstance(tools.parse_call(said.content), tools.Malformed):
                wrong += 1
                edit = tools.parse_call(again.content)
                assert answered.content == tools.BAD_CALL
                assert isinstance(edit, tools.EditFile)
                assert said.content == f"edit {edit.path}:{edit.line}\n{edit.text}"
    assert wrong > SESSIONS / 2


def test_after_a_reminder_the_edit_is_written_rightly_at_once() -> None:
    reminded, seen = 0, Counter[str]()
    for session in sessions(bad_call=1.0, reminded=0.5):
        for said, answer in pairwise(session):
            if said.content == REMINDER:
                reminded += 1
                assert isinstance(tools.parse_call(answer.content), tools.EditFile)
        seen.update(type(tools.parse_call(said.content)).__name__ for said in session if said.role == "assistant")
    assert reminded > SESSIONS / 3
    assert 0.3 < seen["Malformed"] / seen["EditFile"] < 0.7


def test_without_habits_every_call_can_be_read() -> None:
    for session in sessions():
        for message in session:
            assert message.content != REMINDER
            assert message.role != "assistant" or not isinstance(tools.parse_call(message.content), tools.Malformed)
