"""The ids of a text are the tokenizer's own, with and without the cache of words."""

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from etude.tokens.word_cache import FIND_WORDS, LONGEST_CHARACTERS, WORDS, WordCache, word_splitter

CODE = "def f(xs, n):\n    return [x for x in xs if x >= n][::-1]\n\nprint(f([1, 22, 333], 22), 'naïve 日本')\n"
ASCII = "".join(map(chr, range(128)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = word_splitter()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CODE] * 3, trainer)
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_every_character_there_is_splits_as_the_tokenizer_splits_it() -> None:
    splitter = pre_tokenizers.Split(pattern=Regex(WORDS), behavior="isolated")
    for start in range(0, sys.maxunicode + 1, 4096):
        characters = [chr(code) for code in range(start, start + 4096) if not 0xD800 <= code < 0xE000]
        text = "".join(f" {character}{character}a" for character in characters)
        assert FIND_WORDS(text) == [word for word, _ in splitter.pre_tokenize_str(text)]


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(ASCII), max_size=60))
def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    words = WordCache(tokenizer)
    assert "".join(FIND_WORDS(text)) == text
    assert words.encode(text) == whole(tokenizer, text)
    assert words.encode(text) == whole(tokenizer, text)


def test_long_words_are_not_remembered(tokenizer: Tokenizer) -> None:
    words = WordCache(tokenizer)
    long = "x" * (LONGEST_CHARACTERS + 1)
    assert words.encode(f"f({long})") == whole(tokenizer, f"f({long})")
    assert sorted(words._ids_of) == ["(", ")", "f"]  # what is kept cannot be seen from outside


def test_a_tokenizer_that_splits_otherwise_is_asked_itself() -> None:
    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    other.train_from_iterator([CODE] * 3, trainer)
    assert WordCache(other).encode(CODE) == whole(other, CODE)
