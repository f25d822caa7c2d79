"""One session's conversations, token for token: what a model is asked to continue, and what it said.

Owns the rule by which a call becomes token ids, every turn as the engine sampled it, and the answers, so that a retry
is given the one that is recorded. Knows neither HTTP nor engines nor keys; pure.

    call ──▶ prompt = ids of the deepest reply that its messages begin with    sampled, never tokenised again
                      + the id that ends a reply, if that one was cut
                      + the new messages and the opening of the next reply     the only text that is tokenised

Text that the model wrote is not tokenised again because it need not come back as the tokens that were sampled. A
history that was edited or summarised continues from what is left of it or opens a new branch; the tools are part of the
history, for they stand before it. :mod:`etude.gateway.tree` finds the reply.

A call may have a request id. One that comes again, same id and same call, is the retry of a caller that never got the
answer: it is answered by the turn that is recorded, so no reply that nobody saw is kept as a turn and trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.errors import SessionLost
from etude.gateway.calls import Answer, Call
from etude.gateway.tree import Found, Node, dissolve, find, insert, new_root
from etude.tokens.messages import ChatFormat, Message, Tool
from etude.types import Ids, Turn

MAX_TURNS = 512
"""Model calls of one session; far above what a harness allows its agent."""


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
    """Without its messages, tools and prompt, which are in the tree and in the turns."""
    end: Node | None
    """The last message of its conversation; ``None`` for a raw prompt."""
    answer: Answer


class Conversation:
    """The conversation tree of one session, its turns and answers."""

    def __init__(self, session_id: str, chat_format: ChatFormat, max_turns: int = MAX_TURNS) -> None:
        self.session_id = session_id
        self.turns: list[Turn] = []
        """In the order in which they were recorded."""
        self.closed = False
        """Whether no turn may follow."""
        self._format = chat_format
        self._max_turns = max_turns
        self._tapes: list[_Tape] = []  # on which the prompt of each turn lies
        self._trees: list[tuple[tuple[Tool, ...], Node]] = []  # one for each set of tools
        self._answers: dict[str, _Recorded] = {}  # by answer id, oldest first; as many as there are turns at most
        self._requests: dict[str, list[_Recorded]] = {}

    def prompt(self, call: Call) -> Prompt:
        """The token ids that a model continues to answer ``call``.

        Raises ``ValueError``, with a message for the caller, on what the template or the vocabulary does not take, on
        an unknown ``previous``, and when the session has not enough turns left.
        """
        if len(self.turns) + call.sampling.count > self._max_turns:
            raise ValueError(
                f"the session has had {len(self.turns)} of its {self._max_turns} turns, {call.sampling.count} more are "
                "wanted: open a new one"
            )
        if call.prompt is not None:
            return self._raw_prompt(call.prompt)
        messages = self._messages(call)
        if not messages:
            raise ValueError("there is nothing to answer: give messages or a prompt")
        continued = self._continued(find(self._tree(call.tools), messages), messages, call.tools)
        return continued or Prompt(token_ids=np.array(self._format.open(messages, call.tools), np.int32), reused=0)

    def answered(self, request_id: str, call: Call) -> Answer | None:
        """What answered this very request before; ``None`` if nothing did, or if the id is empty."""
        recorded = self._requests.get(request_id) if request_id else None
        return self._same_call(call, recorded) if recorded else None

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
        prompt_ids = answer.replies[0].turn.prompt_ids
        tape = _Tape(prompt_ids) if continued is None else self._tapes[continued].or_own(prompt_ids)
        for reply in answer.replies:
            if end is not None:
                end.add(reply.message, turn=len(self.turns))
            self.turns.append(reply.turn)
            self._tapes.append(tape)
        bare = Call(sampling=call.sampling, single_call=call.single_call, instructed=call.instructed)
        recorded = _Recorded(call=bare, end=end, answer=answer)
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

    def _tree(self, tools: tuple[Tool, ...]) -> Node:
        """What was said where these tools were offered; an empty tree that nobody keeps, if nothing was."""
        return next((root for known, root in self._trees if known == tools), None) or new_root()

    def _continued(self, found: Found, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt | None:
        """The prompt behind the reply that was found; ``None`` without one, or if the template cannot be put there."""
        if found.reply is None or found.reply.turn is None:
            return None
        turn = self.turns[found.reply.turn]
        # The reply as its caller has it: should it have new ids for the calls, those of the tools' output fit them.
        reply = messages[found.depth - 1]
        try:
            ids = self._format.extend(reply, messages[found.depth :], tools)
        except ValueError:
            return None  # to render all of it afresh is exact, too; if the messages are at fault, that will say so
        ended = len(turn.completion_ids) and int(turn.completion_ids[-1]) in self._format.stop_ids
        ids = ids if ended else [self._format.stop_ids[0], *ids]
        behind = np.concatenate([turn.completion_ids, np.array(ids, np.int32)])
        return self._behind(found.reply.turn, behind)

    def _raw_prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        ids = self._raw_ids(prompt)
        turn = self._longest_beginning(ids)
        if turn is None:
            return Prompt(token_ids=ids, reused=0)
        return self._behind(turn, ids[len(self.turns[turn].prompt_ids) :])

    def _raw_ids(self, prompt: str | tuple[int, ...]) -> Ids:
        ids = self._format.encode(prompt) if isinstance(prompt, str) else prompt
        if not len(ids):
            raise ValueError("the prompt has no token: there is nothing to continue")
        wrong = next((token for token in (min(ids), max(ids)) if not 0 <= token < self._format.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the prompt has token id {wrong}: ids are 0 … {self._format.vocab_size - 1}")
        return np.array(ids, np.int32)

    def _longest_beginning(self, ids: Ids) -> int | None:
        """The turn with the most tokens, prompt and completion, that ``ids`` begin with; the newest of equal ones."""
        best, most = None, 0
        for index, turn in enumerate(self.turns):
            middle, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
            if (
                most <= end <= len(ids)
                and np.array_equal(ids[middle:end], turn.completion_ids)
                and np.array_equal(ids[:middle], turn.prompt_ids)
            ):
                best, most = index, end
        return best

    def _behind(self, turn: int, ids: Ids) -> Prompt:
        """The prompt of a turn with ``ids`` behind it, of which the first are what it sampled."""
        start = len(self.turns[turn].prompt_ids)
        return Prompt(
            token_ids=self._tapes[turn].continued(start, ids), reused=start + len(self.turns[turn].completion_ids)
        )

    def _place(self, call: Call, answer: Answer) -> tuple[Node | None, int | None]:
        """Where a call ends in the tree, what was not known put in; and which turn its prompt continues."""
        if call.prompt is not None:
            return None, self._longest_beginning(answer.replies[0].turn.prompt_ids)
        root = self._tree(call.tools)
        if not root.children:
            self._trees.append((call.tools, root))
        messages = self._messages(call)
        found = find(root, messages)
        return insert(found, messages), None if found.reply is None else found.reply.turn

    def _same_call(self, call: Call, candidates: Sequence[_Recorded]) -> Answer | None:
        """The newest of the answers to a call that is equal to ``call`` but for how it wants to be answered."""
        try:
            ids = None if call.prompt is None else self._raw_ids(call.prompt)
            ends = find(self._tree(call.tools), self._messages(call)).ends if ids is None else ()
        except ValueError:
            return None  # it cannot have been answered
        for recorded in reversed(candidates):
            same = any(end is recorded.end for end in ends)
            if ids is not None and recorded.end is None:
                same = np.array_equal(ids, recorded.answer.replies[0].turn.prompt_ids)
            settings = (recorded.call.sampling, recorded.call.single_call)
            if same and settings == (call.sampling, call.single_call):
                return recorded.answer
        return None


class _Tape:
    """The token ids of one branch. Prompts are views of its beginning, so a branch costs memory once, not per turn.

    What a view shows never changes: ids are only written behind the last one.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids: npt.NDArray[np.int32] = ids
        self._length = len(ids)

    def or_own(self, ids: Ids) -> "_Tape":
        """The tape on which ``ids`` lie: this one if they are a view of it, else one of their own."""
        return self if ids.base is self._ids else _Tape(ids)

    def continued(self, start: int, ids: Ids) -> Ids:
        """The first ``start`` ids of the tape and then ``ids``; a copy if another continuation lies there already."""
        end = start + len(ids)
        written = min(self._length, end)
        if not np.array_equal(self._ids[start:written], ids[: written - start]):
            return np.concatenate([self._ids[:start], ids])
        if end > len(self._ids):
            longer = np.empty(2 * end, np.int32)
            longer[:written] = self._ids[:written]
            self._ids = longer
        self._ids[written:end] = ids[written - start :]
        self._length = max(self._length, end)
        return self._ids[:end]
