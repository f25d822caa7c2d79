"""Conversations: loss only on the assistant's tokens, bad lines refused by number, every line once an epoch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.errors import ConfigError
from etude.tasks.corpora.conversations import Conversations, conversation, parse, render
from etude.tasks.corpora.mixture import Side
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import Checkpoint, JinjaFormat
from etude.tokens.messages import ChatFormat, ChatMessage
from etude.types import Document, Json, Split

CHAT = ChatTemplate.train(["some words to learn from, and some more words"], 300)
TRAIN, HELDOUT = Side(seed=0, one_in=4), Side(split=Split.HELDOUT, seed=0, one_in=4)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace("message.content }}", "(message.content if loop.last or message.role == 'user' else '…') }}")
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
SESSION: Sequence[Json] = (
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "fix "}, {"type": "text", "text": "it"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "words"},
    {"role": "assistant", "content": "done"},
)
TOOL: Json = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def line_of(messages: Sequence[Json], **more: Json) -> bytes:
    return json.dumps({"messages": list(messages), **more}).encode()


def jinja(template: str) -> JinjaFormat:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some words to learn from"], trainer)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    variables = {"eos_token": "<|im_end|>"}
    return JinjaFormat(
        Checkpoint(tokenizer=tokenizer, templates={"default": template}, variables=variables, stop_ids=(end,))
    )


def learnt(document: Document, chat: ChatFormat) -> list[str]:
    """The trained parts of a document as texts."""
    runs: list[list[int]] = [[]]
    for token_id, weight in zip(document.token_ids.tolist(), document.weights.tolist(), strict=True):
        if weight == 1:
            runs[-1].append(token_id)
        elif runs[-1]:
            runs.append([])
    assert all(run[-1] in chat.stop_ids for run in runs if run)
    return [chat.decode(run) for run in runs if run]


@pytest.mark.parametrize("chat", [CHAT, jinja(CHATML)], ids=["built-in", "chatml"])
def test_only_what_the_assistant_said_is_learnt_with_its_end(chat: ChatFormat) -> None:
    document = render(parse(line_of(SESSION, tools=[TOOL])), chat, context_weight=0.0)
    first, last = learnt(document, chat)
    assert "read" in first
    assert last == "done"
    assert set(document.weights.tolist()) == {0.0, 1.0}
    assert chat.decode(document.token_ids.tolist()).rstrip().endswith("done")


def test_it_reads_as_a_rollout_does() -> None:
    output = parse(line_of(SESSION)).messages
    document = conversation(CHAT, output, context_weight=0.25)
    assert document.token_ids.tolist() == CHAT.open(output)[: -len(CHAT.generation_prompt())]
    prompt = CHAT.open(output[:2])
    assert document.weights.tolist()[: len(prompt)] == [0.25] * len(prompt)


def test_a_message_of_weight_zero_is_read_but_not_learnt() -> None:
    messages: list[Json] = [*SESSION[:4], {"role": "assistant", "content": "done", "weight": 0}]
    document = render(parse(line_of(messages)), CHAT, context_weight=0.3)
    [first] = learnt(document, CHAT)
    assert "read" in first
    assert document.weights.tolist()[-1] == 0


def test_what_follows_the_last_reply_is_left_out() -> None:
    output = [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", content="b"),
        ChatMessage(role="user", content="c"),
    ]
    assert CHAT.decode(conversation(CHAT, output, context_weight=0.0).token_ids.tolist()) == "ab"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "it is not JSON"),
        (b"[]", "the line is not an object"),
        (line_of([], model="x"), "the line has 'model'"),
        (line_of([]), "no message of the assistant has a weight above 0"),
        (line_of(SESSION[:2]), "no message of the assistant has a weight above 0"),
        (line_of([{"role": "robot", "content": ""}]), "message 1 has no role out of system"),
        (line_of([{"role": "user"}]), "message 1: content is not a text"),
        (line_of([{"role": "user", "content": [{"type": "image", "text": ""}]}]), "not of type text"),
        (line_of([{"role": "user", "content": "a", "weight": 0}]), "message 1 has 'weight'"),
        (line_of([{"role": "assistant", "content": "a", "weight": 0.5}]), "message 1 has weight 0.5"),
        (line_of([{"role": "assistant", "refusal": "no"}]), "message 1 is a refusal"),
        (line_of([{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]), "function is not an"),
        (
            line_of([{"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
            ]}]),
            "arguments that are not JSON",
        ),
        (line_of(SESSION, tools={}), "tools is not a list"),
    ],
)  # fmt: skip
def test_a_bad_line_says_what_is_wrong(line: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render(parse(line), CHAT, context_weight=0.0)


def test_a_template_that_rewrites_history_is_refused() -> None:
    messages: list[Json] = [*SESSION[1:2], {"role": "assistant", "content": "one"}] * 2
    with pytest.raises(ValueError, match="rewrites what was said before message 4"):
        render(parse(line_of(messages)), jinja(FORGETFUL), context_weight=0.0)


def write(folder: Path, lines: Sequence[bytes]) -> Path:
    (folder / "chats.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder / "chats.jsonl"


def test_bad_lines_are_named_before_anything_is_trained(tmp_path: Path) -> None:
    good = line_of(SESSION)
    file = write(tmp_path, [good, b"{", b"", good, line_of(SESSION[:1])])
    with pytest.raises(
        ConfigError, match=r"line 2: it is not JSON.*\n  line 5: no message of the assistant has a weight above 0"
    ):
        Conversations(file, CHAT, TRAIN, context_weight=0.0)
    with pytest.raises(ConfigError, match="and 40 more"):
        Conversations(write(tmp_path, [b"{"] * 50), CHAT, HELDOUT, context_weight=0.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        Conversations(tmp_path / "nothing", CHAT, TRAIN, context_weight=0.0)


def test_an_epoch_has_every_conversation_of_its_side_once(tmp_path: Path) -> None:
    lines = [line_of([{"role": "user", "content": "?"}, {"role": "assistant", "content": str(n)}]) for n in range(40)]
    file = write(tmp_path, lines)
    output: Mapping[Split, list[list[str]]] = {
        side.split: [
            [
                CHAT.decode(source.document(epoch * source.size + place).token_ids.tolist())
                for place in range(source.size)
            ]
            for epoch in range(2)
        ]
        for side in (TRAIN, HELDOUT)
        for source in [Conversations(file, CHAT, side, context_weight=0.0)]
    }
    both = [output[Split.TRAIN][0], output[Split.HELDOUT][0]]
    assert sorted(both[0] + both[1]) == sorted(f"?{n}" for n in range(40))
    assert both[1]
    assert sorted(output[Split.TRAIN][1]) == sorted(both[0])
    assert output[Split.TRAIN][1] != both[0]


def test_a_changed_file_is_another_source(tmp_path: Path) -> None:
    lines = [line_of([{"role": "user", "content": "?"}, {"role": "assistant", "content": str(n)}]) for n in range(9)]
    before = Conversations(write(tmp_path, lines), CHAT, TRAIN, context_weight=0.0)
    after = Conversations(write(tmp_path, lines[::-1]), CHAT, TRAIN, context_weight=0.0)
    assert before.identity != after.identity
    assert before.tokens == after.tokens == sum(len(before.document(place).token_ids) for place in range(before.size))
