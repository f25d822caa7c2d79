"""Incremental reading of replies: independent of the division into tokens, nothing lost, exact stops."""

import gc
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from etude.tokens.chat import ChatTemplate
from etude.tokens.grammars import DEEPSEEK, GRAMMARS, HERMES, KIMI, LLAMA, MISTRAL
from etude.tokens.messages import CallDelta, ChatMessage, Delta, TextDelta, ThinkingDelta, Tool
from etude.tokens.reader import IncrementalReader, long_call_id, short_call_id
from etude.tokens.toolcalls import THINKING, Grammar, ReplyMarks
from etude.tokens.vocabulary import Spelling

CHAT = ChatTemplate.train(["return total </tool_call> <think> {}"] * 20, vocab_size=300)
SPELLING = Spelling(CHAT._tokenizer)
TOOLS = (Tool(name="edit"),)
THINKS = THINKING[0]
FORMS: list[tuple[Grammar, str, list[str]]] = [
    (
        HERMES,
        'Hi.\n<tool_call>\n{"name": "edit", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
        '<tool_call>{"name": "x", "arguments": {}}</tool_call>\n',
        ["edit", "x"],
    ),
    (LLAMA, '{"name": "edit", "parameters": {"a": "}"}}; {"name": "x", "parameters": {}}', ["edit", "x"]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "edit", "arguments": {"a": "]"}}, {"name": "x", "arguments": {}}]',
        ["edit", "x"],
    ),
    (MISTRAL, '[TOOL_CALLS]edit[ARGS]{"a": "\\"}"}[TOOL_CALLS]x[ARGS]{}', ["edit", "x"]),
    (
        DEEPSEEK,
        "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>x<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["edit", "x"],
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        ["edit"],
    ),
]
"""Replies with calls: (grammar, text, names of what is called)."""
WORDS = [
    *(text for _, text, _ in FORMS),
    *("<tool_call>", "</tool_call>", '{"name": "edit", "arguments": {"a": "</tool_call>"}}', "<think>", "</think>"),
    *("[TOOL_CALLS]", "edit[ARGS]{}", "[", "]", ",", ";", '{"name": "edit", "parameters": {}}', "functions.edit:0"),
    *("{}", '"', "\\", " ", "\n", "é", "🙂", "x", "END", "STOP"),
    *(mark for grammar in (DEEPSEEK, KIMI) for mark in grammar.marks),
]
REPLIES = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
STOPS = st.lists(
    st.sampled_from(["STOP", "OPE", "ND", "</tool_call>", "\n", "é", "name", "> "]), max_size=2, unique=True
)
MARKS = st.builds(
    lambda grammar, thinking, starts: ReplyMarks(grammar=grammar, thinking=thinking, starts_thinking=starts),
    st.none() | st.sampled_from(GRAMMARS),
    st.none() | st.just(THINKS),
    st.booleans(),
)


def reader(marks: ReplyMarks, *, stops: Sequence[str] = (), single_call: bool = False) -> IncrementalReader:
    ids = iter(range(1000))
    return IncrementalReader(
        SPELLING.stream(), marks, TOOLS, stops=stops, single_call=single_call, new_id=lambda: f"id{next(ids)}"
    )


def slices(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[first:last] for first, last in pairwise(bounds)]


def read(given_reader: IncrementalReader, feeds: Sequence[Sequence[int]]) -> list[Delta]:
    deltas = [delta for ids in feeds for delta in given_reader.feed(ids)]
    return deltas + given_reader.finish()


def joined(deltas: Sequence[Delta]) -> tuple[str, str, dict[int, list[str]]]:
    text, thought, calls = "", "", dict[int, list[str]]()
    for delta in deltas:
        match delta:
            case TextDelta(more):
                text += more
            case ThinkingDelta(more):
                thought += more
            case CallDelta(index, call_id, name, arguments):
                parts = calls.setdefault(index, ["", "", ""])
                calls[index] = [old + new for old, new in zip(parts, (call_id, name, arguments), strict=True)]
    return text, thought, calls


def message_of(text: str, marks: ReplyMarks) -> ChatMessage:
    one = reader(marks)
    read(one, [CHAT.encode(text)])
    return one.message()


