"""Consistent hashing of sessions to engines, so that all gateways choose alike. Pure.

              ·  ╭─ a ─ b ─╮  ·          every engine has POINTS points on the ring
            c    │         a             a session has one point, and goes to the next allowed engine, clockwise
              ·  ╰─ c ─ b ─╯  ·

Karger et al. 1997, "Consistent hashing and random trees"; the caller applies the bound on loads (Mirrokni et al. 2018).
An engine that leaves moves only its own sessions. Rendezvous hashing has this property too, but hashes a session with
each engine; here a choice costs the logarithm of the number of points, plus a step for each engine that is not allowed.
"""

import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from hashlib import blake2b

POINTS = 64
"""Points per engine: more points make shares more equal, but adding an engine slower."""
STEPS = 4
"""Steps around the ring after which, if few names are allowed, comparing their distances is faster."""
FULL_TURN = 1 << 64
"""Length of the ring."""
_PER_HASH = 8
"""Points per hash of 64 bytes."""
_POINT, _POINTS_OF_HASH = struct.Struct(">Q"), struct.Struct(f">{_PER_HASH}Q")


class HashRing:
    """Points of named engines on a ring."""

    def __init__(self) -> None:
        self._points = array("Q")  # ascending
        self._names: list[str] = []  # at the same index as its point
        self._points_of: dict[str, list[int]] = {}
        self._added: list[str] = []  # names whose points are not inserted yet, to insert many at once

    def __len__(self) -> int:
        """The number of names."""
        return len(self._points_of)

    def add(self, name: str) -> None:
        """Put a new name on the ring."""
        assert name not in self._points_of, f"{name!r} is on the ring"
        self._points_of[name] = sorted(_points_of(name))
        self._added.append(name)

    def remove(self, name: str) -> None:
        """Take a name off the ring."""
        self._insert_added()
        for point in self._points_of.pop(name):
            at = bisect_left(self._points, point)
            while self._names[at] != name:  # another name has the same point
                at += 1
            del self._points[at], self._names[at]

    def nearest(self, key: str, names: Collection[str]) -> str:
        """The name in ``names`` (at least one, all on the ring) whose point is next after that of ``key``.

        With many names, one is soon found on the ring; a few are compared by distance.
        """
        self._insert_added()
        start = _hash(key)
        first = bisect_left(self._points, start)
        last = first - len(self._names)  # the first point, one turn earlier: its index is negative
        for at in range(last, first):
            if (name := self._names[at]) in names:
                return name
            if at == last + STEPS and len(names) ** 2 <= len(self._points_of):
                break
        return min(names, key=lambda name: self._distance(start, name))

    def _distance(self, start: int, name: str) -> tuple[int, str]:
        """Distance from ``start`` to the next point of a name; the name breaks ties."""
        points = self._points_of[name]
        at = bisect_left(points, start)
        return (points[at] - start, name) if at < len(points) else (points[0] + FULL_TURN - start, name)

    def _insert_added(self) -> None:
        if self._added:
            points = [*zip(self._points, self._names, strict=True)]
            points += [(point, name) for name in self._added for point in self._points_of[name]]
            points.sort()
            self._points, self._names = array("Q", [point for point, _ in points]), [name for _, name in points]
            self._added.clear()


def _hash(key: str) -> int:
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_POINT.size).digest()
    (point,) = _POINT.unpack(digest)
    return int(point)


def _points_of(name: str) -> Iterator[int]:
    for number in range(POINTS // _PER_HASH):
        yield from _POINTS_OF_HASH.unpack(blake2b(f"{number}\0{name}".encode("utf-8", "surrogatepass")).digest())
