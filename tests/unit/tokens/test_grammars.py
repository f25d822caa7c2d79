"""Every grammar: detected from its template's calls, which are parsed correctly for any division into tokens."""

import json
from datetime import datetime
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_formats import make_jinja
from etude.tokens.chat import ChatTemplate
from etude.tokens.grammar_detection import NAME, SIMPLE, TOOL, find_grammar
from etude.tokens.grammars import GRAMMARS, HERMES, MISTRAL, PYTHONIC, QWEN_CODER
from etude.tokens.messages import ChatMessage, Tool
from etude.tokens.reader import IncrementalReader
from etude.tokens.templates import JinjaTemplate
from etude.tokens.toolcalls import ReplyMarks
from etude.tokens.vocabulary import Spelling
from etude.types import Json

OBJECT = '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
COMMA = "{{ ', ' if not loop.last }}"
JSON_OR_TEXT = "{{ v if v is string else v | tojson }}"


def each(call: str, before: str = "", behind: str = "") -> str:
    """A template's calls: ``call`` for each, ``before`` and ``behind`` around them all."""
    return before + "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% endfor %}" + behind


def parameters(parameter: str, separator: str = "") -> str:
    """A template's parameters: ``k``, ``v``."""
    comma = "{{ '" + separator + "' if not loop.last }}" if separator else ""
    return "{% for k, v in f.arguments.items() %}" + parameter + comma + "{% endfor %}"


def tagged(call: str, opening: str, closing: str, end: str) -> str:
    """A call between tags."""
    return call + parameters(opening + JSON_OR_TEXT + closing) + end


