"""The guest agent's protocol: messages arrive whole, and invalid data is an error, never a hang or a flood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.qemu.guest.frames import FRAME, FRAME_BYTES, OPEN_LIMIT, FrameError, GuestMessage, Inbox, Outbox

HEADS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.lists(st.integers()), max_size=4)
MESSAGES = st.lists(st.builds(GuestMessage, HEADS, st.binary(max_size=50)), max_size=8)


def spoken(messages: list[GuestMessage]) -> bytes:
    outbox = Outbox()
    for message in messages:
        outbox.add(message)
    data = b""
    while outbox:
        data += outbox.next_frame()
    return data


@given(MESSAGES, st.lists(st.integers(0, 2000), max_size=10))
def test_messages_arrive_however_the_bytes_are_cut(messages: list[GuestMessage], cuts: list[int]) -> None:
    data, inbox, heard = spoken(messages), Inbox(), list[GuestMessage]()
    ends = sorted({*(cut for cut in cuts if cut < len(data)), len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        heard += inbox.feed(data[start:end])
    assert heard == messages


def test_a_short_message_does_not_wait_for_a_long_one() -> None:
    long, short = GuestMessage({"n": 1}, bytes(10 * FRAME_BYTES)), GuestMessage({"n": 2}, b"now")
    assert list(Inbox().feed(spoken([long, short]))) == [short, long]


@given(st.binary(max_size=200))
def test_noise_is_an_error_or_waits_for_more(noise: bytes) -> None:
    try:
        heard = list(Inbox().feed(noise))
    except FrameError:
        return
    assert all(isinstance(message.head, dict) for message in heard)


@pytest.mark.parametrize(
    "data",
    [
        FRAME.pack(1, FRAME_BYTES + 1, 1),
        FRAME.pack(1, 4, 2) + bytes(4),
        FRAME.pack(1, 2, 1) + b"{}",
        FRAME.pack(1, 6, 1) + b"\2\0\0\0[]",
        FRAME.pack(1, 6, 1) + b"\x09\0\0\0{}",
        FRAME.pack(1, 4 + 4000, 1) + b"\xa0\x0f\0\0" + b"[" * 4000,
    ],
    ids=["too long", "no such mark", "no head", "a list", "a head that is cut", "deep"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(Inbox().feed(data))


def test_a_flood_is_not_held() -> None:
    inbox = Inbox(limit_bytes=100_000)
    chunk = FRAME.pack(1, FRAME_BYTES, 0) + bytes(FRAME_BYTES)
    with pytest.raises(FrameError, match="too much"):
        list(inbox.feed(chunk * 2))
    with pytest.raises(FrameError, match="too much"):
        list(Inbox().feed(b"".join(FRAME.pack(number, 0, 0) for number in range(OPEN_LIMIT + 1))))
