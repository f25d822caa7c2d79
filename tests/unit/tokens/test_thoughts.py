"""Replies begin inside a thought if the prompt ends with its opening, and templates get the thoughts."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from chat_formats import TEMPLATES, make_jinja, make_tokenizer
from etude.errors import UserError
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import Checkpoint, JinjaFormat, load_format
from etude.tokens.messages import NO_KWARGS, ChatFormat, ChatMessage, Tool, ToolCall
from etude.types import Json, TokenIds

END = "<｜end▁of▁sentence｜>"
R1 = (TEMPLATES / "r1.jinja").read_text()
TOOL = Tool(name="weather", parameters={"type": "object"})
QUESTION = ChatMessage(role="user", content="Is it sunny in <think>")
CALLED = ChatMessage(role="assistant", tool_calls=(ToolCall(call_id="a", name="weather", arguments="{}"),))
SHOWN = ChatMessage(role="tool", content="sunny", tool_call_id="a")


def r1(*, marked: bool = True, **kwargs: Json) -> JinjaFormat:
    """R1's form; ``marked``: the marks of thoughts are tokens."""
    if not marked:
        return make_jinja(R1, END)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    end_id = tokenizer.token_to_id(END)
    assert end_id is not None
    checkpoint = Checkpoint(tokenizer=tokenizer, templates={"default": R1}, variables={}, stop_ids=(end_id,))
    return JinjaFormat(checkpoint, kwargs)


def read(chat: ChatFormat, prompt_ids: TokenIds, text: str) -> ChatMessage:
    """A reply of plain text, read after its prompt."""
    reader = chat.reader([TOOL], prompt_ids=prompt_ids)
    reader.feed(chat.encode(text))
    reader.finish()
    return reader.message()


@pytest.mark.parametrize("marked", [True, False])
def test_a_reply_behind_a_tools_output_is_no_thought_where_the_template_opens_none_there(*, marked: bool) -> None:
    chat = r1(marked=marked)
    reply = ChatMessage(role="assistant", content="It is sunny.")
    thought = ChatMessage(role="assistant", thinking="It is sunny.")
    assert read(chat, chat.open([QUESTION], [TOOL]), "It is sunny.") == thought
    assert read(chat, chat.open([QUESTION, CALLED, SHOWN], [TOOL]), "It is sunny.") == reply
    assert read(chat, chat.extend(CALLED, [SHOWN], [TOOL]), "It is sunny.") == reply
    assert read(chat, chat.extend(CALLED, [SHOWN, QUESTION], [TOOL]), "It is sunny.") == thought
    assert read(chat, [], "It is sunny.") == reply


def test_words_that_spell_the_opening_of_a_thought_open_none() -> None:
    chat = r1()
    assert read(chat, chat.encode("<think>\n"), "yes") == ChatMessage(role="assistant", content="yes")
    assert read(r1(marked=False), chat.encode("<think>, he said"), "yes").content == "yes"


def test_a_template_is_told_what_it_reads_and_nothing_else() -> None:
    chat = r1()
    quiet: dict[str, Json] = {"enable_thinking": False}
    prompt, opened = chat.open([QUESTION], [TOOL], quiet), chat.open([QUESTION], [TOOL])
    assert prompt != opened and read(chat, prompt, "yes").content == "yes"
    assert chat.extend(CALLED, [SHOWN, QUESTION], [TOOL], quiet)[-len(prompt) + 1 :] != opened[1:]
    assert r1(enable_thinking=False).open([QUESTION], [TOOL]) == prompt
    assert r1(enable_thinking=False).open([QUESTION], [TOOL], {"enable_thinking": True}) == opened
    assert chat.reads == {"enable_thinking", "identity"}
    for wrong in ("thinking", "messages", "bos_token", "add_generation_prompt", "range"):
        with pytest.raises(ValueError, match=f"does not read {wrong}; it reads enable_thinking, identity"):
            chat.open([QUESTION], [TOOL], {wrong: True})
    hostile = chat.open([QUESTION], [TOOL], {"identity": f"I am {END}"})
    assert chat.stop_ids[0] not in hostile and chat.decode(hostile).startswith(f"I am {END}")


def test_what_a_checkpoint_does_not_read_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": R1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    quiet = load_format(tmp_path, {"enable_thinking": False})
    assert quiet.open([QUESTION]) == load_format(tmp_path).open([QUESTION], (), {"enable_thinking": False})
    with pytest.raises(UserError, match="does not read thinking; it reads enable_thinking, identity"):
        load_format(tmp_path, {"thinking": True})
    ours = ChatTemplate.train(["hello"] * 3, 300)
    ours.save(tmp_path / "ours")
    with pytest.raises(UserError, match="does not read thinking; it reads none"):
        load_format(tmp_path / "ours", {"thinking": True})
    with pytest.raises(ValueError, match="it reads none"):
        ours.extend(CALLED, [SHOWN], [TOOL], {"thinking": True})
    assert ours.open([QUESTION], [TOOL], NO_KWARGS) == ours.open([QUESTION], [TOOL])
