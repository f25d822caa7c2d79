"""Message frames: the text that a chat format writes around a message after a reply.

    ids behind a reply     ⟨end⟩⏎⟨start⟩user⏎bad call⟨end⟩⏎⟨start⟩assistant⏎
    decoded                ⏎user⏎bad call⏎assistant⏎                            role names stay, special tokens go
    content                bad call

A search for words at the beginning of a message would fail because of the role name before them. Rendering a message
with known content shows its frame, so any chat format works; the built-in format writes no text around messages.
"""

from typing import final

from etude.tokens.messages import ChatFormat, ChatMessage, ToolCall

CONTENT = "zq7"
"""Content of the rendered message: a text that no template contains."""
_CALL = ToolCall(call_id="abcdefghi", name="probe", arguments="{}")
PAIRS: tuple[tuple[ChatMessage, ChatMessage], ...] = (
    (ChatMessage(role="assistant", content="."), ChatMessage(role="user", content=CONTENT)),
    (
        ChatMessage(role="assistant", content="", tool_calls=(_CALL,)),
        ChatMessage(role="tool", content=CONTENT, tool_call_id=_CALL.call_id),
    ),
)
"""A reply and a message that may follow it; pairs that a format rejects are skipped."""


@final
class Frames:
    """Extracts the frames of messages from one chat format."""

    def __init__(self, chat: ChatFormat) -> None:
        frames = {frame for reply, message in PAIRS if (frame := _frame(chat, reply, message)) is not None}
        self._frames = sorted(frames, key=lambda frame: len(frame[0]) + len(frame[1]), reverse=True)

    def content(self, text: str) -> str:
        """The text after a reply, without the frame before its first message and after its last one.

        A text without a known frame is returned unchanged.
        """
        for before, behind in self._frames:
            if len(text) >= len(before) + len(behind) and text.startswith(before) and text.endswith(behind):
                return text[len(before) : len(text) - len(behind)]
        return text


def _frame(chat: ChatFormat, reply: ChatMessage, message: ChatMessage) -> tuple[str, str] | None:
    """The text before and after a message; ``None`` if the format rejects or changes the message."""
    try:
        text = chat.decode(chat.extend(reply, [message]))
    except ValueError:
        return None
    before, content, behind = text.partition(CONTENT)
    return (before, behind) if content else None
