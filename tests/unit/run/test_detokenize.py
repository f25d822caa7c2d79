"""Slips are found in the words of any chat format, though each writes other things around them."""

from collections.abc import Iterator

import pytest

from chat_formats import FAMILIES, every_format
from etude.harnesses import tools
from etude.rewards.shaping.hints import TOOL_RULES, malformed_call_rewards, ruled
from etude.run.detokenize import tool_reader, turn_reader
from etude.tokens.messages import ChatFormat, ChatMessage
from etude.types import Turn
from records import make_turn

TEXT = ("open f.py", "read f.py", "edit f.py 9\nx", "submit")
ANSWERED = (tools.BAD_CALL, "1 bad call", tools.BAD_EDIT)


@pytest.fixture(scope="module")
def formats() -> dict[str, ChatFormat]:
    return every_format()


def session(chat: ChatFormat) -> Iterator[Turn]:
    """A conversation that grows by the sampled replies and the answers to them."""
    context = chat.open([ChatMessage(role="user", content="fix f in f.py")])
    for text, answered in zip(TEXT, (*ANSWERED, ""), strict=True):
        sampled = [*chat.encode(text), chat.stop_ids[0]]
        yield make_turn(context, sampled)
        reply = ChatMessage(role="assistant", content=text)
        context = [*context, *sampled, *chat.extend(reply, [ChatMessage(role="user", content=answered)])]


@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
def test_calls_that_were_turned_away_are_found_in_every_format(formats: dict[str, ChatFormat], family: str) -> None:
    chat = formats[family]
    spoken = turn_reader(chat)(list(session(chat)))
    assert [turn.text for turn in spoken] == list(TEXT)
    assert [turn.answered for turn in spoken] == [*ANSWERED, ""]
    assert malformed_call_rewards(spoken) == (-1.0, 0.0, -1.0, 0.0)
    assert [(hint.turn, hint.source) for hint in ruled(spoken, TOOL_RULES)] == [(0, "malformed call"), (2, "bad edit")]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_named_by_the_tool_that_it_called(formats: dict[str, ChatFormat], family: str) -> None:
    turns = list(session(formats[family]))
    assert tool_reader(formats[family], bare_shell=False)(turns) == ["", "read", "edit", "submit"]
    assert tool_reader(formats[family], bare_shell=True)(turns) == ["shell"] * 4
