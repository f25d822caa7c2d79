"""The engines of production that rollouts may use: which are lent, and which are given back. Pure.

    load of production + who still runs + now ──step──▶ lend these, recall those
                 │
                 └──▶ Forecast: the most calls at a time, by quarter of an hour of the week, as earlier weeks had them

    FREE ──lend──▶ LENT ──recall──▶ RECALLED ──its rollouts are elsewhere──▶ FREE

Production comes first. It keeps as many engines as it needs for what is in progress, with a margin, or for the most
that the minutes ahead brought in earlier weeks, whichever is more; the others are lent. One is given back before it is
needed, since an engine of production takes ``lead_s`` to serve again. Where the forecast was too low, production waits
or comes near the recipe's bound on the time to a first token: then all are given back at once, and the margin grows
(additive decrease, multiplicative increase, the mirror image of TCP's congestion window). Lending again waits until
nothing was needed for ``calm_s``; giving back waits for nothing.

Units of time are seconds on one clock, which only has to have weeks of equal length. No clock and no I/O: facts and
``now`` in. Does not own how an engine is given back, nor how the load is asked for (:mod:`etude.run.lending`).
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, Self, final

HOUR_S = 3600.0
WEEK_HOURS = 7 * 24
HOUR_SLOTS = 4
"""Parts of an hour that are forecast apart: with whole hours an engine is kept back for most of an hour that rises."""
WEEK_SLOTS, SLOT_S = WEEK_HOURS * HOUR_SLOTS, HOUR_S / HOUR_SLOTS
LEARNING_RATE = 0.3
"""Weight of the newest week in what is remembered of a part of it; a habit that changed is followed within a month."""
MARGIN_GROWTH, MARGIN_HALF_LIFE_HOURS = 1.5, 18.0
"""Factor of the margin when production had to wait, and time in which half of what it grew by is forgotten."""
LEAST_GROWN = 0.02
"""Margin from which one of 0 grows."""
MOST_MARGIN = 1.0
"""Bound of the margin: a burst that more than doubles the calls would not be foreseen by any."""
NEAR_SLO = 0.8
"""Share of the bound at which production counts as in trouble: beyond the bound would be too late."""


class LendingState(StrEnum):
    """The state of one engine of production."""

    FREE = "free"
    """Production's own."""
    LENT = "lent"
    """Rollouts use it."""
    RECALLED = "recalled"
    """It was taken back, and rollouts are still on it."""


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
    """Bounds of lending. Raises ``ValueError`` for what cannot be."""

    slo_first_token_s: float
    """95th percentile of production's time to a first token that may not be exceeded."""
    places: int
    """Calls that one engine of production answers well at a time."""
    keep: int = 1
    """Engines that are never lent."""
    margin: float = 0.15
    """Share of the calls in progress that production has room for besides, at the start and at least."""
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
    """Facts of production, as its gateway tells them."""

    running: int
    """Calls that engines work on."""
    waiting: int
    """Calls that wait for an engine."""
    first_token_p95_s: float | None
    """95th percentile of the last moments' calls; ``None`` where there were none."""

    @property
    def calls(self) -> int:
        """Calls that want an engine now."""
        return self.running + self.waiting


class Production(Protocol):
    """Whoever knows production's load; ``regions.lending.production`` of a fleet names its class."""

    def load(self) -> ProductionLoad:
        """The load now, asked for within seconds; called on a thread of its own, again and again.

        Raises :class:`~etude.errors.InfrastructureError` where production does not answer.
        """
        ...


@final
class Forecast:
    """The most calls at a time in each quarter of an hour of the week, learnt as an average over weeks that forgets."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}
        """Slot of the week → its peak, as earlier weeks had it."""
        self._slot: int | None = None
        """The slot that is observed now, counted from time 0, and its peak so far."""
        self._peak = 0.0

    def observe(self, calls: int, now: float) -> None:
        """Note how many calls there are."""
        slot = int(now // SLOT_S)
        if self._slot is not None and slot != self._slot:
            self._learn(self._slot % WEEK_SLOTS, self._peak)
            self._peak = 0.0
        self._slot, self._peak = slot, max(self._peak, float(calls))

    def expected(self, start: float, end: float) -> float:
        """The most calls at a time that earlier weeks had from ``start`` to ``end``; 0 for times that nobody saw."""
        slots = range(int(start // SLOT_S), int(end // SLOT_S) + 1)
        return max((self._peaks.get(slot % WEEK_SLOTS, 0.0) for slot in slots[:WEEK_SLOTS]), default=0.0)

    def knows(self, now: float) -> bool:
        """True if an earlier week had this time."""
        return int(now // SLOT_S) % WEEK_SLOTS in self._peaks

    def to_json(self) -> str:
        """The peaks by hour of the week, such as 13.25, as text that :meth:`learnt` reads."""
        return json.dumps({f"{slot / HOUR_SLOTS:g}": round(peak, 3) for slot, peak in sorted(self._peaks.items())})

    @classmethod
    def learnt(cls, text: str) -> Self:
        """The forecast that was written so. Raises ``ValueError`` for anything else."""
        forecast = cls()
        try:
            forecast._peaks = {
                math.floor(float(hour) * HOUR_SLOTS): float(peak) for hour, peak in json.loads(text).items()
            }
        except (AttributeError, TypeError, OverflowError) as error:
            raise ValueError(f"this is not a forecast: {error}") from error
        if any(not 0 <= slot < WEEK_SLOTS for slot in forecast._peaks):
            raise ValueError(f"this is not a forecast: hours of a week are 0 to below {WEEK_HOURS}")
        return forecast

    def _learn(self, slot: int, peak: float) -> None:
        before = self._peaks.get(slot)
        self._peaks[slot] = peak if before is None else before + LEARNING_RATE * (peak - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingDecision:
    """Consequences of one look at production."""

    lend: tuple[str, ...] = ()
    """Engines that rollouts may use from now on."""
    recall: tuple[str, ...] = ()
    """Engines that go back at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class _LendingRecord:
    """The table's mutable record of one engine."""

    name: str
    state: LendingState = LendingState.FREE
    since: float = field(default=-math.inf)
    """Time of its last move."""

    def move(self, state: LendingState, now: float) -> None:
        """Go to another state; only moves in ``LENDING_MOVES`` exist."""
        assert state in LENDING_MOVES[self.state], f"an engine went from {self.state} to {state}"
        self.state, self.since = state, now