GEMMA_VALUE = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{% raw %}{{% endraw %}'
    "{% for k, w in v.items() %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}{% raw %}}{% endraw %}"
    "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
NESTED_VALUE = (
    "{% set M = ']<]minimax[>[' %}{% macro value(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}"
    "{% for k, w in v.items() %}{{ M }}<{{ k }}>{{ value(w) }}{{ M }}</{{ k }}>{% endfor %}{% elif v is iterable %}"
    "{% for w in v %}{{ M }}<item>{{ value(w) }}{{ M }}</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
)
CALLS: dict[str, str] = {
    "hermes": each(f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen-coder": each(
        tagged(
            "\n<tool_call>\n<function={{ f.name }}>\n",
            "<parameter={{ k }}>\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        )
    ),
    "seed": each(
        tagged(
            "<seed:tool_call>\n<function={{ f.name }}>\n",
            "<parameter={{ k }}>",
            "</parameter>\n",
            "</function>\n</seed:tool_call>",
        )
    ),
    "functionary": each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "glm": each(
        tagged(
            "\n<tool_call>{{ f.name }}\n",
            "<arg_key>{{ k }}</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
        )
    ),
    "hunyuan-3": each(
        tagged(
            "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n",
            "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
            "</tool_call:opensource>\n",
        ),
        "<tool_calls:opensource>\n",
        "</tool_calls:opensource>",
    ),
    "minimax": each(
        tagged('<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">', "</parameter>\n", "</invoke>\n"),
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "minimax-3": NESTED_VALUE
    + each(
        '{{ M }}<invoke name="{{ f.name }}">{{ value(f.arguments) }}{{ M }}</invoke>\n',
        "{{ M }}<tool_call>\n",
        "{{ M }}</tool_call>",
    ),
    "atem": each(
        tagged(
            '<atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n',
            '<atem:parameter name="{{ k }}">',
            "</atem:parameter>\n",
            "</atem:invoke>\n</atem:function_calls>",
        )
    ),
    "dsml": each(
        tagged(
            '<｜DSML｜invoke name="{{ f.name }}">\n',
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ),
        "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>",
    ),
    "minicpm": each(
        '<function name="{{ f.name }}">'
        + parameters('<param name="{{ k }}">{{ "<![CDATA[" ~ v ~ "]]>" if v is string else v }}</param>')
        + "</function>"
    ),
    "function-gemma": each(
        "<start_function_call>call:{{ f.name }}{% raw %}{{% endraw %}"
        + parameters("{{ k }}:<escape>{{ v }}<escape>", ",")
        + "}<end_function_call>"
    ),
    "gemma": GEMMA_VALUE + each("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"),
    "kimi-3": each(
        tagged(
            '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>',
            '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "object" }}"<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
        ),
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "kimi": each(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek": each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n"
        "```<｜tool▁call▁end｜>\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "solar": each(
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}"
        "<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    "harmony": each(
        "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
    ),
    "mistral": each(OBJECT.replace("{", '{"id": "{{ c.id }}", ', 1) + COMMA, "[TOOL_CALLS][", "]"),
    "apertus": each(
        "{ {{- f.name | tojson }}: {{ f.arguments | tojson }}}" + COMMA, "<|tools_prefix|>[", "]<|tools_suffix|>"
    ),
    "cohere": each(
        '{"tool_call_id": "0", "tool_name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}' + COMMA,
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
    ),
    "listed": each(OBJECT + "\n", "<tool_calls>\n", "</tool_calls>"),
    "internlm": each(f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>"),
    "gigachat": each(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}"),
    "lfm": each(
        "{{ f.name }}(" + parameters("{{ k }}={{ v | tojson }}", ", ") + ")" + COMMA,
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
    ),
    "llama": each(
        '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}{{ "; " if not loop.last }}'
    ),
    "xlam": each(OBJECT + COMMA, "[", "]"),
    "phi": each(OBJECT + COMMA, "functools[", "]"),
    "pythonic": each("{{ f.name }}(" + parameters("{{ k }}={{ v | tojson }}", ", ") + ")" + COMMA, "[", "]"),
}
"""Grammar → how a template that has it writes calls."""
ALONE = ("llama", "xlam", "phi", "pythonic")
"""Grammars whose templates leave out the text before a call."""
CHAT = ChatTemplate.train(["a"], vocab_size=300)
SPELLING = Spelling(CHAT._tokenizer)
GRAMMAR = {grammar.name: grammar for grammar in GRAMMARS}
USER = ChatMessage(role="user", content="hi")
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]"), max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS | st.sampled_from(['say "hi"', "it's", "a\nb", "f(x, y=1)", '{"a": 1}', "\\n", "12", "true"]),
        "days": st.integers(),
        "share": st.floats(0.25, 8, width=16),
        "deep": st.booleans(),
        "names": st.lists(WORDS.filter(bool), min_size=1, max_size=3),
        "parts": st.fixed_dictionaries(
            {"a": st.lists(st.integers(), min_size=1, max_size=2), "c": st.just({"b": "r"})}
        ),
    },
)


@cache
def source_of(name: str) -> str:
    text = "" if name in ALONE else "{{ m.content }}"
    reply = "{% if m.tool_calls %}" + text + CALLS[name] + "{% else %}{{ m.content }}{% endif %}"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + reply + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@cache
def template_of(name: str) -> JinjaTemplate:
    return JinjaTemplate(source_of(name), {}, lambda: datetime(2026, 7, 1))


def written(name: str, arguments: list[dict[str, Json]], text: str = "") -> str:
    """A reply as a template renders it."""
    calls: list[Json] = [
        {"id": f"functions.{NAME}:{index}", "function": {"name": NAME, "arguments": one}}
        for index, one in enumerate(arguments)
    ]
    message: Json = {"role": "assistant", "content": text, "tool_calls": calls}
    rendered = template_of(name).render([message], opening=False)
    return rendered.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def read(name: str, text: str, *, step: int, tool: Tool = TOOL) -> ChatMessage:
    marks = ReplyMarks(grammar=GRAMMAR[name], thinking=GRAMMAR[name].thinking)
    ids, serial = CHAT.encode(text), iter(range(99))
    reader = IncrementalReader(SPELLING.stream(), marks, [tool], new_id=lambda: f"id{next(serial)}")
    for at in range(0, len(ids), step):
        reader.feed(ids[at : at + step])
    reader.finish()
    return reader.message()


@pytest.mark.parametrize("name", GRAMMAR)
def test_a_template_is_known_by_the_calls_it_writes(name: str) -> None:
    chat = make_jinja(source_of(name), "<|im_end|>")
    assert chat.calls.problem == ""
    assert chat.calls.grammar == GRAMMAR[name]
    assert chat.calls.is_read


@pytest.mark.parametrize("name", GRAMMAR)
@settings(max_examples=25, deadline=None)
@given(first=ARGUMENTS, others=st.lists(ARGUMENTS, max_size=1), reply=st.sampled_from(["", "Let me look: 1 < 2."]))
def test_what_a_template_writes_is_read_back_however_it_is_cut(
    name: str, first: dict[str, Json], others: list[dict[str, Json]], reply: str
) -> None:
    arguments = [first, *others]
    reply = "" if name in ALONE else reply
    text = written(name, arguments, reply)
    message = read(name, text, step=len(text) or 1)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        (NAME, one) for one in arguments
    ]
    assert message.content == reply
    assert read(name, text, step=1) == message
    for cut in range(0, len(text), 1 + len(text) // 8):  # a reply that was cut says nothing that the whole did not say
        part = read(name, text[:cut], step=7)
        for call, whole in zip(part.tool_calls, message.tool_calls, strict=False):
            assert (call.name, call.arguments) == (whole.name, whole.arguments)


@pytest.mark.parametrize("name", GRAMMAR)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_mixture_of_marks_breaks_a_reply(name: str, data: st.DataObject) -> None:
    marks = [
        *GRAMMAR[name].marks,
        written(name, [{"city": "x", "days": 3}]),
        '"',
        "\\",
        "'",
        "(",
        ")",
        "{",
        "}",
        "x",
        "\n",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=12)))
    message = read(name, text, step=len(text) or 1)
    assert read(name, text, step=1) == message
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)


