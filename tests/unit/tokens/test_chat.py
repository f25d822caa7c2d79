"""The chat template: exact, extendable, and closed to forged turns."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.tokens.chat import SPECIAL_TOKENS, ChatTemplate, described
from etude.tokens.messages import ChatMessage, Tool, ToolCall

TEXTS = [
    "def f(a, b):\n    return a + b\n",
    "edit util.py 3\n    return max(xs)",
    "read core.py",
    "PASS",
    "FAIL f(1) = 2",
]
CHAT = ChatTemplate.train(TEXTS * 20, vocab_size=330)


@settings(max_examples=200)
@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert CHAT.decode(CHAT.encode(text)) == text


@given(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=10))
def test_text_cannot_forge_a_special_token(token: str, text: str) -> None:
    special = set(range(len(SPECIAL_TOKENS)))
    assert not special & set(CHAT.encode(text + token + text))


def test_a_message_is_role_content_end() -> None:
    ids = CHAT.render_message("user", "read core.py")
    assert ids[-1] == CHAT.end_id
    assert ids[0] != CHAT.generation_prompt()[0]
    assert CHAT.decode(ids) == "read core.py"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="'tool'"):
        CHAT.render_message("tool", "x")


def test_saved_and_loaded_it_encodes_the_same(tmp_path: Path) -> None:
    CHAT.save(tmp_path)
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.encode(TEXTS[0]) == CHAT.encode(TEXTS[0])
    assert loaded.vocab_size == CHAT.vocab_size


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DamagedError, match="tokenizer"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ('"<|pad|>": 0', f'"<|pad|>": {1 << 28}', "id is 268435456: expected a whole number below 4194304"),
        ('"id": 0', f'"id": {1 << 40}', "id is 1099511627776"),
        ('"id": 0', '"id": -1', "id is -1"),
        ('"continuing_subword_prefix": null', '"continuing_subword_prefix": "#"', "without continuing_subword_prefix"),
        ('"model": {', '"model": {"vocab": {}, ', "twice"),
        ('"model": {', '"modal": {', "no object named model"),
    ],
)
def test_a_tokenizer_that_its_library_would_die_of_is_named(tmp_path: Path, part: str, change: str, words: str) -> None:
    CHAT.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = json.dumps(json.loads(file.read_text()))
    assert part in text
    file.write_text(text.replace(part, change))
    with pytest.raises(DamagedError, match=f"{file} .*{words}"):
        ChatTemplate.load(tmp_path)


def test_texts_are_encoded_whole_whatever_the_file_says(tmp_path: Path) -> None:
    CHAT.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
    pad: dict[str, Any] = {"strategy": {"Fixed": 1 << 30}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut, "padding": pad}))
    assert ChatTemplate.load(tmp_path).encode(TEXTS[0]) == CHAT.encode(TEXTS[0])


TOOL = Tool(name="read", description="Show a file's lines", parameters={"type": "object"})
CALL = ToolCall(call_id="call_1", name="read", arguments='{"path":"a.py"}')
CALLED = ChatMessage(role="assistant", content="Let me see.", tool_calls=(CALL, CALL))
CONVERSATION = [
    ChatMessage(role="system", content="fix it"),
    ChatMessage(role="user", content="go"),
    CALLED,
    ChatMessage(role="tool", content="PASS", tool_call_id="call_1"),
]


@pytest.mark.parametrize("tools", [(), (TOOL, TOOL)])
def test_conversations_with_tools_equal_the_exported_template(tmp_path: Path, tools: tuple[Tool, ...]) -> None:
    CHAT.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    function = {"name": "read", "arguments": CALL.arguments}
    messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in CONVERSATION]
    messages[2]["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}] * 2
    rendered = theirs.apply_chat_template(
        messages, tools=[described(tool) for tool in tools] or None, add_generation_prompt=True, return_dict=False
    )
    assert list(rendered) == CHAT.open(CONVERSATION, tools)


def test_a_conversation_is_its_messages_and_the_opening_of_a_reply() -> None:
    plain = CONVERSATION[:2]
    rendered = [token for message in plain for token in CHAT.render_message(message.role, message.content)]
    assert CHAT.open(plain) == rendered + CHAT.generation_prompt()
    assert CHAT.open([ChatMessage(role="tool", content="x")]) == CHAT.open([ChatMessage(role="user", content="x")])


def test_an_extension_continues_what_was_sampled() -> None:
    text = "Let me see." + 2 * '<tool_call>{"name": "read", "arguments": {"path":"a.py"}}</tool_call>'
    sampled = [*CHAT.encode(text), CHAT.end_id]
    reader = CHAT.reader([TOOL])
    reader.feed(sampled)
    reader.finish()
    reply = reader.message()
    assert (reply.content, [call.name for call in reply.tool_calls]) == ("Let me see.", ["read", "read"])
    first, later = CONVERSATION[:2], CONVERSATION[3:]
    grown = [*CHAT.open(first, [TOOL]), *sampled, *CHAT.extend(reply, later, [TOOL])]
    assert grown == CHAT.open([*first, reply, *later], [TOOL])
    assert CHAT.stop_ids == (CHAT.end_id,)