@settings(max_examples=400)
@given(REPLIES, MARKS, STOPS, st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_a_reply_does_not_depend_on_how_its_tokens_came(
    text: str, marks: ReplyMarks, stops: list[str], single: bool, cuts: list[int]
) -> None:
    ids = [*CHAT.encode(text), CHAT.end_id]
    whole, cut, single_tokens = (reader(marks, stops=stops, single_call=single) for _ in range(3))
    expected = joined(read(whole, [ids]))
    for other, feeds in ((cut, slices(ids, cuts)), (single_tokens, [[token] for token in ids])):
        assert joined(read(other, feeds)) == expected
        assert other.message() == whole.message()
        assert (other.stopped_after, other.stop_text) == (whole.stopped_after, whole.stop_text)
    message = whole.message()
    calls = {index: [c.call_id, c.name, c.arguments] for index, c in enumerate(message.tool_calls)}
    assert expected == (message.content, message.thinking, calls)


@given(REPLIES, st.none() | st.sampled_from(GRAMMARS))
def test_what_is_no_call_is_text(text: str, grammar: Grammar | None) -> None:
    message = message_of(text, ReplyMarks(grammar=grammar))
    if not message.tool_calls:
        assert message.content == text
    rest = iter(text)
    assert all(character in rest for character in message.content), "text came out in another order than it went in"
    assert all(call.arguments in text for call in message.tool_calls)


@given(REPLIES)
def test_what_is_no_thought_is_text(text: str) -> None:
    message = message_of(text, ReplyMarks(thinking=THINKS))
    if text.lstrip().startswith("<think>"):
        thought, _, reply = text.lstrip().removeprefix("<think>").partition("</think>")
        assert (message.thinking.strip(), message.content) == (thought.strip(), reply.lstrip())
    else:
        assert (message.thinking, message.content) == ("", text)


@settings(max_examples=200)
@given(st.text(), st.lists(st.integers(0, 400), max_size=8))
def test_plain_text_comes_out_as_decoding_has_it(text: str, cuts: list[int]) -> None:
    ids = CHAT.encode(text)
    one = CHAT.reader()
    assert joined(read(one, slices(ids, cuts)))[0] == CHAT.decode(ids) == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 310)))
def test_any_ids_are_spelt_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    theirs = CHAT._tokenizer.decode([token for token in ids if token < CHAT.vocab_size], skip_special_tokens=True)
    one = CHAT.reader()
    assert joined(read(one, [[token] for token in ids]))[0] == theirs
    assert CHAT.decode(ids) == theirs


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_complete_stop_string_ends_a_reply(text: str, stops: list[str]) -> None:
    ids = CHAT.encode(text)
    one = CHAT.reader(stops=stops)
    read(one, [ids])
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (one.message().content, one.stopped_after) == (text, None)
        return
    end = min(ends)
    assert one.stop_text is not None and one.stopped_after is not None
    assert text[:end] == one.message().content + one.stop_text
    assert (
        len(CHAT.decode(ids[: one.stopped_after])) >= end > len(CHAT.decode(ids[: one.stopped_after - 1]).rstrip("�"))
    )


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    one = CHAT.reader(stops=["STOP"])
    assert one.feed(CHAT.encode("go ST")) == [TextDelta("go ")]
    assert one.feed(CHAT.encode("A")) == [TextDelta("STA")]
    assert one.feed(CHAT.encode("STOP and more")) == []
    assert one.feed(CHAT.encode("more")) == []
    assert (one.finish(), one.stop_text) == ([], "STOP")


@pytest.mark.parametrize(("grammar", "text", "names"), FORMS)
def test_parallel_calls_are_found_and_leave_no_marks_behind(grammar: Grammar, text: str, names: list[str]) -> None:
    message = message_of(text, ReplyMarks(grammar=grammar))
    assert [call.name for call in message.tool_calls] == names
    assert message.content in ("", "Hi.")
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)


