"""Incremental parser of a reply's tokens: text, reasoning and tool calls, up to a stop string.

    ids ──TextStream──▶ text ──_Stops──▶ what no stop string can reach ──_Scanner──▶ deltas

Owns the decision when text is certain and held back until then. Does not own the decoding of ids
(:mod:`etude.tokens.vocabulary`) or the parsing of a call's text (:mod:`etude.tokens.toolcalls`).

Two rules make a reply independent of the chunks in which its tokens arrive: a stop string counts where it is first
complete in the raw text, including thoughts and calls; and white space next to a mark (of a thought or call) belongs to
the mark. A call is delivered when it is complete: only then is it certain, and delivered text cannot be withdrawn.
"""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType

from etude.tokens.messages import CallDelta, ChatMessage, Delta, TextDelta, ThinkingDelta, Tool, ToolCall
from etude.tokens.toolcalls import CallEnd, ParsedCall, ReplyMarks
from etude.tokens.vocabulary import TextState, TextStream

LONG_ID_BYTES = 12
"""Random bytes of a call id in OpenAI's form: ``call_`` and 24 hex digits."""
SHORT_ID_DIGITS = 9
"""The only length that Mistral's templates accept."""


def long_call_id() -> str:
    """A random tool-call id in OpenAI's form."""
    return f"call_{secrets.token_hex(LONG_ID_BYTES)}"


def short_call_id() -> str:
    """A random tool-call id in the form that Mistral's templates need."""
    return secrets.token_hex(SHORT_ID_DIGITS)[:SHORT_ID_DIGITS]


