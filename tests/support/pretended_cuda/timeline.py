"""Who may touch memory when: the order that streams, events and waits make, kept by vector clocks.

    host ──▶ stream 0 ──event──▶ stream 1         what a stream does knows what the host did before,
      ▲          │                                and of another stream what it waited for
      └──waits───┘

Owns order, not time: everything is computed at once and in turn, so values are always right here. What a real device
might do in another order is an error wherever nothing forbids it, so a race is found whether or not it would be lost.
Clocks are Mattern's ("Virtual time and global states of distributed systems", 1989).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, final

Seen: TypeAlias = dict[int, int]
"""Stream → how many of its entries are known to be over."""

HOST = -1
"""The number of the host among streams."""


class UnorderedAccess(RuntimeError):
    """Memory was touched before what touched it on another stream, or on the host, was known to be over."""


@dataclass(slots=True, eq=False)
class Touched:
    """Last accesses to an allocation."""

    writer: tuple[int, int] | None = None
    """Stream and entry of the last write."""
    readers: Seen = field(default_factory=dict)
    """The last entry of each stream that has read it since."""


@final
class Timeline:
    """The entries of all streams and of the host, and what each of them knows of the others."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, Seen] = defaultdict(dict)

    def enter(self, stream: int, what: str, *, reads: Iterable[Touched] = (), writes: Iterable[Touched] = ()) -> None:
        """Let a stream, or the host, do something. Raises :class:`UnorderedAccess` where nothing keeps it in order."""
        seen = self._seen[stream]
        _join(seen, self._seen[HOST])  # what the host did is over before it starts anything else
        entry = seen[stream] = seen.get(stream, 0) + 1
        for touched in reads:
            _check(touched.writer, seen, f"{what} on {_name(stream)} reads what", "writes")
            touched.readers[stream] = entry
        for touched in writes:
            _check(touched.writer, seen, f"{what} on {_name(stream)} overwrites what", "writes")
            for reader in touched.readers.items():
                _check(reader, seen, f"{what} on {_name(stream)} overwrites what", "reads")
            touched.writer, touched.readers = (stream, entry), {}

    def mark(self, stream: int) -> Seen:
        """The entries that are complete when a stream reaches this point: an event."""
        return dict(self._seen[stream])

    def wait(self, waiter: int, mark: Seen) -> None:
        """Let a stream, or the host, continue only after an event."""
        _join(self._seen[waiter], mark)


def _join(seen: Seen, other: Seen) -> None:
    for stream, entries in other.items():
        seen[stream] = max(seen.get(stream, 0), entries)


def _check(touch: tuple[int, int] | None, seen: Seen, what: str, does: str) -> None:
    if touch is not None and seen.get(touch[0], 0) < touch[1]:
        raise UnorderedAccess(f"{what} {_name(touch[0])} {does}: nothing waits for that to be over")


def _name(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"
