"""The end of a context, its contents, and what is carried over to the next."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.rollouts import CodingOptions
from etude.harnesses.contexts import MOVES, Context, Recall, Step, TodoList, Window

Mode = Literal["grow", "summary", "truncate"]


def window(mode: Mode = "summary", *, max_turns: int = 99, **limits: Any) -> Window:
    if mode != "grow":
        limits["summary_at_tokens"] = 100
    return Window(CodingOptions(context=mode, max_turns=max_turns, **limits))


# --- Decisions ----------------------------------------------------------------------------------------------------


def test_a_context_with_room_goes_on() -> None:
    one = window()
    one.replied(99)
    assert one.step is Step.ACT


def test_a_full_context_is_summarised_and_left() -> None:
    one = window()
    one.replied(100)
    assert one.step is Step.SUMMARISE
    one.replied(150)
    assert (one.step, one.restarts) == (Step.RESTART, 0)
    one.restarted()
    assert (one.step, one.restarts) == (Step.ACT, 1)


def test_a_truncated_context_is_left_without_a_call() -> None:
    one = window("truncate")
    one.replied(100)
    assert one.step is Step.RESTART


def test_a_growing_context_ends_where_there_is_no_room() -> None:
    one = window("grow")
    one.replied(10_000)
    assert one.step is Step.ACT
    assert not one.refused(can_shorten=True)
    assert (one.step, one.reason) == (Step.STOP, "context")


@pytest.mark.parametrize(("mode", "step"), [("summary", Step.SUMMARISE), ("truncate", Step.RESTART)])
def test_a_context_without_room_for_a_result_is_left_before_its_trigger(mode: Mode, step: Step) -> None:
    one = window(mode)
    one.replied(50)
    assert not one.refused(can_shorten=True)
    assert one.step is step


def test_a_request_without_room_is_asked_again_with_less_of_the_result() -> None:
    one = window()
    one.replied(100)
    assert one.refused(can_shorten=True)
    assert one.refused(can_shorten=True)
    assert one.step is Step.SUMMARISE
    assert not one.refused(can_shorten=False)
    assert (one.step, one.reason) == (Step.STOP, "context")


def test_a_task_that_does_not_fit_ends_the_session() -> None:
    one = window()
    assert not one.refused(can_shorten=False)
    assert (one.step, one.reason) == (Step.STOP, "context")


def test_the_last_context_grows() -> None:
    one = window(max_summaries=1)
    one.replied(100)
    one.replied(150)
    one.restarted()
    one.replied(150)
    assert one.step is Step.ACT
    assert not one.refused(can_shorten=True)
    assert (one.step, one.reason) == (Step.STOP, "context")


def test_no_summary_is_asked_for_that_no_model_could_go_on_from() -> None:
    one = window(max_turns=2)
    one.replied(100)
    assert one.step is Step.ACT
    one.replied(150)
    assert (one.step, one.reason) == (Step.STOP, "turns")


@dataclass
class ContestantRun:
    """Decisions of a context window, with random answers."""

    steps: list[Step] = field(default_factory=list)
    """Answered calls and restarts."""
    calls: int = 0
    errors: int = 0


@st.composite
def sequences(draw: st.DrawFn) -> tuple[CodingOptions, Window, ContestantRun]:
    limits: dict[str, Any] = {
        "context": draw(st.sampled_from(["grow", "summary", "truncate"])),
        "max_turns": draw(st.integers(1, 12)),
    }
    if limits["context"] != "grow":
        limits |= {"summary_at_tokens": draw(st.integers(1, 100)), "max_summaries": draw(st.integers(1, 4))}
    config = CodingOptions(**limits)
    one, batch, left = Window(config), ContestantRun(), 0
    while one.step is not Step.STOP:
        before = one.step
        if before is Step.RESTART:
            one.restarted()
        elif draw(st.booleans()):
            batch.calls += 1
            one.replied(draw(st.integers(1, 200)))
            left = draw(st.integers(0, 3))  # how often its result could be halved
        else:
            batch.errors += 1
            left -= one.refused(can_shorten=left > 0)
            assert one.step is before or one.step in MOVES[before]
            continue
        batch.steps.append(before)
        assert one.step in MOVES[before]
    return config, one, batch


@given(sequences())
def test_whatever_the_sandbox_answers(lived: tuple[CodingOptions, Window, ContestantRun]) -> None:
    config, one, batch = lived
    assert batch.calls <= config.max_turns
    assert batch.errors <= 6 * config.max_turns + 4
    assert one.restarts == batch.steps.count(Step.RESTART) <= config.max_summaries
    assert one.reason == ("turns" if batch.calls == config.max_turns else "context")
    summaries = [place for place, step in enumerate(batch.steps) if step is Step.SUMMARISE]
    assert len(summaries) == (one.restarts if config.context == "summary" else 0)
    for place in summaries:
        assert batch.steps[place - 1] is Step.ACT, "a summary follows an action"
        assert batch.steps[place + 1] is Step.RESTART, "and a new context follows it"
    if config.context == "grow":
        assert set(batch.steps) <= {Step.ACT}


# --- What is in a context -----------------------------------------------------------------------------------------


def test_a_context_is_asked_behind_its_last_result() -> None:
    context = Context("fix it")
    assert context.ask() == [{"role": "user", "content": "fix it"}]
    context.acted("test", "FAIL")
    text = [{"role": "user", "content": "fix it"}, {"role": "assistant", "content": "test"}]
    assert context.ask() == [*text, {"role": "user", "content": "FAIL"}]
    assert context.ask("sum up") == [*text, {"role": "user", "content": "FAIL\nsum up"}]
    context.acted("read a", "1 x")
    assert context.ask()[: len(text)] == text
    assert context.ask()[-1]["content"] == "1 x"


def test_only_the_unseen_result_is_shortened() -> None:
    context = Context("a long task")
    assert not context.can_shorten
    context.acted("read a", "12345678")
    context.shorten()
    assert context.ask()[-1]["content"] == "1234\n[cut]"
    context.acted("test", "PASS")
    assert [message["content"] for message in context.ask()][2:] == ["1234\n[cut]", "test", "PASS"]


def test_a_truncated_context_shows_the_last_result_with_the_task() -> None:
    context = Context("task", "1 tax 42")
    assert context.ask() == [{"role": "user", "content": "task\n1 tax 42"}]
    context.shorten()
    assert context.ask() == [{"role": "user", "content": "task\n1 ta\n[cut]"}]


# --- What outlives it ---------------------------------------------------------------------------------------------


def test_items_are_numbered_for_good() -> None:
    todo = TodoList()
    assert [todo.add(text) for text in ("a", "b", "c")] == [1, 2, 3]
    assert todo.close(2)
    assert not todo.close(2)
    assert not todo.close(9)
    assert todo.add("d") == 4
    assert (todo.opened, todo.open_items) == (4, ((1, "a"), (3, "c"), (4, "d")))


def test_what_summaries_keep_is_counted_at_each_of_them() -> None:
    recall = Recall(("tax 42", "fee 7", "rate 19"))
    recall.show("1 tax 42\n2 cost 3")
    recall.summarise("tax 42")
    assert (recall.seen, recall.recalled) == (1, 1)
    recall.show("1 fee 7")
    recall.summarise("fee 7 and rate 19")
    assert (recall.seen, recall.recalled) == (3, 2), "tax is lost, and a value that was never shown does not count"


@pytest.mark.parametrize("text", ["tax 421", "surtax 42", "tax  42", "tax\n42", "tax_42", "TAX 42"])
def test_a_fact_is_kept_as_it_stands_or_not_at_all(text: str) -> None:
    recall = Recall(("tax 42",))
    recall.show("tax 42")
    recall.summarise(text)
    assert (recall.seen, recall.recalled) == (1, 0)


def test_facts_may_have_any_letters() -> None:
    recall = Recall(("a.b(c) = [1]",))
    recall.show("x a.b(c) = [1], y")
    recall.summarise("keep: a.b(c) = [1]")
    assert (recall.seen, recall.recalled) == (1, 1)
