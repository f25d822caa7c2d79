"""The circuit breaker of a process's rollouts: when to pause attempts, and when to give up.

                    too many failures              the pause is over
        CLOSED ────────────────────────▶ OPEN ────────────────────────▶ PROBING
          ▲ ▲                              │ ▲                             │ │
          │ └── a rollout still succeeded ─┘ └───── the probe failed ──────┘ │
          └──────────────────────── the probe succeeded ─────────────────────┘

While machines are down, an attempt costs a slot one of its few tries and tells nothing new. So after a streak of
failures nothing starts any more; one rollout at a time probes, after pauses that double, until one succeeds. An outage
then costs attempts by its probes only, however many slots wait, and slots are not lost because they happened to wait.
Only what may pass is counted here; a bug, or a contract that is broken, ends the process where it is raised.

Pure: outcomes and ``now`` (seconds) in, a verdict out. The thresholds are those of Fireworks' open recipe, which stops
the whole run where this waits.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from etude.backoff import Backoff

STREAK = 5
"""Failures in a row that open the circuit."""
WINDOW, WINDOW_FULL, WINDOW_SHARE = 20, 10, 0.5
"""So do failures of this share of the last 20 attempts, once there were 10."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0
"""Before a probe; doubles with each that fails."""
OUTAGE_SHARE = 0.1
"""A pause may take this share of the outage so far, if that is longer: a day's outage costs a hundred probes, each an
attempt of some slot, and is over a tenth later than it was.
"""
FEWEST_PROBES = 5
"""Failed ones before anything is given up: a process that was suspended through an outage has not tried yet."""
FIRST_OUTAGE_S = 60.0
"""Longest outage of a process of which no rollout ever succeeded: more likely something was never right."""


class Circuit(StrEnum):
    """State of the circuit breaker: which rollouts may start."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, for a pause."""
    PROBING = "probing"
    """One rollout."""


CIRCUIT_MOVES: Mapping[Circuit, frozenset[Circuit]] = MappingProxyType(
    {
        Circuit.CLOSED: frozenset({Circuit.OPEN}),
        Circuit.OPEN: frozenset({Circuit.PROBING, Circuit.CLOSED}),
        Circuit.PROBING: frozenset({Circuit.OPEN, Circuit.CLOSED}),
    }
)
"""State of a circuit → where it may go."""


class Breaker:
    """Circuit breaker over attempts. It gives up after ``outage_s`` without a success; 0 for never.

    ``worked``: something has succeeded before, in another process.
    """

    def __init__(self, outage_s: float, *, worked: bool = False) -> None:
        self.circuit = Circuit.CLOSED
        self.until_s = 0.0
        """End of the pause, while open."""
        self.gave_up = False
        """Nothing has succeeded for too long: it is not the tasks, it is the machines."""
        self._outage_s = outage_s or math.inf
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._streak = 0
        self._ever_succeeded = worked
        self._opened_s: float | None = None
        self._failed_probes = 0

    @property
    def since_s(self) -> float | None:
        """Time from which on nothing could be had any more; ``None`` while all is well."""
        return self._opened_s

    def ask(self, now: float) -> Circuit:
        """The circuit at ``now``: it begins to probe when its pause is over."""
        if self.circuit is Circuit.OPEN and now >= self.until_s:
            self._move(Circuit.PROBING)
        return self.circuit

    def succeeded(self) -> None:
        """A rollout was graded: all that it takes is there."""
        self._ever_succeeded = True
        self.gave_up = False
        self._streak = self._failed_probes = 0
        self._opened_s = None
        if self.circuit is Circuit.CLOSED:
            self._failed.append(False)
            return
        self._failed.clear()
        self._move(Circuit.CLOSED)

    def failed(self, now: float, *, probe: bool = False) -> None:
        """A rollout failed by infrastructure; ``probe``: it was started to probe."""
        self._failed.append(True)
        self._streak += 1
        if self.circuit is Circuit.CLOSED and self._has_tripped():
            self._opened_s = now
            self._open(now)
        elif self.circuit is Circuit.PROBING and probe:  # any other was under way when the circuit opened
            assert self._opened_s is not None, "who probes has opened"
            self._failed_probes += 1
            outage_limit_s = self._outage_s if self._ever_succeeded else min(self._outage_s, FIRST_OUTAGE_S)
            self.gave_up = self._failed_probes >= FEWEST_PROBES and now - self._opened_s >= outage_limit_s
            self._open(now)

    def _has_tripped(self) -> bool:
        many = len(self._failed) >= WINDOW_FULL and sum(self._failed) >= WINDOW_SHARE * len(self._failed)
        return many or self._streak >= STREAK

    def _open(self, now: float) -> None:
        self._move(Circuit.OPEN)
        longest_s = max(MAX_PAUSE_S, OUTAGE_SHARE * (now - (now if self._opened_s is None else self._opened_s)))
        self.until_s = now + Backoff(first_s=FIRST_PAUSE_S, longest_s=longest_s).delay_s(1 + self._failed_probes)

    def _move(self, to: Circuit) -> None:
        assert to in CIRCUIT_MOVES[self.circuit], f"a circuit went from {self.circuit} to {to}"
        self.circuit = to
