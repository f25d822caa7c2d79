"""The circuit breaker of a process's rollouts: when to pause attempts, and when to give up.

                    too many failures              the pause is over
        CLOSED ────────────────────────▶ OPEN ────────────────────────▶ PROBING
          ▲ ▲                              │ ▲                             │ │
          │ └── a rollout still succeeded ─┘ └───── the probe failed ──────┘ │
          └──────────────────────── the probe succeeded ─────────────────────┘

While machines are down, an attempt uses up one of a slot's few tries without new information. So after a streak of
failures no rollout starts; one rollout at a time probes, after pauses that double, until one succeeds. An outage then
only costs the attempts of its probes, however many slots wait, and no waiting slot is lost. Only transient failures are
counted here; a bug or a broken contract ends the process where it is raised.

Pure: a verdict from outcomes and ``now`` (seconds). The thresholds are those of Fireworks' open recipe, which stops the
whole run in cases where this waits.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from etude.backoff import Backoff

STREAK = 5
"""Consecutive failures that open the circuit."""
WINDOW, WINDOW_FULL, WINDOW_SHARE = 20, 10, 0.5
"""The circuit also opens if this share of the last 20 attempts failed, once there were 10."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0
"""First and longest pause before a probe; it doubles with each failed probe."""
OUTAGE_SHARE = 0.1
"""A pause may be as long as this share of the outage so far, if that is longer: a day's outage costs a hundred probes,
each an attempt of a slot, and its end is noticed at most a tenth later.
"""
FEWEST_PROBES = 5
"""Failed probes before giving up: a process that was suspended during an outage has not tried yet."""
FIRST_OUTAGE_S = 60.0
"""Longest outage of a process without any successful rollout: its configuration is probably wrong."""


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
"""State of a circuit → its possible next states."""


class Breaker:
    """Circuit breaker over attempts. It gives up after ``outage_s`` without a success; 0 for never.

    ``worked``: a rollout has succeeded before, in another process.
    """

    def __init__(self, outage_s: float, *, worked: bool = False) -> None:
        self.circuit = Circuit.CLOSED
        self.until_s = 0.0
        """End of the pause, while open."""
        self.gave_up = False
        """True if nothing has succeeded for too long: the machines are at fault, not the tasks."""
        self._outage_s = outage_s or math.inf
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._streak = 0
        self._ever_succeeded = worked
        self._opened_s: float | None = None
        self._failed_probes = 0

    @property
    def since_s(self) -> float | None:
        """Start of the current outage; ``None`` if there is none."""
        return self._opened_s

    def ask(self, now: float) -> Circuit:
        """The circuit at ``now``: it starts to probe when its pause is over."""
        if self.circuit is Circuit.OPEN and now >= self.until_s:
            self._move(Circuit.PROBING)
        return self.circuit

    def succeeded(self) -> None:
        """Record a graded rollout: all its dependencies work."""
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
        """Record a rollout that failed because of infrastructure; ``probe``: it was a probe."""
        self._failed.append(True)
        self._streak += 1
        if self.circuit is Circuit.CLOSED and self._has_tripped():
            self._opened_s = now
            self._open(now)
        elif self.circuit is Circuit.PROBING and probe:  # any other was in progress when the circuit opened
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
