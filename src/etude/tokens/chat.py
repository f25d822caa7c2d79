"""The built-in chat format, both ways: messages to token ids and sampled ids to replies.

Owns the tokens of a conversation. A message is rendered on its own, ``[role] content [end]``, so rendering a longer
conversation never changes the ids of a shorter one, and a turn's sampled ids can be continued unchanged. Text that
spells a special token is encoded as plain text: no tool output can open a turn.

    tools          a system message before all others: ``TOOLS_INTRODUCTION``, then one JSON object per line
    tool calls     after the text of a reply, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` each
    role ``tool``  a user's message: its position shows which call it answers
    thoughts       none; thoughts in a caller's messages are left out

Does not own which tokens were sampled (:mod:`etude.gateway`) or any other model's format (:mod:`etude.tokens.jinja`).
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.errors import DamagedError
from etude.tokens.grammars import HERMES
from etude.tokens.messages import NO_KWARGS, ChatMessage, TemplateKwargs, Tool, ToolCall, UnreadKwargs
from etude.tokens.reader import IncrementalReader
from etude.tokens.toolcalls import ReplyMarks
from etude.tokens.vocabulary import Spelling, check_tokenizer
from etude.tokens.word_cache import WordCache, word_splitter
from etude.types import Json, TokenIds

PAD, DOCUMENT, END = "<|pad|>", "<|doc|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
"""Role in the API → the token that opens its message."""
SPECIAL_TOKENS = (PAD, DOCUMENT, END, *ROLES.values())
"""In order of their ids, from 0."""

TOOLS_INTRODUCTION = (
    'Tools, to be called with <tool_call>{"name": <name>, "arguments": <arguments as a JSON object>}</tool_call>:\n'
)
"""Text before the tools in their system message."""

JINJA_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + '"
    + TOOLS_INTRODUCTION.replace("\n", "\\n")
    + "' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    """{{ '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}"""
    "{{ call['function']['arguments'] if call['function']['arguments'] is string "
    "else call['function']['arguments'] | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The same format for ``AutoTokenizer.apply_chat_template``."""

MARKS = ReplyMarks(grammar=HERMES)
"""The grammar of a reply: calls, if there are tools."""


class ChatTemplate:
    """The built-in chat template with its tokenizer; a :class:`~etude.tokens.messages.ChatFormat`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._roles = {role: _token_id(tokenizer, token) for role, token in ROLES.items()}
        self.pad_id = _token_id(tokenizer, PAD)
        self.document_id = _token_id(tokenizer, DOCUMENT)
        self.end_id = _token_id(tokenizer, END)
        """Ends every message; an engine stops when it samples it."""
        self._spelling = Spelling(tokenizer)
        self._words = WordCache(tokenizer)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn a byte-level BPE of ``vocab_size`` entries from ``texts``."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = word_splitter()
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
        return cls(read_tokenizer(folder))

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
    def stop_ids(self) -> tuple[int, ...]:
        """The one id that ends a message."""
        return (self.end_id,)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size()

    @property
    def thinks(self) -> bool:
        """False: this format has no thoughts."""
        return False

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, with nothing added."""
        return self._words.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._spelling.decode(token_ids)

    def open(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        """The ids that a model continues to answer a conversation.

        Raises ``ValueError`` on an unknown role, and on any ``kwargs``: this template reads none.
        """
        check_kwargs(kwargs, ())
        ids: list[int] = []
        if tools:
            listed = "".join(json.dumps(described(tool), ensure_ascii=False) + "\n" for tool in tools)
            ids += self.render_message("system", TOOLS_INTRODUCTION + listed)
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            ids += self.render_message(role, message.content + "".join(map(_call_text, message.tool_calls)))
        return ids + self.generation_prompt()

    def extend(
        self,
        reply: ChatMessage,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        kwargs: TemplateKwargs = NO_KWARGS,
    ) -> list[int]:
        """The ids after a sampled reply and its end token: those of ``messages`` alone, because rendering is
        compositional. Raises like :meth:`open`.
        """
        return self.open(messages, (), kwargs)

    def reader(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: TokenIds = (),
        stops: Sequence[str] = (),
        single_call: bool = False,
    ) -> IncrementalReader:
        """A reader for one reply; it looks for calls if there are ``tools``."""
        return IncrementalReader(self._spelling.stream(), MARKS, tools, stops=stops, single_call=single_call)

    def render_message(self, role: str, content: str) -> list[int]:
        """A whole message: role token, content, end token. Raises ``ValueError`` on an unknown role."""
        if role not in self._roles:
            raise ValueError(f"unknown role {role!r}: expected one of {sorted(self._roles)}")
        return [self._roles[role], *self.encode(content), self.end_id]

    def generation_prompt(self) -> list[int]:
        """The tokens that open an assistant turn."""
        return [self._roles["assistant"]]


def check_kwargs(kwargs: TemplateKwargs, reads: Collection[str]) -> None:
    """Raise :class:`~etude.tokens.messages.UnreadKwargs` for kwargs that a template does not read."""
    if unread := sorted(kwargs.keys() - set(reads)):
        keys = f"it reads {', '.join(sorted(reads))}" if reads else "it reads none"
        raise UnreadKwargs(f"chat_template_kwargs: the model's chat template does not read {', '.join(unread)}; {keys}")


def read_tokenizer(folder: Path) -> Tokenizer:
    """The ``tokenizer.json`` of a checkpoint folder, for whole texts: nothing is cut off or padded.

    Raises :class:`~etude.errors.DamagedError`.
    """
    file = folder / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
        check_tokenizer(text)
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers is not an Exception
        raise DamagedError(f"{file} is missing or not a tokenizer: {error}") from error
    return tokenizer


def described(tool: Tool) -> dict[str, Json]:
    """A tool as the OpenAI API describes it, which is what chat templates expect."""
    function: dict[str, Json] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _call_text(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {call.arguments}}}</tool_call>'


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise DamagedError(f"the tokenizer has no {token!r}: it was not made for this chat template")
    return token_id