@pytest.mark.parametrize(("grammar", "text", "names"), FORMS)
def test_a_single_call_ends_the_reply_with_its_last_token(grammar: Grammar, text: str, names: list[str]) -> None:
    ids = CHAT.encode(text)
    one = reader(ReplyMarks(grammar=grammar), single_call=True)
    read(one, [ids])
    assert [call.name for call in one.message().tool_calls] == names[:1]
    assert one.stopped_after is not None
    shorter, shortest = (reader(ReplyMarks(grammar=grammar)) for _ in range(2))
    read(shorter, [ids[: one.stopped_after]])
    for token in ids[: one.stopped_after - 1]:
        shortest.feed([token])
    assert len(shorter.message().tool_calls) == 1 and not shortest.message().tool_calls


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_broken_call_is_text(grammar: Grammar) -> None:
    opening = (*grammar.starts, *grammar.openings)[-1]
    text = f"{opening}edit: 1{(*grammar.closings, '')[0]} done"
    assert message_of(text, ReplyMarks(grammar=grammar)) == ChatMessage(role="assistant", content=text)


def test_a_call_cut_off_is_text_and_a_complete_one_needs_no_closing_mark() -> None:
    cut, whole = '<tool_call>{"name": "edit", "argu', '<tool_call>{"name": "edit", "arguments": {}}'
    assert message_of(cut, ReplyMarks(grammar=HERMES)).content == cut
    assert message_of(whole, ReplyMarks(grammar=HERMES)).tool_calls[0].name == "edit"


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "edit", "arguments": {}}</tool_call>'
    one = CHAT.reader()
    read(one, [CHAT.encode(text)])
    assert one.message().content == text


def test_calls_open_only_at_the_start_where_the_grammar_says_so() -> None:
    text = 'So: {"name": "edit", "parameters": {}}'
    assert message_of(text, ReplyMarks(grammar=LLAMA)).content == text


def test_thoughts_come_before_the_answer() -> None:
    marks = ReplyMarks(grammar=HERMES, thinking=THINKS)
    message = message_of("\n<think>\nhm <tool_call>\n</think>\n\nYes <think>no</think>", marks)
    assert (message.thinking, message.content) == ("hm <tool_call>", "Yes <think>no</think>")


def test_a_prompt_may_have_opened_the_thoughts() -> None:
    marks = ReplyMarks(thinking=THINKS, starts_thinking=True)
    assert message_of("hm\n</think>\n\nYes", marks) == ChatMessage(role="assistant", thinking="hm", content="Yes")
    assert message_of("hm, cut", marks).thinking == "hm, cut"


def test_thoughts_are_delivered_while_they_come() -> None:
    one = reader(ReplyMarks(thinking=THINKS, starts_thinking=True))
    assert one.feed(CHAT.encode("I wonder ")) == [ThinkingDelta("I wonder")]
    assert one.feed(CHAT.encode("if</thi")) == [ThinkingDelta(" if")]
    assert one.feed(CHAT.encode("nk>")) == []
    assert one.feed(CHAT.encode(" No.")) == [TextDelta("No.")]


def test_call_ids_have_the_form_that_clients_expect() -> None:
    assert len(long_call_id()) == len("call_") + 24
    assert len(short_call_id()) == 9 and short_call_id().isalnum()
    one = IncrementalReader(SPELLING.stream(), ReplyMarks(grammar=MISTRAL), TOOLS)
    read(one, [CHAT.encode("[TOOL_CALLS]edit[ARGS]{}")])
    assert len(one.message().tool_calls[0].call_id) == 9


def test_a_reply_leaves_nothing_to_the_garbage_collector() -> None:
    ids = CHAT.encode("a reply without calls")
    gc.collect()
    read(reader(ReplyMarks(grammar=HERMES)), [ids])
    assert gc.collect() == 0  # no cycle: a gateway collects rarely


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        CHAT.reader(stops=[""])


def metaspace() -> Tokenizer:
    """Llama 2's kind of tokenizer: marks for spaces, bytes for what no token covers."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁a", "b", "▁▁"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@given(st.lists(st.sampled_from([257, 258, 259, 260]) | st.sampled_from("é🙂x").map(lambda c: -ord(c)), max_size=10))
def test_metaspace_spaces_and_bytes(parts: list[int]) -> None:
    tokenizer = metaspace()
    ids = [token for part in parts for token in ([part] if part > 0 else [1 + byte for byte in chr(-part).encode()])]
    spelling = Spelling(tokenizer)
    stream = spelling.stream()
    text = "".join(stream.feed([token]) for token in ids) + stream.finish()
    assert text == spelling.decode(ids) == tokenizer.decode(ids)
