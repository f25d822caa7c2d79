"""One session's conversations, token for token: the prompts and the sampled replies.

    call ──▶ prompt = ids of the deepest reply that its messages begin with    sampled, never tokenised again
                      + the id that ends a reply, if that one was truncated
                      + the new messages and the opening of the next reply     the only text that is tokenised

Owns the rule that turns a call into token ids (:class:`Conversation`), the tree of messages (:class:`Node`), the turns
(:class:`TurnStore`), and the answers, so that a retry gets the recorded answer. Pure; knows no HTTP, no engines and no
keys.

Text that the model wrote is never tokenised again, because the result may differ from the sampled tokens. A history
that was edited or summarised continues from its unchanged prefix or opens a new branch. The tools and the chat
template's kwargs belong to the history, because they precede it.

    system ─ user ──▶ reply A (turn 0) ─ tool output ──▶ reply B (turn 1)
                │                     └─ edited output ─▶ reply C (turn 2)      an edited history opens a branch
                └───▶ reply D (turn 3)                                          asked again, or with n > 1

Two messages count as equal even if a client changed them on the way back (:func:`alike`). This is sound: whichever
reply is continued, the next prompt consists of ids that an engine saw and sampled, and exactly this prompt is recorded.
A rule that is too strict loses a prefix; one that is too lenient shows the model its own text where a client changed
white space. Neither makes a record wrong. Messages are compared, not hashed: an unchanged history costs little more
than comparing its bytes, replies that look alike can be told apart, and no text is stored twice.

    buffer  ▒▒▒▒▒▒███▒▒▒▒▒███▒▒▒▒▒▒▒▒▒▒ … room to grow        prompt of turn 0  ▒▒▒▒▒▒
    turn 0  ──────┤  ├ what it sampled                       prompt of turn 1  ▒▒▒▒▒▒███▒▒▒▒▒
    turn 1  ──────────────┤  ├                               prompt of turn 2  ▒▒▒▒▒▒███▒▒▒▒▒███▒▒▒▒▒▒▒▒▒▒
    turn 2  ───────────────────────────┤

Every turn reads all earlier turns again, so storing whole prompts would take memory quadratic in the length of the
conversation. All prompts of a branch are prefixes of one :class:`TokenBuffer`: a token that was read takes at most 6
bytes no matter how many turns read it, a sampled token 12 more.

A conversation can be forked. The fork's first calls must repeat the answered ones in order: the harness runs again from
its start, gets the recorded answers, and only later calls are sampled.

A call may have a request id. A call with the same id and the same content is a retry by a caller that never got the
answer. It gets the recorded turn, so no reply that its caller never saw is stored as a turn and trained on.

Array legend: P prompt tokens of a turn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
import orjson

from etude.errors import SessionLost
from etude.gateway.api.calls import Answer, Call
from etude.tokens.messages import ChatFormat, ChatMessage, Tool
from etude.types import Ids, LiveSession, Turn

MAX_TURNS = 4096
"""Most model calls in one session: days of work, at some 4 KB each besides their tokens."""
MAX_TOKENS = 2**24
"""Most tokens in one session: eighty windows of 200k."""
FIRST_BLOCK = 256
"""Ids compared in the first step: prompts of two branches mostly differ early."""
NO_IDS: Ids = np.empty(0, np.int32)
"""Placeholder for a prompt that is stored in a buffer."""
EXACT, ALIKE = 2, 1
"""Likeness of a message to a node: identical, or possibly changed by a client. 0: a different message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The token ids of a prompt, which an engine continues."""

    token_ids: Ids
    """[P]"""
    reused: int
    """Number of leading ids that are an earlier turn's prompt and completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlace:
    """Place of an answer in its session."""

    first: int
    """Index of its first turn."""
    turns: tuple[Turn, ...]
    follows: int | None
    """Index of the turn whose reply its call continued; ``None``: no such turn, or the prompt was not messages."""
    earlier: Turn | None
    """The turn of ``follows``."""
    message: str
    """The last user message after that reply; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedAnswer:
    """An answer with its call."""

    call: Call
    """Without messages, preamble and prompt: the tree and the turns have them."""
    end: "Node | None"
    """The last message of its conversation; ``None`` for a raw prompt."""
    answer: Answer
    """With turns that lack their prompts."""
    first_turn: int
    """Index of its first turn."""

    def whole(self, turns: "TurnStore") -> Answer:
        """The answer with whole turns."""
        indexed = enumerate(self.answer.replies, self.first_turn)
        return replace(self.answer, replies=tuple(replace(reply, turn=turns[i].whole()) for i, reply in indexed))


_Preamble: TypeAlias = tuple[tuple[Tool, ...], bytes]
"""The tools, and the chat template's kwargs as JSON: everything that precedes a conversation."""


