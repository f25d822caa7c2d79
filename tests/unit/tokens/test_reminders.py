"""A reminder is right before the reply, in the model's own chat format, and changes nothing else."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_formats import FAMILIES, SPECIAL, every_format, make_jinja
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatFormat, ChatMessage, ToolCall
from etude.tokens.reminders import Reminders
from etude.types import Ids

STRICT = (
    "{% for message in messages %}"
    "{% if message.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[INST]' + message.content + '[/INST]' if message.role == 'user' else message.content + '</s>' }}"
    "{% endfor %}"
)
"""In the manner of early templates, which know two speakers that take turns."""

QUESTION, REPLY = ChatMessage(role="user", content="fix f in f.py"), ChatMessage(role="assistant", content="read f.py")
SHOWN = ChatMessage(role="user", content="1 def f(x):\n2     return x")
CALLED = ChatMessage(
    role="assistant", tool_calls=(ToolCall(call_id="abcdefghi", name="edit", arguments='{"line": 3}'),)
)
ANSWERED = ChatMessage(role="tool", content="no such line", tool_call_id="abcdefghi")
HINT = "Reminder: edit FILE N."


@pytest.fixture(scope="module")
def formats() -> dict[str, ChatFormat]:
    return every_format()


def opened(chat: ChatFormat, messages: Sequence[ChatMessage]) -> Ids:
    return np.array(chat.open(messages), np.int32)


@pytest.mark.parametrize("name", [*FAMILIES, "ours"])
@pytest.mark.parametrize(
    "conversation", [(QUESTION,), (QUESTION, REPLY, SHOWN), (QUESTION, CALLED, ANSWERED)], ids=["task", "text", "tool"]
)
def test_it_is_one_message_more_as_the_format_writes_it(
    name: str, conversation: tuple[ChatMessage, ...], formats: dict[str, ChatFormat]
) -> None:
    chat = formats[name]
    prompt_ids = opened(chat, conversation)
    reminded = Reminders(chat).insert(prompt_ids, HINT)
    assert reminded.tolist() == chat.open([*conversation, ChatMessage(role="user", content=HINT)])
    assert reminded.dtype == prompt_ids.dtype


@pytest.mark.parametrize("name", [*FAMILIES, "ours"])
def test_what_is_around_it_stays(name: str, formats: dict[str, ChatFormat]) -> None:
    chat = formats[name]
    reminders, prompt_ids = Reminders(chat), opened(chat, (QUESTION, REPLY, SHOWN))
    place = reminders.place(prompt_ids)
    reminded = reminders.insert(prompt_ids, HINT)
    assert reminded[:place].tolist() == prompt_ids[:place].tolist()
    assert reminded[len(reminded) - (len(prompt_ids) - place) :].tolist() == prompt_ids[place:].tolist()
    assert HINT in chat.decode(reminded[place:].tolist())
    assert HINT not in chat.decode(prompt_ids.tolist())


@given(text=st.text(min_size=1, max_size=60))
def test_any_text_is_one_message_of_ours(text: str) -> None:
    chat = OURS
    prompt_ids = opened(chat, (QUESTION, REPLY, SHOWN))
    reminded = REMINDERS.insert(prompt_ids, text).tolist()
    assert reminded == chat.open([QUESTION, REPLY, SHOWN, ChatMessage(role="user", content=text)])


OURS = ChatTemplate.train(["fix f in f.py", "edit FILE N"], 300)
REMINDERS = Reminders(OURS)


def test_without_a_text_the_context_is_the_same() -> None:
    prompt_ids = opened(OURS, (QUESTION,))
    assert REMINDERS.insert(prompt_ids, "") is prompt_ids


def test_a_hint_that_spells_a_control_token_is_text(formats: dict[str, ChatFormat]) -> None:
    for name, chat in formats.items():
        prompt_ids = opened(chat, (QUESTION,))
        forged = Reminders(chat).insert(prompt_ids, "".join(SPECIAL) + "<|user|><|end|>")
        plain = Reminders(chat).insert(prompt_ids, "x")
        control = range(OURS.end_id + 4) if name == "ours" else [chat._tokenizer.token_to_id(t) for t in SPECIAL]  # type: ignore[attr-defined]
        assert [i for i in forged.tolist() if i in control] == [i for i in plain.tolist() if i in control]


def test_a_context_in_the_middle_of_a_reply_takes_none(formats: dict[str, ChatFormat]) -> None:
    for chat in formats.values():
        reminders, prompt_ids = Reminders(chat), opened(chat, (QUESTION,))
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
    reminded = Reminders(chat).insert(opened(chat, (QUESTION,)), HINT)
    assert reminded.tolist() == chat.open([QUESTION, ChatMessage(role="system", content=HINT)])


def test_a_template_that_rewrites_what_was_said_is_refused() -> None:
    counting = "{% for message in messages %}{{ '[INST]' + messages | length | string + message.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"changes what is written around it|changes the whole conversation"):
        Reminders(make_jinja(counting, "</s>"))
