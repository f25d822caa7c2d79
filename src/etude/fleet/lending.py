"""Decisions about production's engines that rollouts may use: which to lend and which to return. Pure functions.

    load of production + running engines + now ─step──▶ lend these, recall those
                 │
                 └──▶ Forecast: peak concurrent calls by quarter of an hour of the week, from earlier weeks

    FREE ──lend──▶ LENT ──recall──▶ RECALLED ──its rollouts are elsewhere──▶ FREE

Production comes first. It keeps the engines that it needs for the calls in progress with a margin, or for the peak that
the coming minutes had in earlier weeks, whichever is more; the others are lent. An engine is returned before it is
needed, since production's engine takes ``lead_s`` to serve again. If the forecast was too low, production waits or
comes near the limit of its time to first token: then all engines are returned at once, and the margin grows (additive
decrease, multiplicative increase, the inverse of TCP's congestion window). An engine is lent again only after it was
not needed for ``calm_s``; a return is immediate.

Times are seconds on one clock, which only needs weeks of equal length. No clock and no I/O: facts and ``now`` are
arguments. :mod:`etude.run.lending` returns engines and polls the load.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, Self, final

HOUR_S = 3600.0
WEEK_HOURS = 7 * 24
HOUR_SLOTS = 4
"""Forecast slots per hour: with whole hours, an hour of rising load would hold back an engine for most of that hour."""
WEEK_SLOTS, SLOT_S = WEEK_HOURS * HOUR_SLOTS, HOUR_S / HOUR_SLOTS
LEARNING_RATE = 0.3
"""Weight of the newest week in the average of a slot; the forecast follows a changed pattern within a month."""
MARGIN_GROWTH, MARGIN_HALF_LIFE_HOURS = 1.5, 18.0
"""Growth factor of the margin after production had to wait, and half-life of that growth."""
LEAST_GROWN = 0.02
"""Initial value from which a margin of 0 grows."""
MOST_MARGIN = 1.0
"""Maximum margin: no margin would foresee a burst that more than doubles the calls."""
NEAR_SLO = 0.8
"""Share of the limit at which production counts as overloaded: at the limit itself it would be too late."""


class LendingState(StrEnum):
    """The state of one engine of production."""

    FREE = "free"
    """Used by production."""
    LENT = "lent"
    """Used by rollouts."""
    RECALLED = "recalled"
    """Recalled, but still used by rollouts."""


LENDING_MOVES: Mapping[LendingState, frozenset[LendingState]] = MappingProxyType(
    {
        LendingState.FREE: frozenset({LendingState.LENT}),
        LendingState.LENT: frozenset({LendingState.RECALLED}),
        LendingState.RECALLED: frozenset({LendingState.FREE}),
    }
)
"""State of an engine → the states that may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingLimits:
    """Limits of lending. Raises ``ValueError`` for impossible values."""

    slo_first_token_s: float
    """Upper limit of the 95th percentile of production's time to first token."""
    places: int
    """Concurrent calls that one engine of production serves well."""
    keep: int = 1
    """Number of engines that are never lent."""
    margin: float = 0.15
    """Initial and minimum spare capacity of production, as a share of the calls in progress."""
    lead_s: float = 120.0
    """Time from a recall until production's own engine serves again."""
    calm_s: float = 60.0
    """Time for which an engine is not needed before it is lent."""

    def __post_init__(self) -> None:
        if self.places < 1 or self.keep < 0:
            raise ValueError(f"places={self.places}, keep={self.keep}: expected at least 1 and at least 0")
        if not 0 < self.slo_first_token_s < math.inf:
            raise ValueError(f"slo_first_token_s={self.slo_first_token_s:g}: expected a number above 0")
        if min(self.margin, self.lead_s, self.calm_s) < 0 or self.margin > MOST_MARGIN:
            raise ValueError(f"{self}: margin is from 0 to {MOST_MARGIN:g}, lead_s and calm_s are not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionLoad:
    """Facts of production as reported by its gateway."""

    running: int
    """Calls in progress on engines."""
    waiting: int
    """Calls that wait for an engine."""
    first_token_p95_s: float | None
    """95th percentile of recent calls; ``None`` if there were none."""

    @property
    def calls(self) -> int:
        """Calls that need an engine now."""
        return self.running + self.waiting


class Production(Protocol):
    """Protocol of a source of production's load; ``regions.lending.production`` of a fleet names its class."""

    def load(self) -> ProductionLoad:
        """The current load, within seconds; called repeatedly on a separate thread.

        Raises :class:`~etude.errors.InfrastructureError` if production does not answer.
        """
        ...


@final
class Forecast:
    """Peak concurrent calls in each quarter of an hour of the week, as an exponential average over weeks."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}
        """Slot of the week → its peak in earlier weeks."""
        self._slot: int | None = None
        """The current slot, counted from time 0, and its peak so far."""
        self._peak = 0.0

    def observe(self, calls: int, now: float) -> None:
        """Record the current number of calls."""
        slot = int(now // SLOT_S)
        if self._slot is not None and slot != self._slot:
            self._learn(self._slot % WEEK_SLOTS, self._peak)
            self._peak = 0.0
        self._slot, self._peak = slot, max(self._peak, float(calls))

    def expected(self, start: float, end: float) -> float:
        """Peak concurrent calls of earlier weeks from ``start`` to ``end``; 0 for unobserved times."""
        slots = range(int(start // SLOT_S), int(end // SLOT_S) + 1)
        return max(self._peaks.get(slot % WEEK_SLOTS, 0.0) for slot in slots[:WEEK_SLOTS])

    def knows(self, now: float) -> bool:
        """True if this time was observed in an earlier week."""
        return int(now // SLOT_S) % WEEK_SLOTS in self._peaks

    def to_json(self) -> str:
        """The peaks by hour of the week, such as 13.25, as text for :meth:`learnt`."""
        return json.dumps({f"{slot / HOUR_SLOTS:g}": round(peak, 3) for slot, peak in self._peaks.items()})

    @classmethod
    def learnt(cls, text: str) -> Self:
        """Parse the text of :meth:`to_json`. Raises ``ValueError`` for anything else."""
        forecast = cls()
        try:
            forecast._peaks = {
                math.floor(float(hour) * HOUR_SLOTS): float(peak) for hour, peak in json.loads(text).items()
            }
        except (AttributeError, TypeError, OverflowError) as error:
            raise ValueError(f"this is not a forecast: {error}") from error
        if any(not 0 <= slot < WEEK_SLOTS for slot in forecast._peaks):
            raise ValueError(f"this is not a forecast: hours of a week are 0 to below {WEEK_HOURS}")
        if any(not 0 <= peak < math.inf for peak in forecast._peaks.values()):
            raise ValueError("this is not a forecast: peaks are numbers from 0")
        return forecast

    def _learn(self, slot: int, peak: float) -> None:
        before = self._peaks.get(slot)
        self._peaks[slot] = peak if before is None else before + LEARNING_RATE * (peak - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingDecision:
    """The decisions of one step."""

    lend: tuple[str, ...] = ()
    """Engines that rollouts may use from now on."""
    recall: tuple[str, ...] = ()
    """Engines to return at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class _LendingRecord:
    """The table's mutable record of one engine."""

    name: str
    state: LendingState = LendingState.FREE

    def move(self, state: LendingState) -> None:
        """Change to another state, as ``LENDING_MOVES`` allows."""
        assert state in LENDING_MOVES[self.state], f"an engine went from {self.state} to {state}"
        self.state = state


@final
class LendingTable:
    """The engines of production, in order: the first ``keep`` are never lent."""

    def __init__(self, names: Sequence[str], limits: LendingLimits, forecast: Forecast | None = None) -> None:
        self.forecast = forecast or Forecast()
        """Learns from every step."""
        self.margin = limits.margin
        """Spare capacity as a share of the calls."""
        self._limits = limits
        self._records = [_LendingRecord(name=name) for name in names]
        self._needed_at = [-math.inf] * (len(names) + 1)
        """Number of engines → the last time at which production needed that many."""
        self._looked_at: float | None = None
        self._troubled_at = -math.inf

    def states(self) -> Mapping[str, LendingState]:
        """Engine → its state."""
        return {record.name: record.state for record in self._records}

    def step(self, load: ProductionLoad | None, running: Collection[str], now: float) -> LendingDecision:
        """Decide, where ``running`` are the engines still used by rollouts.

        ``load`` is ``None`` while production does not answer: then nothing more is lent and lent engines are recalled,
        as production's queue is unknown.
        """
        for record in self._records:
            if record.state is LendingState.RECALLED and record.name not in running:
                record.move(LendingState.FREE)
        needed = len(self._records) if load is None else self._needed(load, now)
        for count in range(needed + 1):
            self._needed_at[count] = now
        lent = [record for record in self._records if record.state is LendingState.LENT]
        spare = len(self._records) - needed
        if len(lent) > spare:
            recalled = lent[: len(lent) - spare]  # in order: production fills engines from the front
            for record in recalled:
                record.move(LendingState.RECALLED)
            return LendingDecision(recall=tuple(record.name for record in recalled))
        free = [record for record in self._records[self._limits.keep :] if record.state is LendingState.FREE]
        calm = sum(now - at >= self._limits.calm_s for at in self._needed_at[needed + 1 :])
        taken = free[len(free) - max(0, min(len(free), calm - self._borrowed())) :]
        for record in taken:
            record.move(LendingState.LENT)
        return LendingDecision(lend=tuple(record.name for record in taken))

    def _borrowed(self) -> int:
        """Number of engines that production does not have, including recalled ones."""
        return sum(record.state is not LendingState.FREE for record in self._records)

    def _needed(self, load: ProductionLoad, now: float) -> int:
        """Number of engines that production needs now and during a recall; learns from the load."""
        limits = self._limits
        p95_s = load.first_token_p95_s
        in_trouble = load.waiting > 0 or (p95_s is not None and p95_s > NEAR_SLO * limits.slo_first_token_s)
        self.forecast.observe(load.calls, now)
        self._adapt(in_trouble=in_trouble, now=now)
        if in_trouble:
            return len(self._records)
        if not self.forecast.knows(now) and load.calls > 0:
            ahead = float(load.calls + limits.places)  # an unobserved time may bring more: one engine's worth
        else:
            ahead = self.forecast.expected(now, now + limits.lead_s + limits.calm_s)
        # The forecast is a peak already: it only needs the margin that overload added.
        calls = max(load.calls * (1 + self.margin), ahead * (1 + self.margin - limits.margin))
        return min(len(self._records), max(limits.keep, math.ceil(calls / limits.places)))

    def _adapt(self, *, in_trouble: bool, now: float) -> None:
        """Widen the margin when production is overloaded while engines are lent; otherwise shrink it with time."""
        limits, passed_s = self._limits, 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not in_trouble:
            share = 0.5 ** (passed_s / (MARGIN_HALF_LIFE_HOURS * HOUR_S))
            self.margin = limits.margin + (self.margin - limits.margin) * share
        elif self._borrowed() and now - self._troubled_at >= limits.lead_s:  # once per burst
            self.margin = min(MOST_MARGIN, max(self.margin, LEAST_GROWN) * MARGIN_GROWTH)
            self._troubled_at = now
