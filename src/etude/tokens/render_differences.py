"""Differences between the training context of a model and the prompt of a server that renders every call anew.

    trained       prompt, sampled ids with thoughts, new messages               ``open``, ``extend``, ``extend``, …
    anew          the template over all messages, as other servers render them  ``open``

Determined by rendering conversations with known text, so any chat format works. Owns the comparison; docs/models.md
describes the consequences.
"""

from collections.abc import Sequence

from etude.tokens.messages import ChatFormat, ChatMessage, Tool, ToolCall

QUESTION, THOUGHT = "zq1", "zq2"
"""Words that no template contains."""
TOOL = Tool(name="probe", description=".", parameters={"type": "object", "properties": {}})
USER, NEXT = ChatMessage(role="user", content=QUESTION), ChatMessage(role="user", content=".")
ANSWER = ChatMessage(role="assistant", content=".", thinking=THOUGHT)
CALL = ChatMessage(
    role="assistant", thinking=THOUGHT, tool_calls=(ToolCall(call_id="abcdefghi", name="probe", arguments="{}"),)
)
RESULT = ChatMessage(role="tool", content=".", tool_call_id="abcdefghi")


def rendered_differently(chat: ChatFormat) -> list[str]:
    """The differences, each as a phrase; empty for a format that other servers render like étude."""
    places: dict[str, list[str]] = {}
    for place, conversation in (
        ("at the next user's message", [USER, ANSWER, NEXT]),
        ("at a tool's result", [USER, CALL, RESULT]),
        ("at a second tool's result", [USER, CALL, RESULT, CALL, RESULT]),
    ):
        try:
            differences = _differences(chat, conversation)
        except ValueError:
            continue  # the template rejects it: no server shows it to the model
        for what in differences:
            places.setdefault(what, []).append(place)
    return [f"{what} {' and '.join(there[:2])}" for what, there in places.items()]


def _differences(chat: ChatFormat, conversation: Sequence[ChatMessage]) -> list[str]:
    opened, whole = chat.open(conversation[:1], [TOOL]), chat.open(conversation, [TOOL])
    behind = chat.extend(conversation[-2], conversation[-1:], [TOOL])
    start, _, _ = chat.decode(opened).partition(QUESTION)
    text = chat.decode(whole)
    checks = {
        "earlier thoughts are left out": chat.thinks and THOUGHT not in text,
        "what stands before the first message changes": not text.startswith(start + QUESTION),
        "other tokens stand behind the reply": whole[-len(behind) :] != behind,
    }
    return [what for what, differs in checks.items() if differs]