def _preamble(call: Call) -> _Preamble:
    return call.tools, orjson.dumps(dict(call.template_kwargs), option=orjson.OPT_SORT_KEYS)


class Conversation:
    """The conversation tree of one session, its turns and answers.

    ``turns`` limits their number; ``None``: an empty store with the default limits.
    """

    def __init__(self, session_id: str, chat_format: ChatFormat, turns: "TurnStore | None" = None) -> None:
        self.session_id = session_id
        self.closed = False
        """True once no further turn is accepted."""
        self.on_close: Callable[[], None] | None = None
        """Called when the conversation closes to further turns."""
        self.admitted = bool(turns)
        """True once the gateway has decided whether to record this as a live session."""
        self.live: LiveSession | None = None
        """The live session that records it; ``None``: it is not recorded."""
        self.stored_as = ""
        """Id of the live session that has recorded it, also after that ended; empty: nothing of it is stored."""
        self.stored_turns = 0
        """Number of its turns that are known to be on disk."""
        self._format = chat_format
        self._turns = TurnStore() if turns is None else turns
        self._trees: list[tuple[_Preamble, Node]] = []
        self._last_search: tuple[Call, Node, TreeMatch] | None = None  # until a turn is recorded
        self._answers: dict[str, _RecordedAnswer] = {}  # by answer id, oldest first; at most one per turn
        self._requests: dict[str, list[_RecordedAnswer]] = {}
        self._replays: deque[_RecordedAnswer] = deque()  # calls that a fork must repeat, the next one first

    @property
    def turns(self) -> list[Turn]:
        """The turns in the order of recording; prompts of one branch are views of one array."""
        return self._turns.whole()

    def prompt(self, call: Call) -> Prompt:
        """The token ids that a model continues in order to answer ``call``.

        Raises ``ValueError``, with a message for the caller, if the template or the vocabulary rejects the call, for an
        unknown ``previous``, and, as :class:`SessionFull`, if no turns or tokens are left.
        """
        self._turns.check_room(call.sampling.count)
        if call.prompt is not None:
            return self._raw_prompt(call.prompt)
        messages = self._messages(call)
        if not messages:
            raise ValueError("there is nothing to answer: give messages or a prompt")
        _, match = self._search(call, messages)
        prompt = self._continued(match, messages, call)
        if prompt is not None:
            return prompt
        return Prompt(
            token_ids=np.array(self._format.open(messages, call.tools, call.template_kwargs), np.int32), reused=0
        )

    def answered(self, request_id: str, call: Call) -> Answer | None:
        """The answer that this same request got before; ``None`` if there is none or the id is empty."""
        recorded = self._requests.get(request_id) if request_id else None
        return self._same_call(call, recorded) if recorded else None

    def replayed(self, call: Call, request_id: str = "") -> Answer | None:
        """The answer that the call got before the fork; ``None`` once all of those calls have been repeated.

        Raises ``ValueError`` for a call that is not the next one to repeat.
        """
        if not self._replays:
            return None
        recorded = self._replays[0]
        answer = self._same_call(call, [recorded])
        if answer is None:
            raise ValueError(
                f"session {self.session_id} is a fork that must first repeat {len(self._replays)} calls; this call "
                "differs from the next of them: a harness must repeat its calls exactly"
            )
        self._replays.popleft()
        if request_id:
            self._requests.setdefault(request_id, []).append(recorded)
        return answer

    def last_answer(self, call: Call) -> Answer | None:
        """The newest answer to an equal call, for a caller that marks a retry without naming the request."""
        return self._same_call(call, list(self._answers.values()))

    def record(self, call: Call, answer: Answer, request_id: str = "") -> Answer:
        """Store the turns of ``answer`` and the state to continue from; return the answer that counts.

        If another attempt of the same request was answered meanwhile, that answer counts and this one is dropped.
        Raises :class:`~etude.errors.SessionLost` if the session was closed meanwhile.
        """
        if self.closed:
            raise SessionLost(f"session {self.session_id} was closed during the call; its turns were not recorded")
        if (earlier := self.answered(request_id, call)) is not None:
            return earlier
        end, continued = self._place(call, answer)
        self._last_search = None  # the tree has grown, and the call has text of its own
        first_turn = len(self._turns)
        self._turns.record([reply.turn for reply in answer.replies], continued)
        if end is not None:
            for index, reply in enumerate(answer.replies, first_turn):
                end.add(reply.message, turn=index)
        replies = tuple(
            replace(reply, turn=self._turns[index].without_prompt)
            for index, reply in enumerate(answer.replies, first_turn)
        )
        recorded = _RecordedAnswer(
            call=Call(sampling=call.sampling, single_call=call.single_call, instructed=call.instructed),
            end=end,
            answer=replace(answer, replies=replies),
            first_turn=first_turn,
        )
        self._answers[answer.answer_id] = recorded
        if request_id:
            self._requests.setdefault(request_id, []).append(recorded)
        return answer

    def placement(self, answer: Answer) -> AnswerPlace:
        """The place of a recorded answer. Raises ``KeyError`` for one that is not recorded."""
        recorded = self._answers[answer.answer_id]
        node, message = recorded.end, ""
        while node is not None and node.turn is None:
            if not message and node.message.role == "user":
                message = node.message.content
            node = node.parent
        follows = None if node is None else node.turn
        return AnswerPlace(
            first=recorded.first_turn,
            turns=tuple(reply.turn for reply in answer.replies),
            follows=follows,
            earlier=None if follows is None else self._turns[follows].whole(),
            message=message,
        )

    def close(self) -> None:
        """Accept no further turn, and free the text."""
        if self.on_close is not None and not self.closed:
            self.on_close()
        self.closed = True
        for _, root in self._trees:
            free_tree(root)
        self._trees.clear()
        self._last_search = None
        self._answers.clear()
        self._requests.clear()
        self._replays.clear()

    def fork(self, session_id: str) -> "Conversation":
        """A conversation with the same turns, messages and answers, which continues independently once the calls so far
        have been repeated.
        """
        forked = Conversation(session_id, self._format, self._turns.copy())
        copies: dict[Node, Node] = {}
        for preamble, root in self._trees:
            copies |= copy_tree(root)
            forked._trees.append((preamble, copies[root]))
        for answer_id, recorded in self._answers.items():
            end = None if recorded.end is None else copies[recorded.end]
            forked._answers[answer_id] = replace(recorded, end=end)
        forked._replays.extend(forked._answers.values())
        return forked

    def _messages(self, call: Call) -> Sequence[ChatMessage]:
        """The whole conversation of a call, beginning with that of the answer it names.

        Instructions hold for one call: those of the earlier call are dropped, those of this call come first.
        """
        if call.previous is None:
            return call.messages
        recorded = self._answers.get(call.previous)
        if recorded is None or recorded.end is None:
            raise ValueError(f"previous answer {call.previous!r} is unknown: it must be of this session, to messages")
        earlier = recorded.end.path()[1 if recorded.call.instructed else 0 :]
        own = 1 if call.instructed else 0
        return [*call.messages[:own], *earlier, recorded.answer.replies[0].message, *call.messages[own:]]

    def _tree(self, call: Call) -> "Node":
        """The tree for the preamble of a call; if none exists, a new one that is not yet registered."""
        preamble = _preamble(call)
        return next((root for other, root in self._trees if other == preamble), None) or new_root()

    def _search(self, call: Call, messages: Sequence[ChatMessage]) -> "tuple[Node, TreeMatch]":
        """The tree of a call and the match of its ``messages``. Trees grow only with turns, so a call is searched for
        once if no other turn is recorded before its own.
        """
        if self._last_search is None or self._last_search[0] is not call:
            root = self._tree(call)
            self._last_search = call, root, find(root, messages)
        _, root, match = self._last_search
        return root, match

    def _continued(self, match: "TreeMatch", messages: Sequence[ChatMessage], call: Call) -> Prompt | None:
        """The prompt after the matched reply; ``None`` without one, or if the template cannot be applied there."""
        if match.reply is None or match.reply.turn is None:
            return None
        turn = self._turns[match.reply.turn]
        # The reply as its caller sent it: if the caller gave the calls new ids, the ids of the tools' output match
        # them.
        reply = messages[match.depth - 1]
        try:
            ids = self._format.extend(reply, messages[match.depth :], call.tools, call.template_kwargs)
        except ValueError:
            return None  # rendering everything afresh is exact too, and reports faulty messages
        sampled = turn.without_prompt.completion_ids
        ended = len(sampled) and int(sampled[-1]) in self._format.stop_ids
        ids = ids if ended else [self._format.stop_ids[0], *ids]
        whole = np.concatenate([turn.prompt_ids, sampled, np.array(ids, np.int32)])
        return Prompt(token_ids=whole, reused=turn.tokens)

    def _raw_prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        ids = self._raw_ids(prompt)
        turn = self._turns.longest_prefix(ids)
        return Prompt(token_ids=ids, reused=0 if turn is None else self._turns[turn].tokens)

    def _raw_ids(self, prompt: str | tuple[int, ...]) -> Ids:
        ids = self._format.encode(prompt) if isinstance(prompt, str) else prompt
        if not len(ids):
            raise ValueError("the prompt has no token: there is nothing to continue")
        wrong = next((token for token in (min(ids), max(ids)) if not 0 <= token < self._format.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the prompt has token id {wrong}: ids are 0 … {self._format.vocab_size - 1}")
        return np.array(ids, np.int32)

    def _place(self, call: Call, answer: Answer) -> "tuple[Node | None, int | None]":
        """The node at which a call ends, added if it is new, and the turn that its prompt continues."""
        if call.prompt is not None:
            return None, self._turns.longest_prefix(answer.replies[0].turn.prompt_ids)
        messages = self._messages(call)
        root, match = self._search(call, messages)
        if not root.children:
            self._trees.append((_preamble(call), root))
        return insert(match, messages), None if match.reply is None else match.reply.turn

    def _same_call(self, call: Call, candidates: Sequence[_RecordedAnswer]) -> Answer | None:
        """The newest answer to a call that equals ``call`` apart from streaming."""
        try:
            ids = None if call.prompt is None else self._raw_ids(call.prompt)
            ends = find(self._tree(call), self._messages(call)).ends if ids is None else ()
        except ValueError:
            return None  # it cannot have been answered before
        for recorded in reversed(candidates):
            same = any(end is recorded.end for end in ends)
            if ids is not None and recorded.end is None:
                same = np.array_equal(ids, self._turns[recorded.first_turn].prompt_ids)
            settings = (recorded.call.sampling, recorded.call.single_call)
            if same and settings == (call.sampling, call.single_call):
                return recorded.whole(self._turns)
        return None


@dataclass(slots=True, eq=False)
class Node:
    """One message in a conversation tree."""

    message: ChatMessage
    """The message as first received, or as parsed from a reply."""
    parent: "Node | None" = None
    """``None`` for the root, which has no message."""
    turn: int | None = None
    """The turn of the session that sampled it; ``None``: no turn did."""
    children: "list[Node]" = field(default_factory=list)
    echo: ChatMessage | None = None
    """The message as its caller last sent it back: comparing with it avoids parsing the arguments of calls again."""

    def add(self, message: ChatMessage, turn: int | None = None) -> "Node":
        """Add a child node."""
        child = Node(message, self, turn)
        self.children.append(child)
        return child

    def path(self) -> list[ChatMessage]:
        """The conversation up to this message."""
        messages, node = [], self
        while node.parent is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def likeness(self, message: ChatMessage) -> int:
        """``EXACT``, ``ALIKE`` or 0."""
        if message == self.message:
            return EXACT
        if message == self.echo:
            return ALIKE
        if not alike(message, self.message):
            return 0
        self.echo = message
        return ALIKE


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMatch:
    """The longest prefix of a conversation that is in a tree."""

    reply: Node | None
    """The deepest node on the path that a turn sampled; ``None`` if there is none."""
    depth: int
    """Number of messages up to and including ``reply``; 0 if there is none."""
    last: Node
    """The deepest node of any kind."""
    last_depth: int
    """Number of messages up to ``last``."""
    ends: tuple[Node, ...]
    """Every node at which the whole conversation ends; empty if the tree does not contain all of it."""


def new_root() -> Node:
    """An empty conversation tree."""
    return Node(ChatMessage(role="system"))


def find(root: Node, messages: Sequence[ChatMessage]) -> TreeMatch:
    """Find the longest prefix of ``messages`` in a tree.

    If several replies look alike, all are followed. Of equally deep matches the closest wins, then the newest: the
    caller repeated the call because it never saw the older reply.
    """
    level = last = [(root, 0)]
    replies, depth, last_depth = list[tuple[Node, int]](), 0, 0
    for count, message in enumerate(messages, 1):
        level = [
            (child, fit + likeness)
            for node, fit in level
            for child in node.children
            if (likeness := child.likeness(message))
        ]
        if not level:
            break
        last, last_depth = level, count
        if sampled := [match for match in level if match[0].turn is not None]:
            replies, depth = sampled, count
    return TreeMatch(
        reply=_best(replies) if replies else None,
        depth=depth,
        last=_best(last),
        last_depth=last_depth,
        ends=tuple(node for node, _ in last) if last_depth == len(messages) else (),
    )


def insert(match: TreeMatch, messages: Sequence[ChatMessage]) -> Node:
    """Add ``messages`` to a tree after the match of :func:`find`; return the node of the last one."""
    node = match.last
    for message in messages[match.last_depth :]:
        node = node.add(message)
    return node


def copy_tree(root: Node) -> dict[Node, Node]:
    """Copy a whole tree; return each node with its copy. Messages are immutable and shared."""
    copies, nodes = {root: Node(root.message)}, [root]
    while nodes:
        node = nodes.pop()
        for child in node.children:
            copies[child] = copies[node].add(child.message, child.turn)
            copies[child].echo = child.echo
        nodes.extend(node.children)
    return copies


def free_tree(root: Node) -> None:
    """Unlink the nodes of a tree, so that its memory is freed at once and not only by the garbage collector."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        node.children.clear()


def alike(one: ChatMessage, other: ChatMessage) -> bool:
    """True if two messages may be the same message, changed by a client between calls.

    For an assistant message, the content without surrounding white space and the names and arguments of its calls
    count. Thinking and the ids of calls do not, as many clients do not send them back. For other messages the content
    counts, but not the id of the call that a tool's output answers.
    """
    if one.role != other.role:
        return False
    if one.role != "assistant":
        return one.content == other.content
    return (
        one.content.strip() == other.content.strip()
        and len(one.tool_calls) == len(other.tool_calls)
        and all(
            mine.name == theirs.name and _same_arguments(mine.arguments, theirs.arguments)
            for mine, theirs in zip(one.tool_calls, other.tool_calls, strict=True)
        )
    )


def _best(matches: Sequence[tuple[Node, int]]) -> Node:
    return max(matches, key=_rank)[0]


def _rank(match: tuple[Node, int]) -> tuple[int, int]:
    node, fit = match
    return fit, -1 if node.turn is None else node.turn


def _same_arguments(one: str, other: str) -> bool:
    """Equality as JSON, ignoring the order of keys and white space; as text if either is not JSON."""
    if one == other:
        return True
    try:
        return bool(orjson.loads(one or "{}") == orjson.loads(other or "{}"))
    except (ValueError, RecursionError):  # the latter from comparing JSON nested a thousand levels deep
        return False


class SessionFull(ValueError):
    """The session has reached its limit of turns or tokens. The message is meant for the caller."""


class TokenBuffer:
    """The token ids of one conversation branch, shared by its turns.

    Append-only; it holds only ids of recorded prompts.
    """

    def __init__(self) -> None:
        self._ids = NO_IDS
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def prefix(self, tokens: int) -> Ids:
        """The first ``tokens`` ids, read-only and not copied."""
        ids = self._ids[:tokens]
        ids.flags.writeable = False
        return ids

    def shared_with(self, ids: Ids) -> int:
        """Number of leading ids that the buffer and ``ids`` share. The time is proportional to this number."""
        shared, block, most = 0, FIRST_BLOCK, min(self._length, len(ids))
        while shared < most:
            end = min(shared + block, most)
            differs = self._ids[shared:end] != ids[shared:end]
            if differs.any():
                return shared + int(differs.argmax())
            shared, block = end, 2 * block
        return most

    def fits(self, ids: Ids) -> bool:
        """True if ``ids`` are a prefix of the buffer, or the buffer is a prefix of ``ids``."""
        most = min(self._length, len(ids))
        return np.array_equal(self._ids[:most], ids[:most])

    def extend(self, ids: Ids) -> None:
        """Make ``ids``, which must fit the buffer, a prefix of it."""
        if len(ids) <= self._length:
            return
        if len(ids) > len(self._ids):
            longer = np.empty(len(ids) + len(ids) // 2, np.int32)
            longer[: self._length] = self._ids[: self._length]
            self._ids = longer
        self._ids[self._length : len(ids)] = ids[self._length :]
        self._length = len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """A turn whose prompt is in the token buffer of its branch."""

    buffer: TokenBuffer
    prompt_tokens: int
    without_prompt: Turn

    @property
    def prompt_ids(self) -> Ids:
        """[P] a view of the buffer."""
        return self.buffer.prefix(self.prompt_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt_tokens + len(self.without_prompt.completion_ids)

    def whole(self) -> Turn:
        """The turn as it was recorded."""
        return replace(self.without_prompt, prompt_ids=self.prompt_ids)


class TurnStore:
    """All turns of one session, in the order of recording."""

    def __init__(self, *, max_turns: int = MAX_TURNS, max_tokens: int = MAX_TOKENS) -> None:
        self.tokens = 0
        """Tokens in memory: those of every branch, with sampled tokens counted twice."""
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._turns: list[StoredTurn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, turn: int) -> StoredTurn:
        return self._turns[turn]

    def whole(self) -> list[Turn]:
        """The turns as they were recorded; prompts of one branch are views of one array."""
        return [turn.whole() for turn in self._turns]

    def check_room(self, turns: int) -> None:
        """Raise :class:`SessionFull` unless ``turns`` more turns may be recorded.

        Concurrent calls may exceed the limit of tokens, by one context each: the length of a sample is not known
        before.
        """
        if len(self) + turns > self._max_turns:
            raise SessionFull(
                f"the session has had {len(self)} of its {self._max_turns} turns, there is no room for {turns} more: "
                "open a new one"
            )
        if self.tokens >= self._max_tokens:
            raise SessionFull(
                f"the session holds {self.tokens} tokens, {self._max_tokens} is the most: "
                "raise gateway.max_session_tokens, or open a new one"
            )

    def record(self, turns: Sequence[Turn], continued: int | None) -> None:
        """Record ``turns``, which share one prompt, as continuing turn ``continued``, or no turn.

        A prompt that does not fit that turn's branch gets a buffer of its own.
        """
        prompt_ids = turns[0].prompt_ids
        buffer = TokenBuffer() if continued is None else self._turns[continued].buffer
        buffer = buffer if buffer.fits(prompt_ids) else TokenBuffer()
        before = len(buffer)
        buffer.extend(prompt_ids)
        self.tokens += len(buffer) - before + sum(len(turn.completion_ids) for turn in turns)
        for turn in turns:
            without_prompt = replace(turn, prompt_ids=NO_IDS)
            stored = StoredTurn(buffer=buffer, prompt_tokens=len(prompt_ids), without_prompt=without_prompt)
            self._turns.append(stored)

    def longest_prefix(self, ids: Ids) -> int | None:
        """The turn with the most tokens, prompt and completion, that is a prefix of ``ids``; of equal ones
        the newest.
        """
        best, most = None, 0
        shared: dict[TokenBuffer, int] = {}
        for index, turn in enumerate(self._turns):
            if not most <= turn.tokens <= len(ids):
                continue
            if turn.buffer not in shared:
                shared[turn.buffer] = turn.buffer.shared_with(ids)
            behind, sampled = ids[turn.prompt_tokens : turn.tokens], turn.without_prompt.completion_ids
            if turn.prompt_tokens <= shared[turn.buffer] and np.array_equal(behind, sampled):
                best, most = index, turn.tokens
        return best

    def copy(self) -> Self:
        """A copy of the turns so far. Buffers are shared: the first store to continue extends them, the other makes its
        own.
        """
        copied = type(self)(max_turns=self._max_turns, max_tokens=self._max_tokens)
        copied.tokens = self.tokens
        copied._turns = list(self._turns)
        return copied
