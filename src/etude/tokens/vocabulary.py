"""A tokenizer for chat formats: decoding of token ids, and encoding of text that cannot forge control tokens.

Owns the bytes of each id, their incremental decoding, and the guard that prevents text from spelling control tokens.
:mod:`etude.tokens.chat` and :mod:`etude.tokens.jinja` own the format of conversations.
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TypeAlias

from tokenizers import Tokenizer

from etude.errors import DamagedError
from etude.types import Json

Spec: TypeAlias = "dict[str, Json]"
"""One object of a ``tokenizer.json``."""

TextState: TypeAlias = tuple[bytes, bool]
"""The bytes of an incomplete character, and true if a space at the start must still be dropped."""

NONCE_DIGITS = 40
"""Length of a stand-in: 132 bits, which an author of a message cannot guess. Template filters (JSON, case, trimming) do
not change digits.
"""
MOST_IDS = 1 << 22
"""Limit of token ids, 16 times the largest tokenizer in use: tables have an entry for each id."""
UTF8 = codecs.getincrementaldecoder("utf-8")
"""Decoder of bytes as they arrive."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's spelling of a byte that no token covers."""


def check_tokenizer(text: str) -> None:
    """Raise ``ValueError`` for a ``tokenizer.json`` that would crash the library instead of raising an error.

    Such files have an id for which the library would allocate a table of gigabytes, or merges without the subword
    prefix: the library removes as many bytes from them, and half a character crashes the process. No key may occur
    twice, so that both parsers see the same object.
    """
    spec: Json = json.loads(text, object_pairs_hook=_unique)
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(model, dict):
        raise ValueError("it has no object named model")
    vocab, merges, prefix = model.get("vocab"), model.get("merges"), model.get("continuing_subword_prefix")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in _objects(spec.get("added_tokens"))]
    for index in ids:
        if not isinstance(index, int) or not 0 <= index < MOST_IDS:
            raise ValueError(f"a token's id is {index!r}: expected a whole number below {MOST_IDS}")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(second, str) or not second.startswith(prefix):
            raise ValueError(f"the merge {merge!r} is of a subword without continuing_subword_prefix, {prefix!r}")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object without repeated keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it names something twice in one object")
    return value


class Spelling:
    """The bytes that each token id adds to a text.

    Special tokens add nothing, and neither do ids beyond the table, which a padded model may sample. Raises
    :class:`~etude.errors.DamagedError` for a decoder that is neither byte-level nor SentencePiece's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoders = _decoders(tokenizer)
        kinds = {str(decoder.get("type")) for decoder in decoders}
        spell: _ByteLevel | _MetaspaceSpelling
        if "ByteLevel" in kinds:
            spell = _ByteLevel()
        elif kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
            spell = _MetaspaceSpelling(decoders)
        else:
            raise DamagedError(
                f"the tokenizer's decoder is made of {sorted(kinds)}: expected ByteLevel, or SentencePiece's parts"
            )
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, index in vocab.items():
            if index not in special:
                table[index] = spell(text)
        self._table = tuple(table)
        self._strips = spell.strips

    def respelt(self, spellings: Mapping[int, str]) -> "Spelling":
        """A copy with other texts for the tokens in ``spellings`` (id → text)."""
        table = list(self._table)
        for index, text in spellings.items():
            if index < len(table):  # a padded model may have more ids than its tokenizer
                table[index] = text.encode()
        other = copy(self)
        other._table = tuple(table)
        return other

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD."""
        stream = self.stream()
        return stream.feed(token_ids) + stream.finish()

    def stream(self) -> "TextStream":
        """A decoder of ids as they arrive."""
        return TextStream(self._table, strips=self._strips)


