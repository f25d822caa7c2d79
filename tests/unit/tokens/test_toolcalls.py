"""Tool-call grammars: which texts are calls, and which are only text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tokens.argument_values import read_object
from etude.tokens.grammars import DEEPSEEK, GRAMMARS, HERMES, KIMI, LLAMA, MISTRAL, QWEN_CODER, mentioned
from etude.tokens.messages import Tool
from etude.tokens.toolcalls import THINKING, Grammar, thinking_of
from etude.types import Json

SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "deep": {"type": "boolean"},
        "names": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "free": {},
    },
}
TOOLS = {"edit": Tool(name="edit", parameters=SCHEMA)}
DEEPSEEK_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n%s\n```<｜tool▁call▁end｜>"
DEEPSEEK_V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
KIMI_CALL = "<|tool_call_begin|>functions.edit:3<|tool_call_argument_begin|>%s<|tool_call_end|>"
FORMS = [
    (HERMES, '<tool_call>\n{"name": "edit", "arguments": %s}\n</tool_call>'),
    (LLAMA, '{"name": "edit", "parameters": %s}'),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "edit", "parameters": %s}'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "edit", "arguments": %s}'),
    (MISTRAL, "[TOOL_CALLS]edit[ARGS]%s"),
    (MISTRAL, "[TOOL_CALLS]edit%s"),
    (DEEPSEEK, DEEPSEEK_V3),
    (DEEPSEEK, DEEPSEEK_V31),
    (KIMI, KIMI_CALL),
]
WORDS = st.text(max_size=6)
LEAVES = st.none() | st.booleans() | st.integers() | WORDS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=4)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=3)


@pytest.mark.parametrize(("grammar", "form"), FORMS)
@settings(max_examples=20)
@given(value=OBJECTS, tight=st.booleans())
def test_arguments_keep_the_spelling_of_the_model(grammar: Grammar, form: str, value: object, tight: bool) -> None:
    spelt = json.dumps(value, separators=(",", ":")) if tight else json.dumps(value, indent=1)
    call = grammar.parse(form % spelt, TOOLS)
    assert call is not None
    assert (call.name, call.arguments) == ("edit", spelt)


@pytest.mark.parametrize(("grammar", "form"), FORMS)
@pytest.mark.parametrize("broken", ['{"a": ', "[1]", "{'a': 1}", '{"a": NaN}', "{} {}", '{"a": 1,}', "[" * 5000])
def test_broken_arguments_are_no_call(grammar: Grammar, form: str, broken: str) -> None:
    assert grammar.parse(form % broken, TOOLS) is None


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=50)
@given(text=st.text())
def test_no_text_breaks_a_parser(grammar: Grammar, text: str) -> None:
    for opening in (*grammar.openings, *grammar.starts):
        call = grammar.parse(opening + text + (*grammar.closings, "")[0], {})
        assert call is None or read_object(call.arguments) is not None


@settings(max_examples=50)
@given(OBJECTS, st.sampled_from(["", " ", "\n\t"]))
def test_an_object_is_read_with_the_spelling_of_its_members(value: dict[str, object], space: str) -> None:
    members = read_object(space + json.dumps(value, indent=2) + space)
    assert members is not None
    assert {name: spelling for name, (spelling, _) in members.items()} == value
    assert all(json.loads(spelling) == value[name] for name, (_, spelling) in members.items())


def test_arguments_inside_a_string_are_taken_out() -> None:
    call = HERMES.parse('<tool_call>{"name": "edit", "arguments": "{\\"line\\": 3}"}</tool_call>', TOOLS)
    assert call is not None
    assert call.arguments == '{"line": 3}'


def test_a_call_without_arguments_or_name_is_none() -> None:
    assert HERMES.parse('<tool_call>{"name": "edit"}</tool_call>', TOOLS) is None
    assert HERMES.parse('<tool_call>{"arguments": {}}</tool_call>', TOOLS) is None
    assert HERMES.parse('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', TOOLS) is None


def test_call_ids_come_from_grammars_that_have_them() -> None:
    kimi = KIMI.parse(KIMI_CALL % "{}", TOOLS)
    mistral = MISTRAL.parse("[TOOL_CALLS]edit[CALL_ID]a1b2c3d4e[ARGS]{}", TOOLS)
    listed = MISTRAL.parse('{"name": "edit", "arguments": {}, "id": "a1b2c3d4e"}', TOOLS)
    assert kimi is not None and mistral is not None and listed is not None
    assert (kimi.call_id, mistral.call_id, listed.call_id) == ("functions.edit:3", "a1b2c3d4e", "a1b2c3d4e")


def test_xml_parameters_are_typed_by_the_schema() -> None:
    values = {"path": "12", "line": "12", "deep": "true", "names": '["a"]', "maybe": "7", "free": "7", "other": "7"}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    call = QWEN_CODER.parse(f"<tool_call>\n<function=edit>\n{body}</function>\n</tool_call>", TOOLS)
    assert call is not None
    expected = {"path": "12", "line": 12, "deep": True, "names": ["a"], "maybe": "7", "free": 7, "other": "7"}
    assert json.loads(call.arguments) == expected


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: "</" not in text))
def test_an_xml_text_is_kept_as_it_is(text: str) -> None:
    call = QWEN_CODER.parse(
        f"<tool_call><function=edit><parameter=path>\n{text}\n</parameter></function></tool_call>", TOOLS
    )
    assert call is not None
    assert json.loads(call.arguments) == {"path": text}


def test_broken_xml_is_no_call() -> None:
    assert QWEN_CODER.parse("<tool_call><function=edit>words</function></tool_call>", TOOLS) is None
    assert QWEN_CODER.parse("<tool_call><parameter=a>1</parameter></tool_call>", TOOLS) is None


def test_a_template_may_mention_its_grammar() -> None:
    assert mentioned("<tool_call> <function=") is QWEN_CODER
    assert mentioned("{{ messages }}") is None
    assert thinking_of("split('</think>')") is THINKING[0]
    assert thinking_of("{{ messages }}") is None
