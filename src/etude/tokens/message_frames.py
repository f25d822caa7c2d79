"""Message frames: the text that a chat format writes around a message after a reply.

    ids behind a reply     ⟨end⟩⏎⟨start⟩user⏎bad call⟨end⟩⏎⟨start⟩assistant⏎
    decoded                ⏎user⏎bad call⏎assistant⏎                            role names stay, special tokens go
    content                bad call

Words at the beginning of an answer would never be found behind a role's name. What stands there is
found out by rendering a message whose content is known, so any chat format will do; the built-in one writes nothing.
"""

from typing import final

from etude.tokens.messages import ChatFormat, ChatMessage, ToolCall

CONTENT = "zq7"
"""Text of the message that is rendered: nothing that a template would say by itself."""
_CALL = ToolCall(call_id="abcdefghi", name="probe", arguments="{}")
PAIRS: tuple[tuple[ChatMessage, ChatMessage], ...] = (
    (ChatMessage(role="assistant", content="."), ChatMessage(role="user", content=CONTENT)),
    (
        ChatMessage(role="assistant", content="", tool_calls=(_CALL,)),
        ChatMessage(role="tool", content=CONTENT, tool_call_id=_CALL.call_id),
    ),
)
"""A reply and what may follow it; a format that knows no tools is not asked about them."""


@final
class Frames:
    """Extracts the frames of messages from one chat format."""

    def __init__(self, chat: ChatFormat) -> None:
        frames = {frame for reply, message in PAIRS if (frame := _frame(chat, reply, message)) is not None}
        self._frames = sorted(frames, key=lambda frame: len(frame[0]) + len(frame[1]), reverse=True)

    def content(self, text: str) -> str:
        """A text that follows a reply, without what stands before its first message and behind its last one.

        A text in no known frame is returned as it is.
        """
        for before, behind in self._frames:
            if len(text) >= len(before) + len(behind) and text.startswith(before) and text.endswith(behind):
                return text[len(before) : len(text) - len(behind)]
        return text


def _frame(chat: ChatFormat, reply: ChatMessage, message: ChatMessage) -> tuple[str, str] | None:
    """The text before a message and behind it; ``None`` where the format does not take it, or changes it."""
    try:
        text = chat.decode(chat.extend(reply, [message]))
    except ValueError:
        return None
    before, content, behind = text.partition(CONTENT)
    return (before, behind) if content else None
