"""One session's conversations, token for token: what a model is asked to continue, and what it said.

Owns the rule by which a call becomes token ids, and the answers, so that a retry is given the one that is recorded. The
turns are kept by :mod:`etude.gateway.capture.token_buffer`. Knows neither HTTP nor engines nor keys; pure.

    call ──▶ prompt = ids of the deepest reply that its messages begin with    sampled, never tokenised again
                      + the id that ends a reply, if that one was cut
                      + the new messages and the opening of the next reply     the only text that is tokenised

Text that the model wrote is not tokenised again because it need not come back as the tokens that were sampled. A
history that was edited or summarised continues from what is left of it or opens a new branch; the tools and the chat
template's kwargs are part of the history, for they stand before it. :mod:`etude.gateway.capture.tree` finds the reply.

A conversation can be forked. The fork's first calls must be those that were answered before, in their order: a harness
is gone through once more from its start, gets the recorded answers, and only what it asks behind them is sampled.

A call may have a request id. One that comes again, same id and same call, is the retry of a caller that never got the
answer: it is answered by the turn that is recorded, so no reply that nobody saw is kept as a turn and trained on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import orjson

from etude.errors import SessionLost
from etude.gateway.api.calls import Answer, Call
from etude.gateway.capture.token_buffer import Tapes
from etude.gateway.capture.tree import Found, Node, dissolve, find, insert, new_root, twins_of
from etude.tokens.messages import ChatFormat, Message, Tool
from etude.types import Ids, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What an engine shall continue."""

    token_ids: Ids
    """[P]"""
    reused: int
    """How many of the ids, from the first, are an earlier turn's prompt and what was sampled behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """An answer, and to what."""

    call: Call
    """Without its messages, preamble and prompt, which are in the tree and in the turns."""
    end: Node | None
    """The last message of its conversation; ``None`` for a raw prompt."""
    answer: Answer
    """Its turns without their prompts."""
    first_turn: int
    """Index of the first of its turns."""

    def whole(self, tapes: Tapes) -> Answer:
        """The answer as it was given."""
        indexed = enumerate(self.answer.replies, self.first_turn)
        return replace(self.answer, replies=tuple(replace(reply, turn=tapes[i].whole()) for i, reply in indexed))


_Preamble: TypeAlias = tuple[tuple[Tool, ...], bytes]
"""All that stands before a conversation: the tools, and the chat template's kwargs as JSON."""


def _preamble(call: Call) -> _Preamble:
    return call.tools, orjson.dumps(dict(call.template_kwargs), option=orjson.OPT_SORT_KEYS)


