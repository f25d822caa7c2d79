"""What a long-distance link does to packets: rate, delay, loss, a bounded queue; as arithmetic, without a clock.

A link is a first-in-first-out line of fixed rate followed by a fixed delay, so when a packet will arrive is known the
moment it is sent. Moving real packets at those times is ``router.py``'s.
"""

import random
from dataclasses import dataclass
from typing import final

LOSS_SEED = "etude-wan"
"""Keeps the losses of links apart from whatever else is drawn from the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """One direction of a link. Raises ``ValueError`` for values that no link has."""

    delay_s: float
    """From the end of transmission to arrival."""
    bits_per_s: float
    loss: float
    """Share of the packets that are lost, each independently of the others and whatever its size."""
    queue_bytes: int
    """Maximum bytes that wait for transmission; more are dropped."""

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.bits_per_s <= 0 or not 0 <= self.loss < 1 or self.queue_bytes < 1:
            raise ValueError(f"{self}: delays are not negative, rates and queues positive, losses in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of one direction of a link so far, including IP headers."""

    packets: int = 0
    """Packets sent into the link, delivered or not."""
    size_bytes: int = 0
    """Bytes of these packets, which the sender pays for."""
    lost: int = 0
    """Packets lost at random."""
    dropped: int = 0
    """Packets that found the queue full."""
    cut: int = 0
    """Packets that found the link cut; they are not among those that were sent into it."""

    def since(self, before: "Traffic") -> "Traffic":
        """Traffic since ``before``."""
        return Traffic(
            packets=self.packets - before.packets,
            size_bytes=self.size_bytes - before.size_bytes,
            lost=self.lost - before.lost,
            dropped=self.dropped - before.dropped,
            cut=self.cut - before.cut,
        )


@final
class Link:
    """One direction between two sites; ``seed`` decides which packets are lost."""

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self._shape = shape
        self._random = random.Random(f"{LOSS_SEED} {seed}")
        self._idle_s = 0.0
        self._packets = self._size_bytes = self._lost = self._dropped = self._cut = 0
        self._is_disconnected = False

    @property
    def traffic(self) -> Traffic:
        """Traffic so far."""
        return Traffic(
            packets=self._packets,
            size_bytes=self._size_bytes,
            lost=self._lost,
            dropped=self._dropped,
            cut=self._cut,
        )

    def cut(self) -> None:
        """Stop carrying packets until :meth:`heal`; those in flight still arrive. Senders get no notice."""
        self._is_disconnected = True

    def heal(self) -> None:
        """Carry packets again."""
        self._is_disconnected = False

    def send(self, size_bytes: int, now_s: float) -> float | None:
        """Take a packet at ``now_s``, which never runs backwards; returns when it arrives, ``None`` if it never does.

        Arrivals come in the order of sending.
        """
        if self._is_disconnected:
            self._cut += 1
            return None
        shape = self._shape
        self._packets += 1
        self._size_bytes += size_bytes
        waiting_bytes = max(0.0, self._idle_s - now_s) * shape.bits_per_s / 8
        if waiting_bytes + size_bytes > shape.queue_bytes:
            self._dropped += 1
            return None
        self._idle_s = max(self._idle_s, now_s) + size_bytes * 8 / shape.bits_per_s
        if self._random.random() < shape.loss:  # lost on the way: it took its time on the line all the same
            self._lost += 1
            return None
        return self._idle_s + shape.delay_s