class IncrementalReader:
    """Reads one reply; implements :class:`~etude.tokens.messages.ReplyReader`.

    Without ``tools`` there are no calls: a reply that looks like one is text. ``new_id`` makes ids for calls without
    one. Raises ``ValueError`` for an empty stop string.
    """

    def __init__(
        self,
        stream: TextStream,
        marks: ReplyMarks,
        tools: Sequence[Tool] = (),
        *,
        stops: Sequence[str] = (),
        single_call: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty: it would end every reply before it begins")
        self._stream = stream
        self._scanner = _Scanner(marks, tools, new_id, single_call=single_call)
        self._stops = _Stops(stops)
        self._is_plain = self._scanner.is_plain and not stops
        self._may_stop = bool(stops) or (single_call and self._scanner.has_calls)
        self._fed: list[tuple[int, TextState, Sequence[int]]] = []  # only if the reader may end the reply
        self._num_characters = 0
        self._stopped_after: int | None = None
        self._stop_text: str | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def stopped_after(self) -> int | None:
        """Number of tokens up to the one that completed a stop string or the only call; ``None`` before."""
        return self._stopped_after

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stop_text

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The parts that the next tokens add; nothing once the reply has ended."""
        if self._stopped_after is not None:
            return []
        text = self._read(token_ids) if self._may_stop else self._stream.feed(token_ids)
        if self._is_plain:
            if not text:
                return []
            self._texts.append(text)
            return [TextDelta(text)]
        return self._scan(text)

    def finish(self) -> list[Delta]:
        """The parts that were held back; call it once."""
        deltas: list[Delta] = []
        if self._stopped_after is None:
            deltas = self._scan(self._stream.finish())
        if self._stopped_after is None:
            deltas += self._deliver(self._stops.finish())
        rest = self._scanner.finish()
        self._keep(rest)
        return deltas + rest

    def message(self) -> ChatMessage:
        """The delivered part of the reply."""
        return ChatMessage(
            role="assistant",
            content="".join(self._texts),
            thinking="".join(self._thoughts),
            tool_calls=tuple(self._calls),
        )

    def _read(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens; records them to find later which token completed a text."""
        self._fed.append((self._num_characters, self._stream.state(), token_ids))
        text = self._stream.feed(token_ids)
        self._num_characters += len(text)
        return text

    def _scan(self, text: str) -> list[Delta]:
        released, stop = self._stops.feed(text)
        deltas = self._deliver(released)
        if stop is not None and self._stopped_after is None:
            self._stop_text = stop
            self._stopped_after = self._tokens_until(self._stops.ended_at)
        return deltas

    def _deliver(self, text: str) -> list[Delta]:
        deltas = self._scanner.feed(text)
        self._keep(deltas)
        if self._scanner.ended_at is not None:
            self._stopped_after = self._tokens_until(self._scanner.ended_at)
        return deltas

    def _tokens_until(self, characters: int) -> int:
        """Number of tokens, at least one, that completed the first ``characters`` characters of the raw text."""
        last = bisect_left(self._fed, characters, key=lambda fed: fed[0]) - 1
        num_tokens = sum(len(token_ids) for _, _, token_ids in self._fed[:last])
        reached, state, token_ids = self._fed[last]
        for length in self._stream.lengths(state, token_ids):
            num_tokens += 1
            reached += length
            if reached >= characters:
                break
        return num_tokens  # all tokens, if the end of the reply completed a character

    def _keep(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self._texts.append(text)
                case ThinkingDelta(text):
                    self._thoughts.append(text)
                case CallDelta(_, call_id, name, "") if name:
                    self._calls.append(ToolCall(call_id=call_id, name=name, arguments=""))
                case CallDelta(index, arguments=arguments):
                    begun = self._calls[index]
                    self._calls[index] = ToolCall(call_id=begun.call_id, name=begun.name, arguments=arguments)


class _Stops:
    """Passes text on until a stop string is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self._released = 0
        self.ended_at = 0
        """Characters of the raw text up to the end of the stop string, once one is complete."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that cannot be part of a stop string, the stop string that is now complete)."""
        if not self._stops:
            return text, None
        text = self._pending + text
        hits = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            end, start, stop = min(hits)
            self._pending = ""
            self.ended_at = self._released + end
            return text[:start], stop
        released = len(text) - _partial(text, self._stops)
        self._pending = text[released:]
        self._released += released
        return text[:released], None

    def finish(self) -> str:
        """The text that was held back."""
        pending, self._pending = self._pending, ""
        return pending


class _Phase(Enum):
    START = auto()
    """Only white space so far: a thought may open."""
    THINKING = auto()
    ANSWER = auto()
    """After a thought; white space is dropped."""
    TEXT = auto()
    CALL = auto()
    """From a call's opening until the call is complete."""
    BETWEEN = auto()
    """After a call; white space and the grammar's separators are dropped."""
    ENDED = auto()
    """The only requested call is complete."""


_NEXT: Mapping[_Phase, frozenset[_Phase]] = MappingProxyType(
    {
        _Phase.START: frozenset({_Phase.THINKING, _Phase.TEXT, _Phase.CALL}),
        _Phase.THINKING: frozenset({_Phase.ANSWER}),
        _Phase.ANSWER: frozenset({_Phase.TEXT, _Phase.CALL}),
        _Phase.TEXT: frozenset({_Phase.CALL}),
        _Phase.CALL: frozenset({_Phase.TEXT, _Phase.BETWEEN, _Phase.ENDED}),
        _Phase.BETWEEN: frozenset({_Phase.TEXT, _Phase.CALL}),
        _Phase.ENDED: frozenset(),
    }
)


class _Scanner:
    """Converts raw text to deltas. ``_rest`` is the undecided text; each phase has one method that consumes it."""

    def __init__(
        self, marks: ReplyMarks, tools: Sequence[Tool], new_id: Callable[[], str] | None, *, single_call: bool
    ) -> None:
        self._grammar = marks.grammar if tools else None
        self._thinking = marks.thinking
        self._tools = {tool.name: tool for tool in tools}
        self._openings = self._grammar.openings + self._grammar.starts if self._grammar else ()
        self._framing = marks.grammar.framing if marks.grammar else ()
        is_short = self._grammar is not None and self._grammar.short_ids
        self._new_id = new_id or (short_call_id if is_short else long_call_id)
        self._single_call = single_call
        self.has_calls = self._grammar is not None
        """True if there can be tool calls."""
        self.is_plain = self._grammar is None and self._thinking is None and not self._framing
        """True if there can only be text."""
        self._phase = _Phase.THINKING if marks.starts_thinking and marks.thinking else _Phase.START
        self._rest = ""
        self._taken = 0  # characters before `_rest`
        self._deltas: list[Delta] = []
        self._thought = False
        self._num_calls = 0
        self._call_end: CallEnd | None = None
        self.ended_at: int | None = None
        """Characters up to the end of the only requested call, once it is complete."""

    def feed(self, text: str) -> list[Delta]:
        """The parts that more text decides."""
        self._rest += text
        while self._phase is not _Phase.ENDED and _STEPS[self._phase](self):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """The undecided text, as a thought or text; a complete call needs no closing mark at the end."""
        if self._phase is _Phase.CALL and self._call_end is not None:
            self._close(len(self._rest))
        if self._phase is _Phase.THINKING:
            self._emit_thought(len(self._rest))
        else:
            self._emit_text(len(self._rest))
        deltas, self._deltas = self._deltas, []
        return deltas

    def _move(self, phase: _Phase) -> bool:
        assert phase in _NEXT[self._phase], f"a reply cannot go from {self._phase} to {phase}"
        self._phase = phase
        return True

    def _start(self) -> bool:
        stripped = self._rest.lstrip()
        if not stripped:
            return False
        if self._thinking is not None:
            if stripped.startswith(self._thinking.opening):
                self._drop(len(self._rest) - len(stripped) + len(self._thinking.opening))
                return self._move(_Phase.THINKING)
            if self._thinking.opening.startswith(stripped):
                return False
        return self._begin()

    def _answer(self) -> bool:
        self._drop(len(self._rest) - len(self._rest.lstrip()))
        return bool(self._rest) and self._begin()

    def _begin(self) -> bool:
        """Move from START or ANSWER to the next phase: a call or text."""
        stripped = self._rest.lstrip()
        if stripped.startswith(self._openings + self._framing):
            return self._mark(self._openings)
        if any(mark.startswith(stripped) for mark in self._openings + self._framing):
            return False
        return self._move(_Phase.TEXT)

    def _mark(self, openings: tuple[str, ...]) -> bool:
        """Consume the mark at the beginning of the undecided text, after white space: drop framing, or open a call."""
        stripped = self._rest.lstrip()
        at = len(self._rest) - len(stripped)
        if any(mark != stripped and mark.startswith(stripped) for mark in openings + self._framing):
            return False
        framing = next((mark for mark in self._framing if stripped.startswith(mark)), None)
        if framing is not None:
            self._drop(at + len(framing))
            return True
        assert self._grammar is not None
        self._call_end = CallEnd(self._grammar, at)
        return self._move(_Phase.CALL)

    def _think(self) -> bool:
        assert self._thinking is not None
        closing = self._thinking.closing
        at = self._rest.find(closing)
        if at >= 0:
            self._emit_thought(len(self._rest[:at].rstrip()))
            self._drop(self._rest.index(closing) + len(closing))
            return self._move(_Phase.ANSWER)
        decided = len(self._rest) - _partial(self._rest, (closing,))
        self._emit_thought(len(self._rest[:decided].rstrip()))
        return False

    def _say(self) -> bool:
        openings = () if self._grammar and self._grammar.first else self._openings
        marks = openings + self._framing
        places = [at for at in map(self._rest.find, marks) if at >= 0]
        if places:
            self._emit_text(len(self._rest[: min(places)].rstrip()))
            return self._mark(openings)
        decided = len(self._rest) - _partial(self._rest, marks)
        self._emit_text(len(self._rest[:decided].rstrip()) if marks else len(self._rest))
        return False

    def _call(self) -> bool:
        assert self._call_end is not None
        end = self._call_end.find(self._rest)
        return end is not None and self._close(end)

    def _close(self, end: int) -> bool:
        """Deliver a complete call; one that cannot be parsed becomes text."""
        assert self._grammar is not None and self._call_end is not None
        call = self._grammar.parse(self._rest[self._call_end.start : end].strip(), self._tools)
        self._call_end = None
        if call is None:
            self._emit_text(end)
            return self._move(_Phase.TEXT)
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._deltas.append(CallDelta(index, call_id=call.call_id or self._new_id(), name=call.name))
        self._deltas.append(CallDelta(index, arguments=call.arguments))
        self._drop(end)
        if self._single_call:
            self.ended_at = self._taken
            self._rest = ""
            return self._move(_Phase.ENDED)
        return self._move(_Phase.BETWEEN)

    def _go_on(self) -> bool:
        assert self._grammar is not None
        self._drop(len(self._rest) - len(self._rest.lstrip()))
        for mark in self._grammar.between:
            if self._rest.startswith(mark):
                self._drop(len(mark))
                return True
        openings = self._openings + self._grammar.again
        if self._rest.startswith(openings):
            return self._mark(openings)
        if any(mark.startswith(self._rest) for mark in openings + self._grammar.between):
            return False
        return self._move(_Phase.TEXT)

    def _emit_text(self, length: int) -> None:
        if length:
            self._deltas.append(TextDelta(self._rest[:length]))
            self._drop(length)

    def _emit_thought(self, length: int) -> None:
        text = self._rest[:length] if self._thought else self._rest[:length].lstrip()
        if text:
            self._thought = True
            self._deltas.append(ThinkingDelta(text))
        self._drop(length)

    def _drop(self, length: int) -> None:
        self._rest = self._rest[length:]
        self._taken += length


_STEPS: Mapping[_Phase, Callable[[_Scanner], bool]] = MappingProxyType(
    {
        _Phase.START: _Scanner._start,
        _Phase.THINKING: _Scanner._think,
        _Phase.ANSWER: _Scanner._answer,
        _Phase.TEXT: _Scanner._say,
        _Phase.CALL: _Scanner._call,
        _Phase.BETWEEN: _Scanner._go_on,
    }
)
"""Phase → method that consumes its text; true if there may be more to consume."""


def read_text(text: str, marks: ReplyMarks, tools: Sequence[Tool]) -> tuple[str, tuple[ParsedCall, ...]]:
    """Parse a whole reply that is already text, control tokens included."""
    scanner = _Scanner(marks, tools, None, single_call=False)
    deltas = [*scanner.feed(text), *scanner.finish()]
    content = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta | ThinkingDelta))
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    pairs = zip(calls[::2], calls[1::2], strict=True)
    return content, tuple(ParsedCall(name=begun.name, arguments=more.arguments) for begun, more in pairs)


def _partial(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper prefix of a word."""
    longest = 0
    for word in words:
        at = text.find(word[0], max(0, len(text) - len(word) + 1))
        while at >= 0:
            if word.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(word[0], at + 1)
    return longest
