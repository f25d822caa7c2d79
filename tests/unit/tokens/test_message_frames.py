"""A message's content is recovered exactly from the frame that a chat format writes around it."""

import pytest

from chat_formats import FAMILIES, every_format
from etude.tokens.message_frames import Frames
from etude.tokens.messages import ChatFormat, ChatMessage, ToolCall

CALL = ToolCall(call_id="abcdefghi", name="edit", arguments='{"line": 3}')
REPLY, CALLED = ChatMessage(role="assistant", content="read f.py"), ChatMessage(role="assistant", tool_calls=(CALL,))
CONTENTS = ("bad call", "1 def f(x):\n2     return x", "user\nassistant", "é")
"""None ends with a line break, which some templates trim."""


@pytest.fixture(scope="module")
def formats() -> dict[str, ChatFormat]:
    return every_format()


def heard(chat: ChatFormat, reply: ChatMessage, *messages: ChatMessage) -> str:
    return chat.decode(chat.extend(reply, messages))


@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
@pytest.mark.parametrize("content", CONTENTS)
def test_what_a_user_says_comes_out_as_it_went_in(formats: dict[str, ChatFormat], family: str, content: str) -> None:
    chat = formats[family]
    assert Frames(chat).content(heard(chat, REPLY, ChatMessage(role="user", content=content))) == content


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_tool_answers_comes_out_as_it_went_in(formats: dict[str, ChatFormat], family: str) -> None:
    """The answer has one line, since some templates write tools' answers as JSON."""
    chat = formats[family]
    answer = ChatMessage(role="tool", content="bad call", tool_call_id=CALL.call_id)
    assert Frames(chat).content(heard(chat, CALLED, answer)) == "bad call"


@pytest.mark.parametrize("family", FAMILIES)
def test_of_several_messages_the_first_is_where_the_text_begins(formats: dict[str, ChatFormat], family: str) -> None:
    chat = formats[family]
    text = heard(chat, REPLY, ChatMessage(role="user", content="bad call"), ChatMessage(role="user", content="sum up"))
    assert Frames(chat).content(text).startswith("bad call")


def test_text_in_no_known_frame_stays_as_it_is(formats: dict[str, ChatFormat]) -> None:
    assert Frames(formats["qwen"]).content("bad call") == "bad call"
    assert Frames(formats["ours"]).content("") == ""
