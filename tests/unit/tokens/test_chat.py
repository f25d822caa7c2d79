"""The chat template: exact, extendable, and closed to forged turns."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.tokens.chat import SPECIAL_TOKENS, ChatTemplate

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
