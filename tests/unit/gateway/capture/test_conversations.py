"""What a model is asked to continue, token for token, in a format where every character is a token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SessionLost
from etude.gateway.api.calls import Answer, Call, FinishReason, Reply, Sampling
from etude.gateway.capture.conversations import Conversation, SessionFull, TurnStore
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
        said = [token for one in messages for token in (ROLES[one.role], *self.encode(one.content), END)]
        return [*said, ROLES["assistant"]]


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
    conversation: Conversation, call: Call, *said: tuple[Sequence[int], ChatMessage], answer_id: str = ""
) -> Answer:
    """An answer as an engine would give it; not yet recorded."""
    prompt = conversation.prompt(call)
    return Answer(
        answer_id=answer_id or f"{len(conversation.turns):024x}",
        created=0,
        model="policy",
        replies=tuple(reply_of(prompt.token_ids, ids, message) for ids, message in said),
        reused_tokens=prompt.reused,
    )


def play(
    conversation: Conversation, call: Call, ids: Sequence[int], message: ChatMessage | None = None
) -> tuple[list[int], ChatMessage]:
    """One call and its record: what is known now, and the reply as its caller sees it."""
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
    known, reply = play(conversation, call_of(question), [7, 7, *letters("x"), END], assistant("some x"))
    prompt = conversation.prompt(call_of(question, reply, user("on")))
    assert prompt.token_ids.tolist() == [*known, *FORMAT.extend(reply, [user("on")])]
    assert prompt.reused == len(known)


@pytest.mark.parametrize(("ids", "closed_by"), [([9], [END]), ([9, END], []), ([9, ALSO_END], []), ([], [END])])
def test_only_a_reply_that_was_cut_is_closed(ids: list[int], closed_by: list[int]) -> None:
    conversation, question = new_conversation(), user("go")
    known, reply = play(conversation, call_of(question), ids)
    expected = [*known, *closed_by, *FORMAT.extend(reply, [user("on")])]
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
    known, reply = play(conversation, call_of(question, tools=["read"]), [9, END])
    asked = [question, reply, user("on")]
    assert ids_for(conversation, *asked, tools=["read"])[: len(known)] == known
    assert ids_for(conversation, *asked, tools=["read", "edit"]) == FORMAT.open(
        asked, [Tool(name="read"), Tool(name="edit")]
    )
    assert ids_for(conversation, *asked) == FORMAT.open(asked)


def test_other_kwargs_of_the_template_are_another_history() -> None:
    conversation, question = new_conversation(), user("go")
    thinks = replace(call_of(question), template_kwargs={"thinking": True, "effort": [1]})
    known, reply = play(conversation, thinks, [9, END])
    asked = (question, reply, user("on"))
    goes_on = conversation.prompt(replace(thinks, messages=asked))
    assert goes_on.reused == len(known) and goes_on.token_ids[: len(known)].tolist() == known
    assert conversation.prompt(
        replace(thinks, messages=asked, template_kwargs={"effort": [1], "thinking": True})
    ).reused
    unlike: list[dict[str, Json]] = [{}, {"thinking": 1, "effort": [1]}, {"thinking": True}]
    for others in unlike:
        prompt = conversation.prompt(replace(thinks, messages=asked, template_kwargs=others))
        assert prompt.reused == 0 and prompt.token_ids.tolist() == FORMAT.open(asked, (), others)
        assert conversation.last_answer(replace(thinks, template_kwargs=others)) is None
    assert conversation.last_answer(thinks) is not None
    forked = conversation.fork("f")
    assert forked.replayed(thinks) is not None and forked.prompt(replace(thinks, messages=asked)).reused == len(known)


def test_what_clients_change_on_the_way_back_does_not_break_a_branch() -> None:
    conversation, question = new_conversation(), user("go")
    said = replace(
        assistant(" I look. \n", thinking="hm"),
        tool_calls=(ToolCall(call_id="c1", name="read", arguments='{"path": "a", "n": 1.0}'),),
    )
    known, _ = play(conversation, call_of(question), [9, END], said)
    back = replace(
        assistant("I look."), tool_calls=(ToolCall(call_id="toolu_7", name="read", arguments='{"n":1,"path":"a"}'),)
    )
    output = ChatMessage(role="tool", content="1: x", tool_call_id="toolu_7")
    assert ids_for(conversation, question, back, output)[: len(known)] == known


def test_where_the_template_cannot_be_put_behind_a_reply_all_is_rendered_afresh() -> None:
    conversation, question = new_conversation(), user("go")
    _, reply = play(conversation, call_of(question), [9, END])
    asked = [question, reply, ChatMessage(role="system", content="late"), user("on")]
    prompt = conversation.prompt(call_of(*asked))
    assert prompt.token_ids.tolist() == FORMAT.open(asked)
    assert prompt.reused == 0


def test_what_no_template_takes_is_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="cannot begin with a tool's output"):
        new_conversation().prompt(call_of(ChatMessage(role="tool")))
    with pytest.raises(ValueError, match="nothing to answer"):
        new_conversation().prompt(call_of())


def test_several_replies_to_one_call_are_turns_that_can_each_be_continued() -> None:
    conversation, call = new_conversation(), call_of(user("go"), count=3)
    said = [assistant("a", thinking="1"), assistant("a", thinking="2"), assistant("b")]
    answer = answer_of(conversation, call, *[([9 + i, END], message) for i, message in enumerate(said)])
    conversation.record(call, answer)
    assert len(conversation.turns) == 3
    for i, message in enumerate(said):
        ids = ids_for(conversation, user("go"), message, user("on"))
        assert ids[: len(ids_for(conversation, user("go"))) + 1][-1] == 9 + i
    forgetful = ids_for(conversation, user("go"), assistant("a"), user("on"))  # either is exact: the newest is taken
    assert forgetful[len(ids_for(conversation, user("go")))] == 10


def seen(answer: Answer | None) -> tuple[str, list[list[int]]] | None:
    """What the caller of an answer sees of it that no other answer has, and its prompts."""
    if answer is None:
        return None
    return answer.answer_id, [reply.turn.prompt_ids.tolist() for reply in answer.replies]


def test_a_request_that_comes_again_has_one_turn() -> None:
    conversation, question = new_conversation(), call_of(user("go"))
    said = ([9, END], assistant("x"))
    first, second = (answer_of(conversation, question, said, answer_id=name) for name in ("1st", "2nd"))
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
    said = ([9, END], assistant("x"))
    for answer in [answer_of(conversation, question, said, answer_id=name) for name in ("older", "newer")]:
        conversation.record(question, answer)
    newest = conversation.last_answer(replace(question, stream=True, model="mine"))
    assert newest is not None
    assert newest.answer_id == "newer"
    assert conversation.last_answer(replace(question, single_call=True)) is None
    assert conversation.last_answer(call_of(user("go"), tools=["read"])) is None
    assert conversation.last_answer(call_of(user("go"), previous="?")) is None


def test_an_answer_can_be_continued_by_its_id() -> None:
    conversation, instructed = new_conversation(), ChatMessage(role="system", content="be brief")
    known, first = play(conversation, call_of(user("go")), [9, END])
    following = call_of(user("on"), previous=f"{0:024x}")
    assert conversation.prompt(following).token_ids.tolist() == [*known, *FORMAT.extend(first, [user("on")])]
    play(conversation, following, [10, END])
    third = replace(call_of(instructed, user("so?"), previous=f"{1:024x}"), instructed=True)
    whole = [instructed, user("go"), first, user("on"), assistant("\x02")]
    assert conversation.prompt(third).token_ids.tolist() == FORMAT.open([*whole, user("so?")])
    play(conversation, third, [11, END])
    fourth = call_of(user("end"), previous=f"{2:024x}")  # instructions hold for one call
    known = ids_for(conversation, *whole[1:])
    assert conversation.prompt(fourth).token_ids.tolist()[: len(known) - 1] == known[:-1]
    with pytest.raises(ValueError, match="'nobody' is unknown"):
        conversation.prompt(call_of(user("on"), previous="nobody"))


def test_raw_prompts_are_taken_verbatim_and_continue_what_they_begin_with() -> None:
    conversation = new_conversation()
    raw = Call(prompt=(9, 10, 11))
    known, _ = play(conversation, raw, [12, 13])
    longer = conversation.prompt(Call(prompt=(*known, 14)))
    assert longer.token_ids.tolist() == [*known, 14]
    assert longer.reused == len(known)
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
    known, reply = play(conversation, call_of(question), [9, END])
    held = [len(known)]
    for content in ("on", "on", "another way"):
        known, _ = play(conversation, call_of(question, reply, user(content)), [9, END])
        held.append(len(known))
    # The second "on" has the prompt of the first; the third shares what it begins with but has to have it once more.
    assert conversation._turns.tokens == held[1] + 2 + 2 + held[3]


def test_a_fork_goes_on_by_itself() -> None:
    trunk, question = new_conversation(), user("go")
    known, reply = play(trunk, call_of(question), [9, END])
    fork = trunk.fork("f")
    assert fork.session_id == "f"
    branches = {}
    for name, conversation, content in (("trunk", trunk, "left"), ("fork", fork, "right")):
        asked = call_of(question, reply, user(content))
        branches[name], _ = play(conversation, asked, [10, END])
        assert branches[name][: len(known)] == known
        assert conversation.last_answer(asked) is not None
        assert conversation.last_answer(call_of(question)) is not None
    assert trunk.last_answer(call_of(question, reply, user("right"))) is None
    assert fork.last_answer(call_of(question, reply, user("left"))) is None
    for name, conversation in (("trunk", trunk), ("fork", fork)):
        assert [[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()] for turn in conversation.turns] == [
            known,
            branches[name],
        ]
    trunk.close()
    assert fork.prompt(call_of(question, reply, user("right"))).reused == len(known)


CONTENTS = st.text(alphabet="aé \n", max_size=4)
COMPLETIONS = st.lists(st.integers(0, 12), max_size=5)
MOVES = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 50), CONTENTS, COMPLETIONS), max_size=8)


@given(MOVES)
def test_every_prompt_is_the_deepest_known_branch_and_then_only_new_text(
    moves: list[tuple[int, bool, int, str, list[int]]],
) -> None:
    """Random conversations with edits, against a model that compares whole histories."""
    conversation, seen = new_conversation(), list[list[int]]()
    known: dict[tuple[ChatMessage, ...], list[int]] = {}
    for number, (pick, edits, where, content, completion) in enumerate(moves):
        history = list(known)[pick % len(known)] if known else ()
        if edits and history:
            place = where % len(history)
            edited = replace(history[place], content=history[place].content + "~")
            history = (*history[:place], edited, *history[place + 1 :])
        messages = (*history, user(content))
        deepest = max((node for node in known if messages[: len(node)] == node), key=len, default=None)
        rest = FORMAT.open(messages)
        if deepest is not None:
            rest = [*known[deepest], *FORMAT.extend(deepest[-1], messages[len(deepest) :])]
        assert ids_for(conversation, *messages) == rest
        ids, reply = play(conversation, call_of(*messages), completion, assistant(f"reply {number}"))
        seen.append(ids)
        known[*messages, reply] = ids if completion and completion[-1] in FORMAT.stop_ids else [*ids, END]
    # No prompt that was written later changed one that was handed out before.
    assert [[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()] for turn in conversation.turns] == seen
