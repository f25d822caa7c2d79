"""The actions of a rollout, read from its tokens, for every format of calls."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.harnesses.actions import OUTPUT_CHARACTERS, SHELL, Action, excerpt, read_actions, read_calls
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatMessage
from etude.types import Finish, Ids, Turn


def ids(text: str) -> Ids:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(token_ids: Ids) -> str:
    return bytes(token_ids.astype(np.uint8)).decode()


def turn(prompt: str, reply: str) -> Turn:
    count = len(reply.encode())
    return Turn(
        prompt_ids=ids(prompt),
        completion_ids=ids(reply),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        finish=Finish.STOP,
    )


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("read util.py", [("read", {"path": "util.py"})]),
        ("read util.py 7", [("read", {"path": "util.py", "line": "7"})]),
        ("edit a.py 3\n    return 1\n", [("edit", {"path": "a.py", "line": "3", "text": "    return 1"})]),
        ("test", [("test", {})]),
        ("submit", [("submit", {})]),
        (
            'Look.<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 3}}\n</tool_call>',
            [("bash", {"command": "ls", "n": "3"})],
        ),
        ('<tool_call>{"name": "run", "arguments": "{\\"cmd\\": \\"ls\\"}"}</tool_call>', [("run", {"cmd": "ls"})]),
        (
            "<function=bash>\n<parameter=command>\nls -l\n</parameter>\n</function>",
            [("bash", {"command": "ls -l"})],
        ),
        ("THOUGHT: look\n\n```bash\ngit log\nls\n```\n", [(SHELL, {"command": "git log\nls"})]),
        ("```mswea_bash_command\nls\n```", [(SHELL, {"command": "ls"})]),
        ("<think>```bash\ngit log --all\n```</think>\ntest", []),
        ("<think>run `git log --all`?</think>submit", [("submit", {})]),
        ("```python\nprint(1)\n```", []),
        ("I am not sure.", []),
        ('<tool_call>{"name": "bash", "arguments": </tool_call>', []),
        ("", []),
    ],
)
def test_calls_are_read_in_every_way_they_are_written(reply: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert read_calls(reply) == expected


def test_a_bare_reply_is_a_command_where_the_harness_takes_it_so() -> None:
    assert read_calls("<think>hm</think>\ngit log\n", bare_shell=True) == [(SHELL, {"command": "git log"})]
    assert read_calls("test", bare_shell=True) == [(SHELL, {"command": "test"})]
    assert read_calls("```sh\nls\n```", bare_shell=True) == [(SHELL, {"command": "ls"})]
    assert read_calls(" \n", bare_shell=True) == []


def test_an_output_is_what_stands_behind_the_reply_in_the_next_prompt() -> None:
    turns = [turn("do it|", "read a"), turn("do it|read a|1 x|", "test"), turn("do it|read a|1 x|test|PASS|", "submit")]
    assert read_actions(turns, decode) == (
        Action(tool="read", arguments={"path": "a"}, output="|1 x|", turn=0),
        Action(tool="test", output="|PASS|", turn=1),
        Action(tool="submit", turn=2),
    )


def test_real_conversations_are_read_back_from_their_tokens() -> None:
    chat = ChatTemplate.train(["read a.py test submit PASS 1 x = 1 edit fix"] * 4, 300)
    replies, observations = ("read a.py", "edit a.py 1\nx = 2", "test", "submit"), ("1 x = 1", "ok", "PASS")
    messages = [ChatMessage(role="user", content="fix a.py")]
    turns: list[Turn] = []
    for index, reply in enumerate(replies):
        sampled = np.asarray([*chat.encode(reply), chat.end_id], np.int32)
        zeros = np.zeros(len(sampled), np.float32)
        prompt = np.asarray(chat.open(messages), np.int32)
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=zeros,
                versions=zeros.astype(np.int32),
                finish=Finish.STOP,
            )
        )
        messages.append(ChatMessage(role="assistant", content=reply))
        messages += [ChatMessage(role="user", content=text) for text in observations[index : index + 1]]
    actions = read_actions(turns, lambda token_ids: chat.decode(token_ids.tolist()))
    assert [(action.tool, action.output) for action in actions] == [
        ("read", "1 x = 1"),
        ("edit", "ok"),
        ("test", "PASS"),
        ("submit", ""),
    ]


def test_a_branch_finds_the_prompt_that_goes_on_from_it_and_a_rewritten_history_has_no_output() -> None:
    turns = [turn("p|", "test"), turn("q|", "submit"), turn("p|test|PASS|", "submit"), turn("summary|", "test")]
    assert [action.output for action in read_actions(turns, decode)] == ["|PASS|", "", "", ""]


def test_a_long_output_keeps_both_ends() -> None:
    cut = excerpt("a" * OUTPUT_CHARACTERS + "b" * OUTPUT_CHARACTERS)
    assert len(cut) < OUTPUT_CHARACTERS + 10
    assert cut.startswith("aaa") and cut.endswith("bbb")
    assert excerpt("short") == "short"


NESTED = st.builds(
    lambda opening, depth, closing: opening * depth + closing * depth,
    st.sampled_from(["[", '{"a":', '{"name":"x","arguments":{"a":', '{"name":"x","arguments":"[']),
    st.integers(0, 3000),
    st.sampled_from(["", "]", "}", "}}"]),
)


@given(st.text(alphabet="<>tool_cal{}\"':fn=prme/`bsh\n \\[]1", max_size=80) | NESTED)
@example('{"name":"x","arguments":{"a":' + "[" * 1000 + "}}")
@example('{"name":"x","arguments":{"a":' + "[" * 1000 + "]" * 1000 + "}}")
def test_any_reply_is_read(reply: str) -> None:
    for tool, arguments in read_calls(f"<tool_call>{reply}</tool_call>{reply}"):
        assert isinstance(tool, str)
        assert all(isinstance(value, str) for value in arguments.values())
