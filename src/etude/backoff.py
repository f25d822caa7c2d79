"""Delays between retries: doubled after each failure up to a bound, less a random part.

Pure: who waits, by which clock, and when to give up is the caller's. The random part keeps clients that failed together
from coming back together (Brooker, "Exponential Backoff and Jitter", 2015).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

_MOST_DOUBLINGS = 62
"""Beyond this every bound has long been reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """An exponential backoff. Raises ``ValueError`` for delays that do not grow or a jitter that is no share."""

    first_s: float
    """Delay after one failure."""
    longest_s: float
    """Bound of all delays."""
    jitter: float = 0.0
    """Share of each delay that is random, 0 to 1."""

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.longest_s and 0 <= self.jitter <= 1):
            raise ValueError(f"{self}: delays grow from above 0, and the jitter is a share from 0 to 1")

    def delay_s(self, failures: int, chance: float = 0.0) -> float:
        """Seconds to wait after ``failures`` ≥ 1 in a row; ``chance`` in 0 … 1 takes the random part away."""
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
        return delay_s * (1 - self.jitter * chance)

    def delays(self, draw: Callable[[], float] = random.random) -> Iterator[float]:
        """The delays after 1, 2, 3, … failures, without end; ``draw`` gives the chance for each."""
        return (self.delay_s(failures, draw()) for failures in count(1))