@final
class LendingTable:
    """The engines of production, in the order in which they are lent: the first ``keep`` never are."""

    def __init__(self, names: Sequence[str], limits: LendingLimits, forecast: Forecast | None = None) -> None:
        self.forecast = forecast or Forecast()
        """Learns from every look."""
        self.margin = limits.margin
        """Share of the calls that there is room for besides."""
        self._limits = limits
        self._records = [_LendingRecord(name=name) for name in names]
        self._needed_at = [-math.inf] * (len(names) + 1)
        """Count of engines → the last time at which production needed as many."""
        self._looked_at: float | None = None
        self._troubled_at = -math.inf

    def states(self) -> Mapping[str, LendingState]:
        """Engine → its state."""
        return {record.name: record.state for record in self._records}

    def step(self, load: ProductionLoad | None, running: Collection[str], now: float) -> LendingDecision:
        """Decide, with ``running`` the engines on which rollouts still are.

        ``load`` is ``None`` while production cannot be asked: then nothing more is lent, and what is lent goes back,
        for nobody knows who waits.
        """
        for record in self._records:
            if record.state is LendingState.RECALLED and record.name not in running:
                record.move(LendingState.FREE, now)
        needed = len(self._records) if load is None else self._needed(load, now)
        for count in range(needed + 1):
            self._needed_at[count] = now
        lent = [record for record in self._records if record.state is LendingState.LENT]
        spare = len(self._records) - needed
        if len(lent) > spare:
            recalled = lent[: len(lent) - spare]  # the order of lending: production fills up from the front
            for record in recalled:
                record.move(LendingState.RECALLED, now)
            return LendingDecision(recall=tuple(record.name for record in recalled))
        free = [record for record in self._records[self._limits.keep :] if record.state is LendingState.FREE]
        calm = sum(now - at >= self._limits.calm_s for at in self._needed_at[needed + 1 :])
        taken = free[len(free) - max(0, min(len(free), calm - self._borrowed())) :]
        for record in taken:
            record.move(LendingState.LENT, now)
        return LendingDecision(lend=tuple(record.name for record in taken))

    def _borrowed(self) -> int:
        """Engines that production does not have, those on their way back included."""
        return sum(record.state is not LendingState.FREE for record in self._records)

    def _needed(self, load: ProductionLoad, now: float) -> int:
        """Engines that production needs now and in the time that a recall takes; learns from the load."""
        limits = self._limits
        p95_s = load.first_token_p95_s
        in_trouble = load.waiting > 0 or (p95_s is not None and p95_s > NEAR_SLO * limits.slo_first_token_s)
        self.forecast.observe(load.calls, now)
        self._adapt(in_trouble=in_trouble, now=now)
        if in_trouble:
            return len(self._records)
        if not self.forecast.knows(now) and load.calls > 0:
            ahead = float(load.calls + limits.places)  # a time that nobody saw may bring more: one engine's fill
        else:
            ahead = self.forecast.expected(now, now + limits.lead_s + limits.calm_s)
        # A forecast is of the most that there was: it needs no more room than what trouble has taught.
        calls = max(load.calls * (1 + self.margin), ahead * (1 + self.margin - limits.margin))
        return min(len(self._records), max(limits.keep, math.ceil(calls / limits.places)))

    def _adapt(self, *, in_trouble: bool, now: float) -> None:
        """Widen the margin when production is in trouble while engines are lent; else let it shrink with time."""
        limits, passed_s = self._limits, 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not in_trouble:
            share = 0.5 ** (passed_s / (MARGIN_HALF_LIFE_HOURS * HOUR_S))
            self.margin = limits.margin + (self.margin - limits.margin) * share
        elif self._borrowed() and now - self._troubled_at >= limits.lead_s:  # once for one burst
            self.margin = min(MOST_MARGIN, max(self.margin, LEAST_GROWN) * MARGIN_GROWTH)
            self._troubled_at = now
