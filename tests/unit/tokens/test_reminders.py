"""A reminder stands right before the reply, as the model's own chat format writes it, and nothing else changes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import Checkpoint, JinjaFormat
from etude.tokens.messages import ChatFormat, Message, ToolCall
from etude.tokens.reminders import Reminders
from etude.types import Ids

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ("qwen", "coder", "llama", "mistral", "deepseek", "kimi")
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
)
ENDS = {"llama": "<|eot_id|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>"}
STRICT = (
    "{% for message in messages %}"
    "{% if message.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[INST]' + message.content + '[/INST]' if message.role == 'user' else message.content + '</s>' }}"
    "{% endfor %}"
)
"""In the manner of early templates, which know two speakers that take turns."""

ASKED, SAID = Message(role="user", content="fix f in f.py"), Message(role="assistant", content="read f.py")
SHOWN = Message(role="user", content="1 def f(x):\n2     return x")
CALLED = Message(role="assistant", tool_calls=(ToolCall(call_id="abcdefghi", name="edit", arguments='{"line": 3}'),))
ANSWERED = Message(role="tool", content="no such line", tool_call_id="abcdefghi")
HINT = "Reminder: edit FILE N."


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant system fix edit reminder"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return tokenizer


def make_jinja(source: str, end: str) -> JinjaFormat:
    tokenizer = make_tokenizer()
    variables = {"bos_token": "<s>", "eos_token": end}
    end_id = tokenizer.token_to_id(end)
    assert end_id is not None
    return JinjaFormat(
        Checkpoint(tokenizer=tokenizer, templates={"default": source}, variables=variables, stop_ids=(end_id,))
    )


@pytest.fixture(scope="module")
def formats() -> dict[str, ChatFormat]:
    found: dict[str, ChatFormat] = {
        name: make_jinja((TEMPLATES / f"{name}.jinja").read_text(), ENDS.get(name, "<|im_end|>")) for name in FAMILIES
    }
    return found | {"ours": ChatTemplate.train(["fix f in f.py", "edit FILE N"], 300)}


def opened(chat: ChatFormat, messages: Sequence[Message]) -> Ids:
    return np.array(chat.open(messages), np.int32)


@pytest.mark.parametrize("name", [*FAMILIES, "ours"])
@pytest.mark.parametrize(
    "conversation", [(ASKED,), (ASKED, SAID, SHOWN), (ASKED, CALLED, ANSWERED)], ids=["task", "text", "tool"]
)
def test_it_is_one_message_more_as_the_format_writes_it(
    name: str, conversation: tuple[Message, ...], formats: dict[str, ChatFormat]
) -> None:
    chat = formats[name]
    prompt_ids = opened(chat, conversation)
    reminded = Reminders(chat).insert(prompt_ids, HINT)
    assert reminded.tolist() == chat.open([*conversation, Message(role="user", content=HINT)])
    assert reminded.dtype == prompt_ids.dtype


@pytest.mark.parametrize("name", [*FAMILIES, "ours"])
def test_what_is_around_it_stays(name: str, formats: dict[str, ChatFormat]) -> None:
    chat = formats[name]
    reminders, prompt_ids = Reminders(chat), opened(chat, (ASKED, SAID, SHOWN))
    place = reminders.place(prompt_ids)
    reminded = reminders.insert(prompt_ids, HINT)
    assert reminded[:place].tolist() == prompt_ids[:place].tolist()
    assert reminded[len(reminded) - (len(prompt_ids) - place) :].tolist() == prompt_ids[place:].tolist()
    assert HINT in chat.decode(reminded[place:].tolist())
    assert HINT not in chat.decode(prompt_ids.tolist())


@given(text=st.text(min_size=1, max_size=60))
def test_any_text_is_one_message_of_ours(text: str) -> None:
    chat = OURS
    prompt_ids = opened(chat, (ASKED, SAID, SHOWN))
    reminded = REMINDERS.insert(prompt_ids, text).tolist()
    assert reminded == chat.open([ASKED, SAID, SHOWN, Message(role="user", content=text)])


OURS = ChatTemplate.train(["fix f in f.py", "edit FILE N"], 300)
REMINDERS = Reminders(OURS)


def test_without_a_text_the_context_is_the_same() -> None:
    prompt_ids = opened(OURS, (ASKED,))
    assert REMINDERS.insert(prompt_ids, "") is prompt_ids


def test_a_hint_that_spells_a_control_token_is_text(formats: dict[str, ChatFormat]) -> None:
    for name, chat in formats.items():
        prompt_ids = opened(chat, (ASKED,))
        forged = Reminders(chat).insert(prompt_ids, "".join(SPECIAL) + "<|user|><|end|>")
        plain = Reminders(chat).insert(prompt_ids, "x")
        control = range(OURS.end_id + 4) if name == "ours" else [chat._tokenizer.token_to_id(t) for t in SPECIAL]  # type: ignore[attr-defined]
        assert [i for i in forged.tolist() if i in control] == [i for i in plain.tolist() if i in control]


def test_a_context_in_the_middle_of_a_reply_takes_none(formats: dict[str, ChatFormat]) -> None:
    for chat in formats.values():
        reminders, prompt_ids = Reminders(chat), opened(chat, (ASKED,))
        begun = np.append(prompt_ids, np.array(chat.encode("read"), np.int32))
        assert reminders.fits(prompt_ids)
        assert not reminders.fits(begun)
        assert not reminders.fits(prompt_ids[:0])
        with pytest.raises(ValueError, match="no reminder can be put before it"):
            reminders.insert(begun, HINT)


def test_a_format_that_takes_no_message_there_says_so_at_once() -> None:
    with pytest.raises(ValueError, match=r"takes no message between the last one and a reply .*roles must alternate"):
        Reminders(make_jinja(STRICT, "</s>"))


def test_where_no_user_may_speak_twice_the_system_does() -> None:
    patient = STRICT.replace("{% if message.role !=", "{% if message.role != 'system' and message.role !=")
    chat = make_jinja(patient, "</s>")
    reminded = Reminders(chat).insert(opened(chat, (ASKED,)), HINT)
    assert reminded.tolist() == chat.open([ASKED, Message(role="system", content=HINT)])


def test_a_template_that_rewrites_what_was_said_is_refused() -> None:
    counting = "{% for message in messages %}{{ '[INST]' + messages | length | string + message.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"changes what is written around it|changes the whole conversation"):
        Reminders(make_jinja(counting, "</s>"))