class Conversation:
    """The conversation tree of one session, its turns and answers.

    The turns go onto ``tapes``, which bound how many there can be; ``None``: empty ones with the usual bounds.
    """

    def __init__(self, session_id: str, chat_format: ChatFormat, tapes: Tapes | None = None) -> None:
        self.session_id = session_id
        self.closed = False
        """Whether no turn may follow."""
        self._format = chat_format
        self._tapes = Tapes() if tapes is None else tapes
        self._trees: list[tuple[_Preamble, Node]] = []
        self._answers: dict[str, _Recorded] = {}  # by answer id, oldest first; as many as there are turns at most
        self._requests: dict[str, list[_Recorded]] = {}
        self._replays: deque[_Recorded] = deque()  # what a fork has to be asked once more, the next one first

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they were recorded; prompts of one branch are views of one array."""
        return self._tapes.whole()

    def prompt(self, call: Call) -> Prompt:
        """The token ids that a model continues to answer ``call``.

        Raises ``ValueError``, with a message for the caller, on what the template or the vocabulary does not take, on
        an unknown ``previous``, and, as :class:`~etude.gateway.capture.token_buffer.SessionFull`, when no turns or
        tokens are left.
        """
        self._tapes.check_room(call.sampling.count)
        if call.prompt is not None:
            return self._raw_prompt(call.prompt)
        messages = self._messages(call)
        if not messages:
            raise ValueError("there is nothing to answer: give messages or a prompt")
        continued = self._continued(find(self._tree(call), messages), messages, call)
        if continued is not None:
            return continued
        return Prompt(
            token_ids=np.array(self._format.open(messages, call.tools, call.template_kwargs), np.int32), reused=0
        )

    def answered(self, request_id: str, call: Call) -> Answer | None:
        """What answered this very request before; ``None`` if nothing did, or if the id is empty."""
        recorded = self._requests.get(request_id) if request_id else None
        return self._same_call(call, recorded) if recorded else None

    def replayed(self, call: Call, request_id: str = "") -> Answer | None:
        """What answered the call before the fork; ``None`` if all of that has been asked once more.

        Raises ``ValueError`` for another call than the one whose turn it is.
        """
        if not self._replays:
            return None
        recorded = self._replays[0]
        answer = self._same_call(call, [recorded])
        if answer is None:
            raise ValueError(
                f"session {self.session_id} was forked and is gone through once more, {len(self._replays)} calls from "
                "where it was; this call is not the one that came then: a harness must do the same as before"
            )
        self._replays.popleft()
        if request_id:
            self._requests.setdefault(request_id, []).append(recorded)
        return answer

    def last_answer(self, call: Call) -> Answer | None:
        """The newest answer to an equal call: what a caller gets that says it tries again, but not what."""
        return self._same_call(call, list(self._answers.values()))

    def record(self, call: Call, answer: Answer, request_id: str = "") -> Answer:
        """Keep the turns of ``answer`` and what can be continued from them; says which answer counts.

        A request that another attempt of its caller had answered meanwhile keeps that answer, and nothing is kept of
        this one. Raises :class:`~etude.errors.SessionLost` if the session was closed meanwhile.
        """
        if self.closed:
            raise SessionLost(f"session {self.session_id} was closed during the call; its turns were not recorded")
        if (known := self.answered(request_id, call)) is not None:
            return known
        end, continued = self._place(call, answer)
        first_turn = len(self._tapes)
        self._tapes.record([reply.turn for reply in answer.replies], continued)
        if end is not None:
            for index, reply in enumerate(answer.replies, first_turn):
                end.add(reply.message, turn=index)
        replies = tuple(
            replace(reply, turn=self._tapes[index].said) for index, reply in enumerate(answer.replies, first_turn)
        )
        recorded = _Recorded(
            call=Call(sampling=call.sampling, single_call=call.single_call, instructed=call.instructed),
            end=end,
            answer=replace(answer, replies=replies),
            first_turn=first_turn,
        )
        self._answers[answer.answer_id] = recorded
        if request_id:
            self._requests.setdefault(request_id, []).append(recorded)
        return answer

    def close(self) -> None:
        """Let no turn follow, and let go of the text."""
        self.closed = True
        for _, root in self._trees:
            dissolve(root)
        self._trees.clear()
        self._answers.clear()
        self._requests.clear()
        self._replays.clear()

    def fork(self, session_id: str) -> "Conversation":
        """A conversation that goes on from here by itself, once its calls so far were made again: the same turns,
        messages and answers.
        """
        forked = Conversation(session_id, self._format, self._tapes.copy())
        twins: dict[Node, Node] = {}
        for preamble, root in self._trees:
            twins |= twins_of(root)
            forked._trees.append((preamble, twins[root]))
        for answer_id, known in self._answers.items():
            forked._answers[answer_id] = replace(known, end=None if known.end is None else twins[known.end])
        forked._replays.extend(forked._answers.values())
        return forked

    def _messages(self, call: Call) -> Sequence[Message]:
        """The whole conversation of a call: that of the answer it names comes first.

        Instructions hold for one call: those of the earlier call do not come along, those of this one stand first.
        """
        if call.previous is None:
            return call.messages
        recorded = self._answers.get(call.previous)
        if recorded is None or recorded.end is None:
            raise ValueError(f"previous answer {call.previous!r} is unknown: it must be of this session, to messages")
        earlier = recorded.end.path()[1 if recorded.call.instructed else 0 :]
        own = 1 if call.instructed else 0
        return [*call.messages[:own], *earlier, recorded.answer.replies[0].message, *call.messages[own:]]

    def _tree(self, call: Call) -> Node:
        """The tree of what was said behind the preamble of a call; an empty tree that nobody keeps, if nothing was."""
        preamble = _preamble(call)
        return next((root for known, root in self._trees if known == preamble), None) or new_root()

    def _continued(self, found: Found, messages: Sequence[Message], call: Call) -> Prompt | None:
        """The prompt behind the reply that was found; ``None`` without one, or if the template cannot be put there."""
        if found.reply is None or found.reply.turn is None:
            return None
        turn = self._tapes[found.reply.turn]
        # The reply as its caller has it: should it have new ids for the calls, those of the tools' output fit them.
        reply = messages[found.depth - 1]
        try:
            ids = self._format.extend(reply, messages[found.depth :], call.tools, call.template_kwargs)
        except ValueError:
            return None  # to render all of it afresh is exact, too; if the messages are at fault, that will say so
        sampled = turn.said.completion_ids
        ended = len(sampled) and int(sampled[-1]) in self._format.stop_ids
        ids = ids if ended else [self._format.stop_ids[0], *ids]
        whole = np.concatenate([turn.prompt_ids, sampled, np.array(ids, np.int32)])
        return Prompt(token_ids=whole, reused=turn.tokens)

    def _raw_prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        ids = self._raw_ids(prompt)
        turn = self._tapes.longest_beginning(ids)
        return Prompt(token_ids=ids, reused=0 if turn is None else self._tapes[turn].tokens)

    def _raw_ids(self, prompt: str | tuple[int, ...]) -> Ids:
        ids = self._format.encode(prompt) if isinstance(prompt, str) else prompt
        if not len(ids):
            raise ValueError("the prompt has no token: there is nothing to continue")
        wrong = next((token for token in (min(ids), max(ids)) if not 0 <= token < self._format.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the prompt has token id {wrong}: ids are 0 … {self._format.vocab_size - 1}")
        return np.array(ids, np.int32)

    def _place(self, call: Call, answer: Answer) -> tuple[Node | None, int | None]:
        """Where a call ends in the tree, what was not known put in; and which turn its prompt continues."""
        if call.prompt is not None:
            return None, self._tapes.longest_beginning(answer.replies[0].turn.prompt_ids)
        root = self._tree(call)
        if not root.children:
            self._trees.append((_preamble(call), root))
        messages = self._messages(call)
        found = find(root, messages)
        return insert(found, messages), None if found.reply is None else found.reply.turn

    def _same_call(self, call: Call, candidates: Sequence[_Recorded]) -> Answer | None:
        """The newest of the answers to a call that is equal to ``call`` but for how it wants to be answered."""
        try:
            ids = None if call.prompt is None else self._raw_ids(call.prompt)
            ends = find(self._tree(call), self._messages(call)).ends if ids is None else ()
        except ValueError:
            return None  # it cannot have been answered
        for recorded in reversed(candidates):
            same = any(end is recorded.end for end in ends)
            if ids is not None and recorded.end is None:
                same = np.array_equal(ids, self._tapes[recorded.first_turn].prompt_ids)
            settings = (recorded.call.sampling, recorded.call.single_call)
            if same and settings == (call.sampling, call.single_call):
                return recorded.whole(self._tapes)
        return None
