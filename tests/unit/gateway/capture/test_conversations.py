"""Conversations, token for token, in a format where every character is a token; their trees and their turns."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SessionLost
from etude.gateway.api.calls import Answer, Call, FinishReason, Reply, Sampling
from etude.gateway.capture.conversations import (
    ALIKE,
    EXACT,
    FIRST_BLOCK,
    Conversation,
    Node,
    SessionFull,
    TokenBuffer,
    TurnStore,
    alike,
    copy_tree,
    find,
    free_tree,
    insert,
    new_root,
)
from etude.tokens.messages import NO_KWARGS, ChatMessage, ReplyReader, TemplateKwargs, Tool, ToolCall
from etude.types import Finish, Ids, Json, TokenIds, Turn

END, ALSO_END, FIRST_LETTER = 0, 1, 8
ROLES = {"system": 2, "user": 3, "assistant": 4, "tool": 5}
TOOL = 6


class LetterFormat:
    """``[role] letters [end]`` for each message, ``[tool] letters [end]`` for each tool before them."""

    stop_ids = (END, ALSO_END)
    vocab_size = 0x11_0000 + FIRST_LETTER
    thinks = False

    def encode(self, text: str) -> list[int]:
        return [FIRST_LETTER + ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token - FIRST_LETTER) for token in token_ids if token >= FIRST_LETTER)

    def open(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        if messages[0].role == "tool":
            raise ValueError("a conversation cannot begin with a tool's output")
        offered = [token for tool in tools for token in (TOOL, *self.encode(tool.name), END)]
        return offered + self.encode("".join(kwargs)) + self._rendered(messages)

    def extend(
        self,
        reply: ChatMessage,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        kwargs: TemplateKwargs = NO_KWARGS,
    ) -> list[int]:
        assert reply.role == "assistant", "it stands behind a reply"
        if any(message.role == "system" for message in messages):
            raise ValueError("system messages come first")
        return self._rendered(messages)

    def reader(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: TokenIds = (),
        stops: Sequence[str] = (),
        single_call: bool = False,
    ) -> ReplyReader:
        raise NotImplementedError("conversations read no reply")

    def _rendered(self, messages: Sequence[ChatMessage]) -> list[int]:
        output = [token for one in messages for token in (ROLES[one.role], *self.encode(one.content), END)]
        return [*output, ROLES["assistant"]]


FORMAT = LetterFormat()


def new_conversation(max_turns: int = 512, max_tokens: int = 10_000) -> Conversation:
    return Conversation("s", FORMAT, TurnStore(max_turns=max_turns, max_tokens=max_tokens))


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def assistant(content: str, *, thinking: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=content, thinking=thinking)


def call_of(*messages: ChatMessage, count: int = 1, tools: Sequence[str] = (), previous: str | None = None) -> Call:
    return Call(
        messages=messages,
        tools=tuple(Tool(name=name) for name in tools),
        previous=previous,
        sampling=Sampling(count=count),
    )


def reply_of(prompt_ids: Ids, ids: Sequence[int], message: ChatMessage) -> Reply:
    turn = Turn(
        prompt_ids=prompt_ids,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish=Finish.STOP if ids and ids[-1] in FORMAT.stop_ids else Finish.LENGTH,
    )
    return Reply(message=message, finish_reason=FinishReason.STOP, stop_text=None, turn=turn)


def answer_of(
    conversation: Conversation, call: Call, *output: tuple[Sequence[int], ChatMessage], answer_id: str = ""
) -> Answer:
    """An answer as an engine would give it; not yet recorded."""
    prompt = conversation.prompt(call)
    return Answer(
        answer_id=answer_id or f"{len(conversation.turns):024x}",
        created=0,
        model="policy",
        replies=tuple(reply_of(prompt.token_ids, ids, message) for ids, message in output),
        reused_tokens=prompt.reused,
    )


def play(
    conversation: Conversation, call: Call, ids: Sequence[int], message: ChatMessage | None = None
) -> tuple[list[int], ChatMessage]:
    """Record one call; returns all token ids so far, and the reply as its caller sees it."""
    message = message or assistant(FORMAT.decode(ids))
    answer = answer_of(conversation, call, (ids, message))
    assert conversation.record(call, answer) is answer
    return [*answer.replies[0].turn.prompt_ids.tolist(), *ids], message


def ids_for(conversation: Conversation, *messages: ChatMessage, tools: Sequence[str] = ()) -> list[int]:
    ids: list[int] = conversation.prompt(call_of(*messages, tools=tools)).token_ids.tolist()
    return ids


def letters(text: str) -> list[int]:
    return FORMAT.encode(text)


def test_a_fresh_conversation_is_rendered_whole() -> None:
    messages = [ChatMessage(role="system", content="fix"), user("go")]
    prompt = new_conversation().prompt(call_of(*messages, tools=["read"]))
    assert prompt.token_ids.tolist() == FORMAT.open(messages, [Tool(name="read")])
    assert prompt.token_ids.dtype == np.int32
    assert prompt.reused == 0


def test_sampled_tokens_are_continued_whatever_text_they_were_read_as() -> None:
    conversation, question = new_conversation(), user("go")
    recorded, reply = play(conversation, call_of(question), [7, 7, *letters("x"), END], assistant("some x"))
    prompt = conversation.prompt(call_of(question, reply, user("on")))
    assert prompt.token_ids.tolist() == [*recorded, *FORMAT.extend(reply, [user("on")])]
    assert prompt.reused == len(recorded)


@pytest.mark.parametrize(("ids", "closed_by"), [([9], [END]), ([9, END], []), ([9, ALSO_END], []), ([], [END])])
def test_only_a_reply_that_was_cut_is_closed(ids: list[int], closed_by: list[int]) -> None:
    conversation, question = new_conversation(), user("go")
    recorded, reply = play(conversation, call_of(question), ids)
    expected = [*recorded, *closed_by, *FORMAT.extend(reply, [user("on")])]
    assert ids_for(conversation, question, reply, user("on")) == expected


def test_an_edited_history_continues_from_what_is_left_of_it() -> None:
    conversation, question = new_conversation(), user("go")
    first_ids, first = play(conversation, call_of(question), [9, END])
    play(conversation, call_of(question, first, user("ran: ok")), [10, END])
    edited = user("ran: (cut)")
    assert ids_for(conversation, question, first, edited) == [*first_ids, *FORMAT.extend(first, [edited])]
    rewritten = [question, assistant("never said"), user("ran: ok")]
    assert ids_for(conversation, *rewritten) == FORMAT.open(rewritten)


def test_other_tools_are_another_history() -> None:
    conversation, question = new_conversation(), user("go")
    recorded, reply = play(conversation, call_of(question, tools=["read"]), [9, END])
    request = [question, reply, user("on")]
    assert ids_for(conversation, *request, tools=["read"])[: len(recorded)] == recorded
    assert ids_for(conversation, *request, tools=["read", "edit"]) == FORMAT.open(
        request, [Tool(name="read"), Tool(name="edit")]
    )
    assert ids_for(conversation, *request) == FORMAT.open(request)


def test_other_kwargs_of_the_template_are_another_history() -> None:
    conversation, question = new_conversation(), user("go")
    thinks = replace(call_of(question), template_kwargs={"thinking": True, "effort": [1]})
    recorded, reply = play(conversation, thinks, [9, END])
    request = (question, reply, user("on"))
    goes_on = conversation.prompt(replace(thinks, messages=request))
    assert goes_on.reused == len(recorded) and goes_on.token_ids[: len(recorded)].tolist() == recorded
    assert conversation.prompt(
        replace(thinks, messages=request, template_kwargs={"effort": [1], "thinking": True})
    ).reused
    unlike: list[dict[str, Json]] = [{}, {"thinking": 1, "effort": [1]}, {"thinking": True}]
    for others in unlike:
        prompt = conversation.prompt(replace(thinks, messages=request, template_kwargs=others))
        assert prompt.reused == 0 and prompt.token_ids.tolist() == FORMAT.open(request, (), others)
        assert conversation.last_answer(replace(thinks, template_kwargs=others)) is None
    assert conversation.last_answer(thinks) is not None
    forked = conversation.fork("f")
    assert forked.replayed(thinks) is not None and forked.prompt(replace(thinks, messages=request)).reused == len(
        recorded
    )


def test_what_clients_change_on_the_way_back_does_not_break_a_branch() -> None:
    conversation, question = new_conversation(), user("go")
    output = replace(
        assistant(" I look. \n", thinking="hm"),
        tool_calls=(ToolCall(call_id="c1", name="read", arguments='{"path": "a", "n": 1.0}'),),
    )
    recorded, _ = play(conversation, call_of(question), [9, END], output)
    back = replace(
        assistant("I look."), tool_calls=(ToolCall(call_id="toolu_7", name="read", arguments='{"n":1,"path":"a"}'),)
    )
    output = ChatMessage(role="tool", content="1: x", tool_call_id="toolu_7")
    assert ids_for(conversation, question, back, output)[: len(recorded)] == recorded


def test_where_the_template_cannot_be_put_behind_a_reply_all_is_rendered_afresh() -> None:
    conversation, question = new_conversation(), user("go")
    _, reply = play(conversation, call_of(question), [9, END])
    request = [question, reply, ChatMessage(role="system", content="late"), user("on")]
    prompt = conversation.prompt(call_of(*request))
    assert prompt.token_ids.tolist() == FORMAT.open(request)
    assert prompt.reused == 0


def test_what_no_template_takes_is_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="cannot begin with a tool's output"):
        new_conversation().prompt(call_of(ChatMessage(role="tool")))
    with pytest.raises(ValueError, match="nothing to answer"):
        new_conversation().prompt(call_of())


def test_several_replies_to_one_call_are_turns_that_can_each_be_continued() -> None:
    conversation, call = new_conversation(), call_of(user("go"), count=3)
    output = [assistant("a", thinking="1"), assistant("a", thinking="2"), assistant("b")]
    answer = answer_of(conversation, call, *[([9 + i, END], message) for i, message in enumerate(output)])
    conversation.record(call, answer)
    assert len(conversation.turns) == 3
    for i, message in enumerate(output):
        ids = ids_for(conversation, user("go"), message, user("on"))
        assert ids[: len(ids_for(conversation, user("go"))) + 1][-1] == 9 + i
    forgetful = ids_for(conversation, user("go"), assistant("a"), user("on"))  # either is exact: the newest is taken
    assert forgetful[len(ids_for(conversation, user("go")))] == 10


def seen(answer: Answer | None) -> tuple[str, list[list[int]]] | None:
    """Id and prompts of an answer, by which it differs from all others."""
    if answer is None:
        return None
    return answer.answer_id, [reply.turn.prompt_ids.tolist() for reply in answer.replies]


def test_a_request_that_comes_again_has_one_turn() -> None:
    conversation, question = new_conversation(), call_of(user("go"))
    output = ([9, END], assistant("x"))
    first, second = (answer_of(conversation, question, output, answer_id=name) for name in ("1st", "2nd"))
    assert conversation.answered("a", question) is None
    assert conversation.record(question, first, "a") is first
    assert seen(conversation.record(question, second, "a")) == seen(first)  # two attempts at the same time
    assert seen(conversation.answered("a", question)) == seen(first) != seen(second)
    assert conversation.answered("a", call_of(user("on"))) is None
    assert conversation.answered("a", replace(question, sampling=Sampling(temperature=0.5))) is None
    assert conversation.answered("b", question) is None
    assert conversation.answered("", question) is None
    assert conversation.record(question, second, "b") is second
    assert len(conversation.turns) == 2


def test_an_id_that_was_used_for_another_call_is_recorded_for_both() -> None:
    conversation, one, two = new_conversation(), call_of(user("go")), call_of(user("on"))
    answers = [answer_of(conversation, call, ([9, END], assistant("x"))) for call in (one, two)]
    assert conversation.record(one, answers[0], "a") is answers[0]
    assert conversation.record(two, answers[1], "a") is answers[1]
    assert seen(conversation.answered("a", one)) == seen(answers[0])
    assert seen(conversation.answered("a", two)) == seen(answers[1])


def test_a_caller_without_ids_that_tries_again_gets_the_newest_answer_to_an_equal_call() -> None:
    conversation, question = new_conversation(), call_of(user("go"))
    assert conversation.last_answer(question) is None
    output = ([9, END], assistant("x"))
    for answer in [answer_of(conversation, question, output, answer_id=name) for name in ("older", "newer")]:
        conversation.record(question, answer)
    newest = conversation.last_answer(replace(question, stream=True, model="mine"))
    assert newest is not None
    assert newest.answer_id == "newer"
    assert conversation.last_answer(replace(question, single_call=True)) is None
    assert conversation.last_answer(call_of(user("go"), tools=["read"])) is None
    assert conversation.last_answer(call_of(user("go"), previous="?")) is None


def test_an_answer_can_be_continued_by_its_id() -> None:
    conversation, instructed = new_conversation(), ChatMessage(role="system", content="be brief")
    recorded, first = play(conversation, call_of(user("go")), [9, END])
    following = call_of(user("on"), previous=f"{0:024x}")
    assert conversation.prompt(following).token_ids.tolist() == [*recorded, *FORMAT.extend(first, [user("on")])]
    play(conversation, following, [10, END])
    third = replace(call_of(instructed, user("so?"), previous=f"{1:024x}"), instructed=True)
    whole = [instructed, user("go"), first, user("on"), assistant("\x02")]
    assert conversation.prompt(third).token_ids.tolist() == FORMAT.open([*whole, user("so?")])
    play(conversation, third, [11, END])
    fourth = call_of(user("end"), previous=f"{2:024x}")  # instructions hold for one call
    recorded = ids_for(conversation, *whole[1:])
    assert conversation.prompt(fourth).token_ids.tolist()[: len(recorded) - 1] == recorded[:-1]
    with pytest.raises(ValueError, match="'nobody' is unknown"):
        conversation.prompt(call_of(user("on"), previous="nobody"))


def test_raw_prompts_are_taken_verbatim_and_continue_what_they_begin_with() -> None:
    conversation = new_conversation()
    raw = Call(prompt=(9, 10, 11))
    recorded, _ = play(conversation, raw, [12, 13])
    longer = conversation.prompt(Call(prompt=(*recorded, 14)))
    assert longer.token_ids.tolist() == [*recorded, 14]
    assert longer.reused == len(recorded)
    assert conversation.prompt(Call(prompt=(9, 10, 11, 12, 14))).reused == 0
    assert conversation.prompt(Call(prompt="ab")).token_ids.tolist() == letters("ab")
    assert conversation.last_answer(raw) is not None
    assert conversation.last_answer(Call(prompt=(9, 10))) is None
    with pytest.raises(ValueError, match="is unknown"):
        conversation.prompt(call_of(user("on"), previous=f"{0:024x}"))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ((), "no token"),
        ("", "no token"),
        ((1, -1), "id -1"),
        ((1, FORMAT.vocab_size), f"id {FORMAT.vocab_size}"),
        ((2**80,), "id 1208925819614629174706176"),
    ],
)
def test_a_raw_prompt_that_is_none_is_refused(prompt: str | tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        new_conversation().prompt(Call(prompt=prompt))


def test_a_session_that_had_all_its_turns_is_refused_more() -> None:
    conversation = new_conversation(max_turns=2)
    play(conversation, call_of(user("go")), [9, END])
    with pytest.raises(SessionFull, match=r"1 of its 2 turns, there is no room for 2 more"):
        conversation.prompt(call_of(user("go"), count=2))
    play(conversation, call_of(user("go")), [9, END])
    with pytest.raises(SessionFull, match="2 of its 2 turns"):
        conversation.prompt(call_of(user("go")))


def test_a_session_that_holds_all_its_tokens_is_refused_more() -> None:
    conversation = new_conversation(max_tokens=7)
    play(conversation, call_of(user("go")), [9, END])  # [user] g o [end] [assistant], and two that were sampled
    with pytest.raises(SessionFull, match="holds 7 tokens, 7 is the most"):
        conversation.prompt(call_of(user("go")))


def test_a_turn_that_outlives_its_session_is_lost_loudly() -> None:
    conversation, call = new_conversation(), call_of(user("go"))
    answer = answer_of(conversation, call, ([9, END], assistant("x")))
    conversation.close()
    with pytest.raises(SessionLost, match="session s was closed"):
        conversation.record(call, answer)
    assert conversation.turns == []


def test_a_branch_costs_memory_once_whatever_came_to_nothing_beside_it() -> None:
    conversation, messages = new_conversation(max_tokens=10**6), [user("x" * 1000)]
    for number in range(100):
        conversation.prompt(call_of(*messages, user(f"a call that failed or was only counted, {number}")))
        _, reply = play(conversation, call_of(*messages), [9, END])
        messages += [reply, user("y" * 10)]
    turns = conversation.turns
    assert {id(turn.prompt_ids.base) for turn in turns} == {id(turns[0].prompt_ids.base)}
    assert turns[0].prompt_ids.base is not None
    longest = turns[-1].prompt_ids.nbytes
    assert turns[0].prompt_ids.base.nbytes <= 1.5 * longest < sum(turn.prompt_ids.nbytes for turn in turns) / 10


def test_what_is_held_is_each_branch_and_what_was_sampled() -> None:
    conversation, question = new_conversation(), user("go")
    recorded, reply = play(conversation, call_of(question), [9, END])
    sizes = [len(recorded)]
    for content in ("on", "on", "another way"):
        recorded, _ = play(conversation, call_of(question, reply, user(content)), [9, END])
        sizes.append(len(recorded))
    # The second "on" has the prompt of the first; the third shares what it begins with but has to have it once more.
    assert conversation._turns.tokens == sizes[1] + 2 + 2 + sizes[3]


def test_a_fork_goes_on_by_itself() -> None:
    parent, question = new_conversation(), user("go")
    recorded, reply = play(parent, call_of(question), [9, END])
    fork = parent.fork("f")
    assert fork.session_id == "f"
    branches = {}
    for name, conversation, content in (("trunk", parent, "left"), ("fork", fork, "right")):
        request = call_of(question, reply, user(content))
        branches[name], _ = play(conversation, request, [10, END])
        assert branches[name][: len(recorded)] == recorded
        assert conversation.last_answer(request) is not None
        assert conversation.last_answer(call_of(question)) is not None
    assert parent.last_answer(call_of(question, reply, user("right"))) is None
    assert fork.last_answer(call_of(question, reply, user("left"))) is None
    for name, conversation in (("trunk", parent), ("fork", fork)):
        assert [[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()] for turn in conversation.turns] == [
            recorded,
            branches[name],
        ]
    parent.close()
    assert fork.prompt(call_of(question, reply, user("right"))).reused == len(recorded)


CONTENTS = st.text(alphabet="aé \n", max_size=4)
COMPLETIONS = st.lists(st.integers(0, 12), max_size=5)
MOVES = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 50), CONTENTS, COMPLETIONS), max_size=8)


@given(MOVES)
def test_every_prompt_is_the_deepest_known_branch_and_then_only_new_text(
    moves: list[tuple[int, bool, int, str, list[int]]],
) -> None:
    """Random conversations with edits, against a model that compares whole histories."""
    conversation, seen = new_conversation(), list[list[int]]()
    recorded: dict[tuple[ChatMessage, ...], list[int]] = {}
    for number, (pick, edits, where, content, completion) in enumerate(moves):
        history = list(recorded)[pick % len(recorded)] if recorded else ()
        if edits and history:
            place = where % len(history)
            edited = replace(history[place], content=history[place].content + "~")
            history = (*history[:place], edited, *history[place + 1 :])
        messages = (*history, user(content))
        deepest = max((node for node in recorded if messages[: len(node)] == node), key=len, default=None)
        rest = FORMAT.open(messages)
        if deepest is not None:
            rest = [*recorded[deepest], *FORMAT.extend(deepest[-1], messages[len(deepest) :])]
        assert ids_for(conversation, *messages) == rest
        ids, reply = play(conversation, call_of(*messages), completion, assistant(f"reply {number}"))
        seen.append(ids)
        recorded[*messages, reply] = ids if completion and completion[-1] in FORMAT.stop_ids else [*ids, END]
    # No prompt that was written later changed one that was handed out before.
    assert [[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()] for turn in conversation.turns] == seen


CALL = ToolCall(call_id="call_1", name="edit", arguments='{"path": "a.py", "line": 3, "by": 1.0}')
REPLY = ChatMessage(role="assistant", content="I edit.\n", thinking="hm", tool_calls=(CALL,))


def called(arguments: str, name: str = "edit") -> ChatMessage:
    return replace(REPLY, tool_calls=(ToolCall(call_id="other", name=name, arguments=arguments),))


@pytest.mark.parametrize(
    "back",
    [
        replace(REPLY, content="I edit."),
        replace(REPLY, content="\n I edit. "),
        replace(REPLY, thinking=""),
        called('{"by":1,"line":3,"path":"a.py"}'),
    ],
)
def test_what_clients_change_on_the_way_back_does_not_matter(back: ChatMessage) -> None:
    assert alike(back, REPLY)
    assert alike(REPLY, back)


@pytest.mark.parametrize(
    "other",
    [
        replace(REPLY, content="I  edit."),
        replace(REPLY, role="user"),
        replace(REPLY, tool_calls=()),
        replace(REPLY, tool_calls=(CALL, CALL)),
        called('{"path": "a.py", "line": 4, "by": 1}'),
        called('{"path": "a.py", "line": 3, "by": 1'),
        called(CALL.arguments, name="read"),
    ],
)
def test_anything_else_is_another_message(other: ChatMessage) -> None:
    assert not alike(other, REPLY)
    assert not alike(REPLY, other)


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert alike(called("{oops"), called("{oops"))
    assert not alike(called("{oops"), called("{oops "))
    assert alike(called(""), called("{}"))
    deep = "[" * 100_000 + "]" * 100_000
    assert not alike(called(deep), called(deep + " "))


def test_the_call_id_of_an_output_is_ignored_but_its_text_is_not() -> None:
    output = ChatMessage(role="tool", content="ok\n", tool_call_id="call_1")
    assert alike(output, replace(output, tool_call_id="x"))
    assert not alike(output, replace(output, content="ok"))


def test_an_unknown_conversation_is_not_found_and_can_be_put_in() -> None:
    root, messages = new_root(), [user("a"), REPLY, user("b")]
    match = find(root, messages)
    assert (match.reply, match.depth, match.last_depth, match.ends) == (None, 0, 0, ())
    end = insert(match, messages)
    assert end.path() == messages
    again = find(root, messages)
    assert again.ends == (end,)
    assert again.reply is None  # nobody of ours said it


def test_the_deepest_reply_is_found_through_an_unsampled_message() -> None:
    root = new_root()
    first = root.add(user("a")).add(REPLY, turn=0)
    second = (
        first.add(user("b")).add(ChatMessage(role="assistant", content="by hand")).add(user("c")).add(REPLY, turn=1)
    )
    match = find(root, [*second.path(), user("d")])
    assert (match.reply, match.depth) == (second, 6)
    match = find(root, [*second.path()[:4], user("d")])
    assert (match.reply, match.depth, match.last_depth) == (first, 2, 4)


def test_of_replies_that_look_alike_the_exact_one_is_meant_and_else_the_newest() -> None:
    root = new_root()
    request = root.add(user("a"))
    one, two = (request.add(replace(REPLY, thinking=thought), turn=turn) for turn, thought in enumerate(["1", "2"]))
    assert find(root, [user("a"), one.message]).reply is one
    assert find(root, [user("a"), replace(REPLY, thinking="")]).reply is two
    assert find(root, [user("a"), replace(REPLY, thinking="")]).ends == (one, two)


def test_what_fits_earlier_on_the_way_counts_too() -> None:
    root = new_root()
    request = root.add(user("a"))
    ways = [request.add(replace(REPLY, thinking=thought), turn=turn) for turn, thought in enumerate(["1", "2"])]
    ends = [way.add(user("b")).add(REPLY, turn=2 + turn) for turn, way in enumerate(ways)]
    for way, end in zip(ways, ends, strict=True):
        assert find(root, [user("a"), way.message, user("b"), REPLY]).reply is end


def test_an_older_reply_that_leads_further_is_followed_whatever_came_later() -> None:
    root = new_root()
    request = root.add(user("a"))
    deep = request.add(REPLY, turn=0).add(user("b")).add(REPLY, turn=1)
    request.add(REPLY, turn=2)
    assert find(root, [user("a"), REPLY, user("b"), REPLY]).reply is deep


def test_a_message_fits_as_before_once_it_has_come_back() -> None:
    node, back = Node(REPLY), called('{"by":1,"line":3,"path":"a.py"}')
    assert [node.likeness(message) for message in (REPLY, back, back, user("a"), REPLY)] == [
        EXACT,
        ALIKE,
        ALIKE,
        0,
        EXACT,
    ]


def test_a_tree_that_is_done_with_has_no_cycles() -> None:
    root = new_root()
    request = root.add(user("a"))
    request.add(REPLY)
    free_tree(root)
    assert root.children == []
    assert request.children == []


def test_a_copy_of_a_tree_is_as_deep_as_it_and_grows_by_itself() -> None:
    root = new_root()
    node = root.add(user("0"))
    for depth in range(3000):
        node = node.add(REPLY, turn=depth).add(user(str(depth)))
    assert root.children[0].children[0].likeness(called('{"by":1,"line":3,"path":"a.py"}')) == ALIKE
    twins = copy_tree(root)
    assert len(twins) == 6002
    assert twins[node].path() == node.path()
    assert not set(map(id, twins)) & set(map(id, twins.values()))
    twin = find(twins[root], node.path()).reply
    assert twin is twins[node.parent or root]
    assert twins[root.children[0].children[0]].echo is root.children[0].children[0].echo
    twins[node].add(user("more"))
    assert node.children == []


TEXTS = st.sampled_from(["", " ", "a", "a ", "b", "\n"])
MESSAGES = st.builds(
    ChatMessage,
    role=st.sampled_from(["user", "assistant", "tool", "system"]),
    content=TEXTS,
    thinking=TEXTS,
    tool_calls=st.lists(
        st.builds(
            ToolCall, call_id=TEXTS, name=TEXTS, arguments=st.sampled_from(["", "{}", '{"a":1}', '{"a": 1.0}', "{"])
        ),
        max_size=1,
    ).map(tuple),
)


@given(MESSAGES, MESSAGES, MESSAGES)
def test_being_alike_is_an_equivalence(one: ChatMessage, two: ChatMessage, three: ChatMessage) -> None:
    assert alike(one, one)
    assert alike(one, two) == alike(two, one)
    if alike(one, two) and alike(two, three):
        assert alike(one, three)


@given(st.lists(st.lists(MESSAGES, max_size=4), max_size=6), st.lists(MESSAGES, max_size=4))
def test_finding_agrees_with_comparing_whole_histories(
    recorded: list[list[ChatMessage]], request: list[ChatMessage]
) -> None:
    root, sampled = new_root(), list[list[ChatMessage]]()
    for turn, messages in enumerate(recorded):
        insert(find(root, messages), messages).add(REPLY, turn=turn)
        sampled.append([*messages, REPLY])
    for conversation in [request, *sampled, *[[*one, *request] for one in sampled]]:
        match = find(root, conversation)
        depths = [
            len(one)
            for one in sampled
            if len(one) <= len(conversation)
            and all(alike(mine, theirs) for mine, theirs in zip(one, conversation, strict=False))
        ]
        assert match.depth == max(depths, default=0)


def ids_of(*token_ids: int) -> Ids:
    return np.array(token_ids, np.int32)


def turn_of(prompt: Sequence[int], completion: Sequence[int] = ()) -> Turn:
    sampled = len(completion)
    return Turn(
        prompt_ids=ids_of(*prompt),
        completion_ids=ids_of(*completion),
        logprobs=np.full(sampled, -1.0, np.float32),
        versions=np.zeros(sampled, np.int32),
        finish=Finish.STOP,
    )


def texts(store: TurnStore) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in store.whole()]


def test_a_buffer_takes_its_prefixes_and_its_extensions() -> None:
    buffer = TokenBuffer()
    assert buffer.fits(ids_of(1, 2))
    buffer.extend(ids_of(1, 2))
    view = buffer.prefix(2)
    assert all(buffer.fits(ids_of(*ids)) for ids in ([], [1], [1, 2], [1, 2, 3]))
    assert not any(buffer.fits(ids_of(*ids)) for ids in ([2], [1, 3], [1, 3, 2]))
    buffer.extend(ids_of(1, 2, 3))
    buffer.extend(ids_of(1))
    assert len(buffer) == 3
    assert buffer.prefix(3).tolist() == [1, 2, 3]
    assert view.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7


@given(st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK))
def test_agreement_is_the_length_of_what_both_begin_with(laid: int, request: int, parting: int) -> None:
    buffer, ids = TokenBuffer(), np.arange(request, dtype=np.int32)
    buffer.extend(np.arange(laid, dtype=np.int32))
    ids[parting:] += 1
    assert buffer.shared_with(ids) == min(laid, request, parting)


TOKENS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), TOKENS, st.lists(TOKENS, min_size=1, max_size=2))))
def test_whatever_is_recorded_comes_back_and_the_longest_beginning_is_found(
    moves: list[tuple[int, int, list[int], list[list[int]]]],
) -> None:
    """Turns that continue, branch or start anew, with right and wrong claims about what they continue."""
    store, recorded = TurnStore(), list[tuple[list[int], list[int]]]()
    for pick, truncated, fresh, output in moves:
        earlier = pick % len(recorded) if recorded else None
        begun = [] if earlier is None else [token for part in recorded[earlier] for token in part][: truncated or None]
        prompt = [*begun, *fresh]
        best = max(
            (index for index, (read, out) in enumerate(recorded) if [*read, *out] == prompt[: len(read) + len(out)]),
            key=lambda index: (len(recorded[index][0]) + len(recorded[index][1]), index),
            default=None,
        )
        assert store.longest_prefix(ids_of(*prompt)) == best
        store.record([turn_of(prompt, completion) for completion in output], earlier if truncated % 2 else best)
        recorded += [(prompt, completion) for completion in output]
        assert texts(store) == recorded
    assert store.tokens <= sum(len(read) + len(output) for read, output in recorded)


def test_turns_of_one_branch_share_one_buffer() -> None:
    store = TurnStore()
    store.record([turn_of([1, 2], [3]), turn_of([1, 2], [4])], None)
    store.record([turn_of([1, 2, 3, 5], [6])], 0)
    store.record([turn_of([1, 2, 4, 5], [6])], 1)  # its reply was said beside the one that went on the tape
    store.record([turn_of([1, 2], [7])], 0)
    assert store[0].buffer is store[1].buffer is store[2].buffer is store[4].buffer
    assert store[3].buffer is not store[2].buffer
    assert store.tokens == 4 + 4 + 5


def test_a_copy_goes_on_by_itself() -> None:
    store = TurnStore(max_turns=3)
    store.record([turn_of([1, 2], [3])], None)
    copied = store.copy()
    store.record([turn_of([1, 2, 3, 4])], 0)
    copied.record([turn_of([1, 2, 3, 5]), turn_of([1, 2, 3, 5])], 0)
    assert texts(store) == [([1, 2], [3]), ([1, 2, 3, 4], [])]
    assert texts(copied) == [([1, 2], [3]), ([1, 2, 3, 5], []), ([1, 2, 3, 5], [])]
    assert (store.tokens, copied.tokens) == (5, 7)
    with pytest.raises(SessionFull):
        copied.check_room(1)
    store.check_room(1)


def test_a_branch_takes_six_bytes_a_token_at_most() -> None:
    store, ids = TurnStore(), np.arange(50_000, dtype=np.int32)
    for length in range(1, 50_001, 997):
        store.record([turn_of(ids[:length].tolist())], len(store) - 1 if len(store) else None)
        base = store[0].prompt_ids.base
        assert base is not None
        assert base.nbytes <= 6 * length
    assert store.tokens == len(store[0].buffer)
