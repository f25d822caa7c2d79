"""Which messages count as the same, and which reply a conversation continues."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.capture.conversations import ALIKE, EXACT, Node, alike, dissolve, find, insert, new_root, twins_of
from etude.tokens.messages import ChatMessage, ToolCall

CALL = ToolCall(call_id="call_1", name="edit", arguments='{"path": "a.py", "line": 3, "by": 1.0}')
SAID = ChatMessage(role="assistant", content="I edit.\n", thinking="hm", tool_calls=(CALL,))


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def called(arguments: str, name: str = "edit") -> ChatMessage:
    return replace(SAID, tool_calls=(ToolCall(call_id="other", name=name, arguments=arguments),))


@pytest.mark.parametrize(
    "back",
    [
        replace(SAID, content="I edit."),
        replace(SAID, content="\n I edit. "),
        replace(SAID, thinking=""),
        called('{"by":1,"line":3,"path":"a.py"}'),
    ],
)
def test_what_clients_change_on_the_way_back_does_not_matter(back: ChatMessage) -> None:
    assert alike(back, SAID)
    assert alike(SAID, back)


@pytest.mark.parametrize(
    "other",
    [
        replace(SAID, content="I  edit."),
        replace(SAID, role="user"),
        replace(SAID, tool_calls=()),
        replace(SAID, tool_calls=(CALL, CALL)),
        called('{"path": "a.py", "line": 4, "by": 1}'),
        called('{"path": "a.py", "line": 3, "by": 1'),
        called(CALL.arguments, name="read"),
    ],
)
def test_anything_else_is_another_message(other: ChatMessage) -> None:
    assert not alike(other, SAID)
    assert not alike(SAID, other)


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert alike(called("{oops"), called("{oops"))
    assert not alike(called("{oops"), called("{oops "))
    assert alike(called(""), called("{}"))
    deep = "[" * 1000 + "]" * 1000
    assert not alike(called(deep), called(deep + " "))


def test_whose_call_an_output_answers_does_not_matter_but_what_it_says_does() -> None:
    output = ChatMessage(role="tool", content="ok\n", tool_call_id="call_1")
    assert alike(output, replace(output, tool_call_id="x"))
    assert not alike(output, replace(output, content="ok"))


def test_an_unknown_conversation_is_not_found_and_can_be_put_in() -> None:
    root, messages = new_root(), [user("a"), SAID, user("b")]
    found = find(root, messages)
    assert (found.reply, found.depth, found.last_depth, found.ends) == (None, 0, 0, ())
    end = insert(found, messages)
    assert end.path() == messages
    again = find(root, messages)
    assert again.ends == (end,)
    assert again.reply is None  # nobody of ours said it


def test_the_deepest_reply_is_found_through_an_unsampled_message() -> None:
    root = new_root()
    first = root.add(user("a")).add(SAID, turn=0)
    second = first.add(user("b")).add(ChatMessage(role="assistant", content="by hand")).add(user("c")).add(SAID, turn=1)
    found = find(root, [*second.path(), user("d")])
    assert (found.reply, found.depth) == (second, 6)
    found = find(root, [*second.path()[:4], user("d")])
    assert (found.reply, found.depth, found.last_depth) == (first, 2, 4)


def test_of_replies_that_look_alike_the_exact_one_is_meant_and_else_the_newest() -> None:
    root = new_root()
    asked = root.add(user("a"))
    one, two = (asked.add(replace(SAID, thinking=thought), turn=turn) for turn, thought in enumerate(["1", "2"]))
    assert find(root, [user("a"), one.message]).reply is one
    assert find(root, [user("a"), replace(SAID, thinking="")]).reply is two
    assert find(root, [user("a"), replace(SAID, thinking="")]).ends == (one, two)


def test_what_fits_earlier_on_the_way_counts_too() -> None:
    root = new_root()
    asked = root.add(user("a"))
    ways = [asked.add(replace(SAID, thinking=thought), turn=turn) for turn, thought in enumerate(["1", "2"])]
    ends = [way.add(user("b")).add(SAID, turn=2 + turn) for turn, way in enumerate(ways)]
    for way, end in zip(ways, ends, strict=True):
        assert find(root, [user("a"), way.message, user("b"), SAID]).reply is end


def test_an_older_reply_that_leads_further_is_followed_whatever_came_later() -> None:
    root = new_root()
    asked = root.add(user("a"))
    deep = asked.add(SAID, turn=0).add(user("b")).add(SAID, turn=1)
    asked.add(SAID, turn=2)
    assert find(root, [user("a"), SAID, user("b"), SAID]).reply is deep


def test_a_message_fits_as_before_once_it_has_come_back() -> None:
    node, back = Node(SAID), called('{"by":1,"line":3,"path":"a.py"}')
    assert [node.likeness(message) for message in (SAID, back, back, user("a"), SAID)] == [
        EXACT,
        ALIKE,
        ALIKE,
        0,
        EXACT,
    ]


def test_a_tree_that_is_done_with_has_no_cycles() -> None:
    root = new_root()
    asked = root.add(user("a"))
    asked.add(SAID)
    dissolve(root)
    assert root.children == []
    assert asked.children == []


def test_a_copy_of_a_tree_is_as_deep_as_it_and_grows_by_itself() -> None:
    root = new_root()
    node = root.add(user("0"))
    for depth in range(3000):
        node = node.add(SAID, turn=depth).add(user(str(depth)))
    assert root.children[0].children[0].likeness(called('{"by":1,"line":3,"path":"a.py"}')) == ALIKE
    twins = twins_of(root)
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
    known: list[list[ChatMessage]], asked: list[ChatMessage]
) -> None:
    root, sampled = new_root(), list[list[ChatMessage]]()
    for turn, messages in enumerate(known):
        insert(find(root, messages), messages).add(SAID, turn=turn)
        sampled.append([*messages, SAID])
    for conversation in [asked, *sampled, *[[*one, *asked] for one in sampled]]:
        found = find(root, conversation)
        depths = [
            len(one)
            for one in sampled
            if len(one) <= len(conversation)
            and all(alike(mine, theirs) for mine, theirs in zip(one, conversation, strict=False))
        ]
        assert found.depth == max(depths, default=0)
