"""The texts of self-summaries, to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.harnesses.summaries import KeptState, Summary, ask_for_summary, open_again, open_truncated, read_summary


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ("looked at p1\nsummary\ntax 42\nnext p2", Summary(scratch="looked at p1", text="tax 42\nnext p2")),
        ("summary\ntax 42", Summary(scratch="", text="tax 42")),
        ("a\n summary \nb\nsummary\nc", Summary(scratch="a", text="b\nsummary\nc")),
        ("tax 42", Summary(scratch="", text="tax 42")),
        ("a summary\nof it", Summary(scratch="", text="a summary\nof it")),
        ("thoughts that were cut before the summ", Summary(scratch="", text="thoughts that were cut before the summ")),
        ("thoughts\nsummary", Summary(scratch="thoughts", text="")),
        ("summary", Summary(scratch="", text="")),
        ("", Summary(scratch="", text="")),
    ],
)
def test_a_reply_is_split_at_its_first_heading(reply: str, summary: Summary) -> None:
    assert read_summary(reply) == summary


@given(st.text(), st.text())
def test_any_text_behind_a_heading_comes_through(scratch: str, text: str) -> None:
    assert read_summary(f"summary\n{text}").text == text.strip()
    assert read_summary(f"{scratch}\nsummary\n{text}").text.endswith(text.strip())


def test_the_request_stands_behind_the_result() -> None:
    assert ask_for_summary("PASS", "summarise") == "PASS\nsummarise"
    assert ask_for_summary("", "summarise") == "summarise"


def test_a_context_begins_with_task_open_items_and_summary() -> None:
    stored = KeptState(summaries=2, open_items=((1, "read p3"), (4, "answer")))
    assert open_again("give tax", "tax 42", stored) == "give tax\ntodo 1 read p3\ntodo 4 answer\nsummary 2\ntax 42"
    assert open_again("give tax", "", KeptState(summaries=1)) == "give tax\nsummary 1\n"


def test_a_truncated_context_begins_with_task_and_last_result() -> None:
    assert open_truncated("give tax", "1 tax 42") == "give tax\n1 tax 42"
