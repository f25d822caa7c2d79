"""The chat template, both ways: messages to token ids and sampled ids to text.

Owns how a conversation looks in tokens. A message is rendered on its own, ``[role] content [end]``, so rendering a
longer conversation never changes the ids of a shorter one, and a turn's sampled ids can be continued as they are. Text
that spells a special token is encoded as plain text: no tool output can open a turn.

Does not own which tokens were sampled (:mod:`etude.gateway`).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.errors import DamagedError

PAD, DOCUMENT, END = "<|pad|>", "<|doc|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
"""Role in the API → the token that opens its message."""
SPECIAL_TOKENS = (PAD, DOCUMENT, END, *ROLES.values())
"""In order of their ids, from 0."""

WORDS = r" ?[A-Za-z_]+| ?[0-9]|\n *| +| ?[<>=!+*-]=| ?[^\sA-Za-z_0-9]|\s"
"""Where BPE may not merge across: words, single digits, an indent with its line break, single marks.

Marks stay apart (but for ``==`` and kin) so that ``s[-n:][::-1]`` is built from parts the model has met elsewhere: were
``:][::-`` one token, a combination that is held out could never be written.
"""

JINJA_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The same template for ``AutoTokenizer.apply_chat_template``."""


class ChatTemplate:
    """A tokenizer that knows how conversations are written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._roles = {role: _token_id(tokenizer, token) for role, token in ROLES.items()}
        self.pad_id = _token_id(tokenizer, PAD)
        self.document_id = _token_id(tokenizer, DOCUMENT)
        self.end_id = _token_id(tokenizer, END)
        """Ends every message; an engine stops when it samples it."""

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn a byte-level BPE of ``vocab_size`` entries from ``texts``."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``tokenizer.json`` from a checkpoint folder. Raises :class:`~etude.errors.DamagedError`."""
        file = folder / "tokenizer.json"
        try:
            return cls(Tokenizer.from_str(file.read_text(encoding="utf-8")))
        except Exception as error:
            raise DamagedError(f"{file} is missing or not a tokenizer: {error}") from error

    def save(self, folder: Path) -> None:
        """Write the tokenizer as Hugging Face's ``AutoTokenizer`` expects it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": JINJA_TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, with nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def render_message(self, role: str, content: str) -> list[int]:
        """A whole message: role token, content, end token. Raises ``ValueError`` on an unknown role."""
        if role not in self._roles:
            raise ValueError(f"unknown role {role!r}: expected one of {sorted(self._roles)}")
        return [self._roles[role], *self.encode(content), self.end_id]

    def generation_prompt(self) -> list[int]:
        """The tokens that open an assistant turn."""
        return [self._roles["assistant"]]


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise DamagedError(f"the tokenizer has no {token!r}: it was not made for this chat template")
    return token_id