class TextStream:
    """Incremental decoding of tokens to text; incomplete characters are kept until they are complete.

    With ``strips`` a space at the very start belongs to SentencePiece, not to the text.
    """

    def __init__(self, table: tuple[bytes, ...], *, strips: bool) -> None:
        self._table = table
        self._size = len(table)
        self._strips = strips
        self._decoder = UTF8("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        table, size = self._table, self._size
        text = self._decoder.decode(b"".join([table[token_id] for token_id in token_ids if token_id < size]))
        return self._stripped(text) if self._strips else text

    def finish(self) -> str:
        """The text of an incomplete character at the end."""
        return self._decoder.decode(b"", True)

    def state(self) -> TextState:
        """The state of the stream, for :meth:`lengths`."""
        return self._decoder.getstate()[0], self._strips

    def lengths(self, state: TextState, token_ids: Sequence[int]) -> Iterator[int]:
        """Numbers of characters that each of ``token_ids`` completes when fed in ``state``."""
        pending, strips = state
        past = TextStream(self._table, strips=strips)
        past._decoder.setstate((pending, 0))
        return (len(past.feed((token_id,))) for token_id in token_ids)

    def _stripped(self, text: str) -> str:
        if text:
            self._strips = False
        return text.removeprefix(" ")


def stand_in() -> str:
    """A placeholder text that no message can contain."""
    return "".join(str(secrets.randbelow(10)) for _ in range(NONCE_DIGITS))


class Guard:
    """Encodes text in which only the template may produce ``controls``, the control tokens (text → id).

    Before a template sees the text of people and tools, :meth:`hide` inserts a stand-in into everything that spells a
    control token. So :meth:`encode` can distinguish the control tokens that the template wrote. It replaces these by
    secret names, removes the stand-ins, and encodes with a twin of the tokenizer that has the control tokens only under
    their secret names. All other ids are those of the tokenizer for the whole text. The twin needs as much memory as
    the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Mapping[str, int]) -> None:
        short = [text for text in controls if len(text) < 2]
        if short:
            raise DamagedError(f"the tokenizer has control tokens of one character, {short}: text cannot avoid them")
        self._tokenizer = tokenizer
        self._split = stand_in()
        secret = stand_in()
        # Brackets from the private use area separate digits of the text from those of the name.
        self._names = {text: f"\ue000{secret}{index}\ue001" for index, text in enumerate(controls)}
        self._twin = _renamed(tokenizer, self._names)
        for text, name in self._names.items():
            if self._twin.token_to_id(name) != controls[text]:
                raise DamagedError(f"the tokenizer does not keep the id of {text!r} under another name")
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hide(self, text: str) -> str:
        """``text`` with a stand-in inside everything that spells a control token."""
        while self._controls.search(text):  # repeat for overlapping matches
            text = self._controls.sub(lambda match: match[0][0] + self._split + match[0][1:], text)
        return text

    def hide_all(self, value: Json) -> Json:
        """``value`` with every text in it hidden, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list):
            return [self.hide_all(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(name): self.hide_all(item) for name, item in value.items()}
        return value

    def find_control(self, rendered: str, start: int = 0) -> str | None:
        """The control token that a template wrote at ``start``, or after whitespace there."""
        while start < len(rendered) and rendered[start].isspace():
            start += 1
        match = self._controls.match(rendered, start)
        return match[0] if match else None

    def encode(self, rendered: str) -> list[int]:
        """The ids of a text that a template rendered from hidden texts."""
        if self._split not in rendered:
            return self._ids(self._tokenizer, rendered)
        return self._ids(self._twin, self._controls.sub(self._name, rendered).replace(self._split, ""))

    def encode_plain(self, text: str) -> list[int]:
        """The ids of text that no template wrote, without control tokens."""
        return self._ids(self._twin, text)

    def _name(self, match: re.Match[str]) -> str:
        return self._names[match[0]]

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A copy of a tokenizer with new texts for some tokens and the same ids."""
    spec: Spec = json.loads(tokenizer.to_str())
    for token in _objects(spec.get("added_tokens")):
        content = token.get("content")
        token["content"] = names.get(content, content) if isinstance(content, str) else content
    for model in _objects([spec.get("model")]):
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
        elif isinstance(vocab, list):  # Unigram: [text, score] by id
            pairs = [item for item in vocab if isinstance(item, list)]
            model["vocab"] = [[names.get(str(text), text), score] for text, score in pairs]
        unknown = model.get("unk_token")
        if isinstance(unknown, str):
            model["unk_token"] = names.get(unknown, unknown)
    spec |= {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(spec))


def _objects(value: Json) -> list[Spec]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _decoders(tokenizer: Tokenizer) -> list[Spec]:
    """The parts of the decoder, with a sequence flattened."""
    spec: Spec = json.loads(tokenizer.to_str())
    decoder = spec.get("decoder")
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        return _objects(decoder.get("decoders"))
    return _objects([decoder])


class _ByteLevel:
    """GPT-2's spelling: each byte has a printable character of its own; a token with any other character is itself."""

    strips = False

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(0x100 + index): byte for index, byte in enumerate(others)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            return token.encode()


class _MetaspaceSpelling:
    """SentencePiece's spelling: a mark for the space, ``<0xE2>`` for a byte, a space before the first word."""

    def __init__(self, decoders: Iterable[Spec]) -> None:
        self._spaces: list[tuple[str, str]] = []
        self.strips = False
        for decoder in decoders:
            kind = decoder["type"]
            if kind == "Metaspace":
                self._spaces.append((str(decoder.get("replacement", "▁")), " "))
                self.strips |= decoder.get("prepend_scheme", "always") != "never"
            elif kind == "Replace":
                pattern = decoder.get("pattern")
                text = pattern.get("String") if isinstance(pattern, dict) else None
                if not isinstance(text, str):
                    raise DamagedError(f"the tokenizer's decoder replaces {pattern!r}: expected a plain text")
                self._spaces.append((text, str(decoder.get("content", ""))))
            elif kind == "Strip":
                self.strips |= bool(decoder.get("start"))

    def __call__(self, token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes.fromhex(byte[1])
        for mark, space in self._spaces:
            token = token.replace(mark, space)
        return token.encode()