def test_a_template_of_which_nothing_is_read_says_so() -> None:
    source = source_of("hermes").replace("<tool_call>", "@call ").replace("</tool_call>", "@")
    calls = make_jinja(source, "<|im_end|>").calls
    assert calls.is_lost and "no grammar reads" in calls.problem
    assert not make_jinja("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "<|im_end|>").calls.is_lost


def test_a_template_of_which_a_part_differs_names_it() -> None:
    calls = make_jinja(source_of("pythonic").replace("{{ v | tojson }}", "{{ v }}"), "<|im_end|>").calls
    assert calls.grammar == PYTHONIC and not calls.is_read
    assert SIMPLE in calls.problem and "a number;" not in calls.problem


def test_a_template_without_calls_is_read_by_what_it_mentions() -> None:
    calls = find_grammar(lambda messages, tools, opening: "", "say <tool_call>", None)
    assert (calls.grammar, calls.rendered) == (HERMES, ())
    assert "mentions" in calls.problem


CITY = Tool(name="weather", parameters={"properties": {"city": {"type": "string"}, "state": {"type": "string"}}})


@pytest.mark.parametrize("opening", ["<tool_call>\n", ""])
@pytest.mark.parametrize("closing", ["</parameter>\n", ""])
def test_qwen_coder_may_leave_out_an_opening_and_the_end_of_a_parameter(opening: str, closing: str) -> None:
    text = (
        f"Let me see.\n{opening}<function=weather>\n<parameter=city>\nDallas\n{closing}"
        "<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>"
    )
    message = read("qwen-coder", text, step=1, tool=CITY)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": "Dallas", "state": "TX"}]
    assert message.content == "Let me see."


def test_qwen_coder_keeps_a_value_that_mentions_a_parameter_in_a_line() -> None:
    text = "<function=weather><parameter=city>\nwrite <parameter=x> so\n</parameter></function>"
    call = QWEN_CODER.parse(text, {"weather": CITY})
    assert call is not None and json.loads(call.arguments) == {"city": "write <parameter=x> so"}


def test_a_cut_call_between_tags_is_text() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nDal"
    assert read("qwen-coder", text, step=1, tool=CITY) == ChatMessage(role="assistant", content=text)


def test_mistral_may_repeat_its_mark() -> None:
    text = '[TOOL_CALLS] [TOOL_CALLS] [{"name": "weather", "arguments": {}}]'
    assert MISTRAL.parse(text.removesuffix("]"), {}) is not None
    assert [call.name for call in read("mistral", text, step=1).tool_calls] == ["weather"]


def test_python_values_of_tags_become_json() -> None:
    text = written("qwen-coder", [{"city": "True"}]).replace("city", "deep")
    assert [json.loads(call.arguments) for call in read("qwen-coder", text, step=3).tool_calls] == [{"deep": True}]


def test_channels_around_text_say_nothing() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.probe_tool <|constrain|>json"
        '<|message|>{"days": 1}<|call|>'
    )
    message = read("harmony", text, step=1)
    assert (message.thinking, message.content) == ("Hm.", "Wait.")
    assert [call.arguments for call in message.tool_calls] == ['{"days": 1}']


@pytest.mark.parametrize(
    ("command", "value"),
    [
        (r"'it\'s'", "it's"),
        ("'sed -n '3,4p' f.py'", "sed -n '3,4p' f.py"),
        ('"a\\n\\x41\\U0001f642"', "a\nA🙂"),
    ],
)
def test_python_strings_may_hold_quotes(command: str, value: str) -> None:
    text = f"[probe_tool(city={command}, days=3), probe_tool()]"
    message = read("pythonic", text, step=1)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": value, "days": 3}, {}]


@pytest.mark.parametrize("broken", ["city='x", "city=f(1)", "city=07", "city=" + "[" * 500, "3", "city="])
def test_what_is_no_literal_is_no_call(broken: str) -> None:
    text = f"[probe_tool({broken})]"
    assert read("pythonic", text, step=1) == ChatMessage(role="assistant", content=text)
