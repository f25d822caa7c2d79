"""The protocol between a virtual machine's agent and étude: messages in frames over one byte stream. Pure.

    message = length of head (u32) · head, a JSON object · body, bytes
    frame   = number of message (u32) · length (u32) · is last (u8) · chunk of a message

Messages may be large, so they are sent in chunks, and chunks of several messages alternate: a short answer never waits
for a long one. Both ends are étude's, but the agent shares a kernel with untrusted code, so a reader limits what it
accepts. Owns bytes, not meaning (:mod:`etude.sandboxes.qemu.guest.agent`).
"""

import json
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

FRAME = struct.Struct("<IIB")
LENGTH = struct.Struct("<I")
FRAME_BYTES = 64 << 10
"""Maximum number of a message's bytes in one frame."""
MESSAGE_LIMIT_BYTES = 160 << 20
"""Maximum size of a message: an archive of the usual limit, with a margin."""
OPEN_LIMIT = 256
"""Maximum number of incomplete messages."""


class GuestMessage(NamedTuple):
    """One message between host and guest."""

    head: dict[str, Any]  # JSON from another machine; the reader of a value checks its type
    body: bytes = b""


class FrameError(Exception):
    """Error: the other end broke the protocol; the rest of its stream cannot be read."""


class Outbox:
    """Outgoing messages, split into frames that alternate."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes, memoryview]] = deque()
        self._number = 0

    def __bool__(self) -> bool:
        """True if there is something to send."""
        return bool(self._waiting)

    def add(self, message: GuestMessage) -> None:
        """Put a message in line."""
        head = json.dumps(message.head, separators=(",", ":")).encode()
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._waiting.append((self._number, LENGTH.pack(len(head)) + head, memoryview(message.body)))

    def next_frame(self) -> bytes:
        """The next frame; there must be one."""
        number, head, body = self._waiting.popleft()
        from_head = head[:FRAME_BYTES]
        from_body = body[: FRAME_BYTES - len(from_head)]
        head, body = head[len(from_head) :], body[len(from_body) :]
        if head or body:
            self._waiting.append((number, head, body))
        return FRAME.pack(number, len(from_head) + len(from_body), not (head or body)) + from_head + from_body


class Inbox:
    """Assembles messages from received bytes."""

    def __init__(self, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._open: dict[int, bytearray] = {}
        self._held_bytes = 0

    def feed(self, data: bytes) -> Iterator[GuestMessage]:
        """Add received bytes and yield the messages that are complete. Raises :class:`FrameError`."""
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            number, length, is_last = FRAME.unpack_from(self._buffer)
            if length > FRAME_BYTES or is_last > 1:
                raise FrameError(f"a frame of {length} bytes: at most {FRAME_BYTES} are taken")
            if len(self._buffer) < FRAME.size + length:
                return
            chunk = bytes(self._buffer[FRAME.size : FRAME.size + length])
            del self._buffer[: FRAME.size + length]
            whole = self._join(number, chunk, is_last=bool(is_last))
            if whole is not None:
                yield _parse(whole)

    def _join(self, number: int, chunk: bytes, *, is_last: bool) -> bytearray | None:
        parts = self._open.setdefault(number, bytearray())
        parts += chunk
        self._held_bytes += len(chunk)
        if self._held_bytes > self._limit_bytes or len(self._open) > OPEN_LIMIT:
            raise FrameError(f"{len(self._open)} messages of {self._held_bytes} bytes in all are too much to hold")
        if not is_last:
            return None
        del self._open[number]
        self._held_bytes -= len(parts)
        return parts


def _parse(whole: bytearray) -> GuestMessage:
    try:
        (length,) = LENGTH.unpack_from(whole)
        head = json.loads(whole[LENGTH.size : LENGTH.size + length])
    except (struct.error, ValueError, RecursionError) as error:
        raise FrameError(f"a message that cannot be read: {error}") from error
    if not isinstance(head, dict) or len(whole) < LENGTH.size + length:
        raise FrameError("a message without a head")
    del whole[: LENGTH.size + length]
    return GuestMessage(head, bytes(whole))
