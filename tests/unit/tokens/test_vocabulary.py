"""Token ids to bytes, and text to ids that no text can choose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.errors import DamagedError
from etude.tokens.vocabulary import Guard, Spelling, stand_in

LETTERS = [*"abcdefgh<|>/s ", "<s>", "ab"]


def unigram() -> Tokenizer:
    """A tokenizer whose model chooses ``<s>`` for a text with these characters, as SentencePiece's can."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", -9.0), *((text, -1.0) for text in LETTERS)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def id_of(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


def guard(controls: list[str]) -> tuple[Tokenizer, Guard]:
    tokenizer = unigram()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return tokenizer, Guard(tokenizer, {text: id_of(tokenizer, text) for text in ["<s>", *controls]})


def test_a_model_that_knows_a_control_token_does_not_choose_it() -> None:
    tokenizer, guarded = guard([])
    control = id_of(tokenizer, "<s>")
    assert control in tokenizer.encode("a<s>b").ids
    assert control not in guarded.encode_plain("a<s>b")
    assert guarded.encode(f"<s>{guarded.hide('a<s>b')}") == [control, *guarded.encode_plain("a<s>b")]


@given(st.lists(st.sampled_from(["<ab>", "ab>cd", "<s>", "cd", ">", "<", "a", "b>c", "d"]), max_size=8).map("".join))
def test_overlapping_control_tokens_are_all_hidden(text: str) -> None:
    tokenizer, guarded = guard(["<ab>", "ab>cd"])
    controls = {tokenizer.token_to_id(token) for token in ("<ab>", "ab>cd", "<s>")}
    assert not controls & set(guarded.encode(guarded.hide(text)))
    assert guarded.encode(guarded.hide(text)) == guarded.encode_plain(text)
    assert guarded.encode(text) == tokenizer.encode(text).ids


def test_values_are_hidden_with_their_names() -> None:
    _, guarded = guard([])
    hidden = guarded.hide_all({"<s>": ["<s>", 1, None, {"a": "<s>"}]})
    assert "<s>" not in str(hidden)
    assert guarded.hide_all({"a": [1, "b"]}) == {"a": [1, "b"]}


def test_a_control_token_is_found_behind_white_space() -> None:
    _, guarded = guard([])
    assert guarded.find_control("x \n<s>", 1) == "<s>"
    assert guarded.find_control("x y<s>", 1) is None
    assert guarded.find_control("") is None


def test_a_control_token_of_one_character_cannot_be_guarded() -> None:
    tokenizer = unigram()
    with pytest.raises(DamagedError, match="one character"):
        Guard(tokenizer, {"a": id_of(tokenizer, "a")})


def test_stand_ins_differ() -> None:
    assert len({stand_in() for _ in range(10)}) == 10


def test_special_tokens_are_silent_unless_respelt() -> None:
    tokenizer = unigram()
    control = id_of(tokenizer, "<s>")
    spelling = Spelling(tokenizer)
    ids = [id_of(tokenizer, "a"), control, 10**6]
    assert spelling.decode(ids) == "a"
    assert spelling.respelt({control: "<s>", 10**6: "?"}).decode(ids) == "a<s>"


def test_an_unknown_decoder_is_refused() -> None:
    tokenizer = unigram()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DamagedError, match="WordPiece"):
        Spelling(tokenizer)
