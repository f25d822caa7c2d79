"""The table of tool-call grammars, as data.

Each docstring shows the output of a model and names the model families. If two grammars can parse the same text, the
stricter one is first in ``GRAMMARS``. Owns the table; :class:`~etude.tokens.toolcalls.Grammar` and
:mod:`etude.tokens.call_syntax` define its columns.
"""

from string import ascii_letters

from etude.tokens.call_syntax import EitherCall, GemmaCall, HeadedCall, JsonCall, NestedCall, PythonCall, TaggedCall
from etude.tokens.toolcalls import Grammar, Thinking

IDENTIFIER = tuple(ascii_letters + "_")
"""Beginnings of a name."""
OBJECT = ('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"')
"""Beginnings of a call that is an object."""

HERMES = Grammar(
    name="hermes",
    sign="<tool_call>",
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    form=JsonCall(),
)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen2.5, Qwen3, Granite 4, étude's own format."""
QWEN_CODER = Grammar(
    name="qwen-coder",
    sign="<function=",
    openings=("<tool_call>",),
    starts=("<function=",),
    closings=("</function>", "</tool_call>"),
    between=("</tool_call>",),
    form=TaggedCall(call="<function=NAME>", parameter="<parameter=KEY>", end="</parameter>", trims=True, recovers=True),
)
"""``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5, Nemotron 3."""
SEED = Grammar(
    name="seed",
    openings=("<seed:tool_call>",),
    closings=("</function>", "</seed:tool_call>"),
    between=("</seed:tool_call>",),
    again=("<function=",),
    form=TaggedCall(call="<function=NAME>", parameter="<parameter=KEY>", end="</parameter>", recovers=True),
)
"""The same inside of ``<seed:tool_call>``: Seed-OSS."""
FUNCTIONARY = Grammar(
    name="functionary",
    starts=("<function=",),
    closings=("</function>",),
    form=HeadedCall(patterns=("<function=NAME>ARGUMENTS",)),
)
"""``<function=name>{…}</function>``: functionary v3.1."""
GLM = Grammar(
    name="glm",
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    form=TaggedCall(call="NAME", parameter="<arg_key>KEY</arg_key> <arg_value>", end="</arg_value>"),
)
"""``<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>``: GLM-4.5 and later, Ling 3, Laguna."""
HUNYUAN_3 = Grammar(
    name="hunyuan-3",
    openings=("<tool_calls:opensource>", "<tool_call:opensource>"),
    closings=("</tool_call:opensource>",),
    between=("</tool_calls:opensource>",),
    inside=("<tool_sep:opensource>",),
    form=TaggedCall(
        call="NAME<tool_sep:opensource>",
        parameter="<arg_key:opensource>KEY</arg_key:opensource> <arg_value:opensource>",
        end="</arg_value:opensource>",
    ),
)
"""GLM's, with a suffix: Hunyuan 3."""
MINIMAX = Grammar(
    name="minimax",
    openings=("<minimax:tool_call>",),
    again=("<invoke name=",),
    closings=("</invoke>", "</minimax:tool_call>"),
    between=("</minimax:tool_call>",),
    form=TaggedCall(call='<invoke name="NAME">', parameter='<parameter name="KEY">', end="</parameter>"),
)
"""``<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke>…``: MiniMax M2."""
MINIMAX_3 = Grammar(
    name="minimax-3",
    openings=("]<]minimax[>[<tool_call>",),
    again=("]<]minimax[>[<invoke",),
    closings=("]<]minimax[>[</invoke>", "]<]minimax[>[</tool_call>"),
    between=("]<]minimax[>[</tool_call>",),
    inside=("]<]minimax[>[",),
    form=NestedCall(call=']<]minimax[>[<invoke name="NAME">', mark="]<]minimax[>["),
)
"""``<invoke name="…"><city>…</city></invoke>`` with a mark before each tag: MiniMax M3."""
ATEM = Grammar(
    name="atem",
    openings=("<atem:function_calls>",),
    again=("<atem:invoke name=",),
    closings=("</atem:invoke>", "</atem:function_calls>"),
    between=("</atem:function_calls>",),
    form=TaggedCall(call='<atem:invoke name="NAME">', parameter='<atem:parameter name="KEY">', end="</atem:parameter>"),
)
"""MiniMax M2's, under another name: Muse."""
DSML = Grammar(
    name="dsml",
    openings=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    again=("<｜DSML｜invoke name=",),
    closings=("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    between=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    form=TaggedCall(
        call='<｜DSML｜invoke name="NAME">',
        parameter='<｜DSML｜parameter name="KEY" string="KIND">',
        end="</｜DSML｜parameter>",
    ),
)
"""MiniMax M2's with types: DeepSeek V3.2 and V4."""
MINICPM = Grammar(
    name="minicpm",
    starts=("<function name=",),
    closings=("</function>",),
    form=TaggedCall(
        call='<function name="NAME">',
        parameter='<param name="KEY">',
        end="</param>",
        verbatim=("<![CDATA[", "]]>"),
    ),
)
"""``<function name="…"><param name="…">…</param></function>``: MiniCPM 5."""
FUNCTION_GEMMA = Grammar(
    name="function-gemma",
    openings=("<start_function_call>",),
    closings=("}<end_function_call>", "<end_function_call>"),
    inside=("<escape>",),
    form=TaggedCall(call="call:NAME{", parameter="KEY:<escape>", end="<escape>", separator=","),
)
"""``<start_function_call>call:name{key:<escape>…<escape>}<end_function_call>``: FunctionGemma."""
GEMMA = Grammar(
    name="gemma",
    openings=("<|tool_call>",),
    closings=("<tool_call|>",),
    inside=('<|"|>',),
    form=GemmaCall(),
)
"""``<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>``: Gemma 4."""
KIMI_3 = Grammar(
    name="kimi-3",
    openings=("<|open|>tools<|sep|>",),
    again=("<|open|>call",),
    closings=("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
    between=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
    framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    form=TaggedCall(
        call='<|open|>call tool="NAME" index="ANY"<|sep|>',
        parameter='<|open|>argument key="KEY" type="KIND"<|sep|>',
        end="<|close|>argument<|sep|>",
    ),
)
"""``<|open|>call tool="…"<|sep|>…<|close|>call<|sep|>``, and the same around text and thoughts: Kimi K3."""
KIMI = Grammar(
    name="kimi",
    sign="<|tool_call_argument_begin|>",
    openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    closings=("<|tool_call_end|>",),
    between=("<|tool_calls_section_end|>",),
    inside=("<|tool_call_argument_begin|>",),
    form=HeadedCall(patterns=("ID <|tool_call_argument_begin|>ARGUMENTS",)),
)
"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section: Kimi K2."""
DEEPSEEK = Grammar(
    name="deepseek",
    sign="<｜tool▁call▁begin｜>",
    openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    closings=("<｜tool▁call▁end｜>",),
    between=("<｜tool▁calls▁end｜>",),
    inside=("<｜tool▁sep｜>",),
    form=HeadedCall(patterns=("function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```", "NAME<｜tool▁sep｜>ARGUMENTS")),
)
"""``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`` in a section; V3 and R1 name a type and fence their
JSON, V3.1 does not.
"""
SOLAR = Grammar(
    name="solar",
    openings=("<|tool_calls|>", "<|tool_call:begin|>"),
    closings=("<|tool_call:end|>",),
    inside=("<|tool_call:name|>", "<|tool_call:args|>"),
    framing=("<|content|>",),
    form=HeadedCall(patterns=("ID<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS",)),
)
"""``<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>``: Solar Open."""
HARMONY = Grammar(
    name="harmony",
    starts=("<|start|>assistant to=functions.", "<|channel|>commentary to=functions.", "to=functions."),
    inside=("<|constrain|>", "<|message|>", "<|end|>"),
    between=("<|call|>",),
    framing=(
        *("<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant<|channel|>commentary<|message|>"),
        *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|start|>assistant", "<|end|>"),
    ),
    form=HeadedCall(patterns=("ANY to=functions.NAME ANY<|message|>ARGUMENTS",)),
    thinking=Thinking(opening="<|channel|>analysis<|message|>", closing="<|end|>"),
)
"""``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>``: gpt-oss."""
MISTRAL = Grammar(
    name="mistral",
    sign="[TOOL_CALLS]",
    openings=("[TOOL_CALLS]",),
    again=("{",),
    between=(",", "]"),
    inside=("[CALL_ID]", "[ARGS]"),
    short_ids=True,
    form=EitherCall(
        forms=(
            JsonCall(listed=True),
            HeadedCall(patterns=("NAME [CALL_ID] ID [ARGS] ARGUMENTS", "NAME [ARGS] ARGUMENTS", "NAME ARGUMENTS")),
        )
    ),
)
"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` since version 11; an id came later
and went again, and some checkpoints leave ``[ARGS]`` out.
"""
APERTUS = Grammar(
    name="apertus",
    openings=("<|tools_prefix|>",),
    again=("{",),
    between=(",", "]", "<|tools_suffix|>"),
    form=JsonCall(name="", listed=True),
)
"""``<|tools_prefix|>[{"name": {…}}]<|tools_suffix|>``: Apertus."""
COHERE = Grammar(
    name="cohere",
    sign="<|START_ACTION|>",
    openings=("<|START_ACTION|>",),
    again=("{",),
    between=(",", "]", "<|END_ACTION|>"),
    framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    thinking=Thinking(opening="<|START_THINKING|>", closing="<|END_THINKING|>"),
    form=JsonCall(name="tool_name", arguments=("parameters",), call_id="tool_call_id", listed=True),
)
"""``<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]<|END_ACTION|>``: Command R7B and later."""
LISTED = Grammar(
    name="listed",
    openings=("<tool_calls>", "<TOOLCALL>", "<|tool_call|>", "<function_call>"),
    again=("{",),
    between=(",", "]", "</tool_calls>", "</TOOLCALL>"),
    form=JsonCall(listed=True),
)
"""``<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`` and kin: MiniMax M1, Apriel, Hunyuan, Nemotron v2,
Granite 3.
"""
INTERNLM = Grammar(
    name="internlm",
    openings=("<|action_start|>", "<|plugin|>"),
    between=("<|action_end|>",),
    form=JsonCall(arguments=("arguments", "parameters")),
)
"""``<|action_start|><|plugin|>{"name": …, "arguments": {…}}<|action_end|>``: InternLM 2.5."""
GIGACHAT = Grammar(
    name="gigachat",
    openings=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
    between=("<|message_sep|>",),
    form=JsonCall(),
)
"""``function call<|role_sep|>{"name": …, "arguments": {…}}``, later ``<|function_call|>{…}``: GigaChat 3."""
LFM = Grammar(
    name="lfm",
    sign="<|tool_call_start|>",
    openings=("<|tool_call_start|>",),
    again=IDENTIFIER,
    between=(",", "]", "<|tool_call_end|>"),
    form=PythonCall(),
)
"""``<|tool_call_start|>[name(key="text", other=3)]<|tool_call_end|>``: LFM2."""
LLAMA = Grammar(
    name="llama",
    sign="ipython",
    openings=("<|python_tag|>",),
    starts=(*OBJECT, '{"type"'),
    again=("{",),
    between=(";",),
    first=True,
    form=JsonCall(arguments=("parameters", "arguments")),
)
"""``{"name": …, "parameters": {…}}`` and nothing else, or several behind semicolons: Llama 3.1 and later."""
XLAM = Grammar(
    name="xlam",
    starts=("[{", "[\n"),
    again=("{",),
    between=(",", "]"),
    first=True,
    form=JsonCall(listed=True),
)
"""``[{"name": …, "arguments": {…}}]`` and nothing else: xLAM."""
PHI = Grammar(
    name="phi",
    openings=("functools",),
    starts=OBJECT,
    again=("{",),
    between=(",", "]"),
    first=True,
    form=JsonCall(listed=True, python=True),
)
"""``functools[{"name": …, "arguments": {…}}]``, or the objects alone: Phi-4 mini."""
PYTHONIC = Grammar(
    name="pythonic",
    openings=("<|python_start|>", "<function_calls>"),
    starts=("[",),
    again=IDENTIFIER,
    between=(",", "]", "<|python_end|>", "</function_calls>"),
    first=True,
    form=PythonCall(),
)
"""``[name(key="text"), other(key=3)]`` and nothing else: Llama 3.2 and 4, Olmo 3, ToolACE, Gemma 3."""

GRAMMARS = (
    *(KIMI, DEEPSEEK, SEED, QWEN_CODER, HERMES, MISTRAL, LLAMA, COHERE, LFM, FUNCTIONARY, GLM),
    *(HUNYUAN_3, MINIMAX, MINIMAX_3, ATEM, DSML, MINICPM, FUNCTION_GEMMA, GEMMA, KIMI_3, SOLAR, HARMONY, APERTUS),
    *(LISTED, INTERNLM, GIGACHAT, XLAM, PHI, PYTHONIC),
)
"""In the order in which they are tried: Qwen3-Coder's templates mention Hermes' marks, too."""


def mentioned(template: str) -> Grammar | None:
    """Guess the grammar from the marks in a template; ``None`` if it has none."""
    return next((grammar for grammar in GRAMMARS if grammar.sign and grammar.sign in template), None)
