"""Cache of the token ids of words: agents mostly send words that were tokenised before.

    text ──WORDS──▶ words ──cache──▶ ids          a new word: the tokenizer, once

A byte-level BPE never merges across the words of its pre-tokenizer, so the ids of a text are the concatenated ids of
its words. Owns the pattern of the built-in format's words, for the tokenizer and for Python. Does not own the
vocabulary.
"""

import re
from collections.abc import Callable

from tokenizers import Regex, Tokenizer, pre_tokenizers

SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
"""Characters of the tokenizer's ``\\s``; Python's has four more control characters."""
WORDS = r" ?[A-Za-z_]+| ?[0-9]|\n *| +| ?[<>=!+*-]=| ?[^\sA-Za-z_0-9]|\s"
"""Units that BPE does not merge across: words, single digits, an indent with its line break, single marks.

Marks stay separate (except ``==`` and similar) so that ``s[-n:][::-1]`` consists of parts that the model has seen
elsewhere: if ``:][::-`` were one token, the model could never write a held-out combination.
"""
FIND_WORDS: Callable[[str], list[str]] = re.compile(
    WORDS.replace(r"[^\s", "[^" + SPACE.strip("[]")).replace(r"\s", SPACE)
).findall
"""Splits a text into words like the tokenizer's own pattern; joined, they are the text."""
LONGEST_CHARACTERS = 32
"""Longest cached word; longer words are rare."""
MOST_WORDS = 1 << 16
"""Largest number of cached words: about 10 MB."""


class WordCache:
    """Encodes plain text exactly as its tokenizer, with a cache of words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """``tokenizer`` must have no normaliser; if it does not split by ``WORDS``, nothing is cached."""
        self._tokenizer = tokenizer
        self._splits = _state(tokenizer.pre_tokenizer) == _state(word_splitter())
        self._ids_of: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""
        if not self._splits:
            return self._ids(text)
        ids: list[int] = []
        cache = self._ids_of
        for word in FIND_WORDS(text):
            cached = cache.get(word)
            ids += self._learn(word) if cached is None else cached
        return ids

    def _learn(self, word: str) -> list[int]:
        ids = self._ids(word)
        if len(word) <= LONGEST_CHARACTERS:
            if len(self._ids_of) >= MOST_WORDS:
                self._ids_of.clear()
            self._ids_of[word] = ids
        return ids

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of the built-in format."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _state(splitter: pre_tokenizers.PreTokenizer | None) -> bytes:
    return b"" if splitter is None else splitter.__getstate__()
