"""Weeks of a product's traffic over its machines, with some of them lent to rollouts. In virtual time.

    calls, by hour of the week, with bursts ──▶ first come, first served ──▶ places of the machines that production has
                                                        │ load, every LOOK_S                  ▲
                                                        └──▶ LendingTable, as in a region ────┘ lent, given back

What decides is production's code, :mod:`etude.fleet.lending`. Modelled are the calls (a Poisson stream whose rate
follows the hour, lognormal lengths), what a first token takes (a wait for a place, the step that is under way, which is
longer the more calls a machine has, and reading the prompt), and a machine that comes back: it serves after ``lead_s``.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from etude.fleet.lending import HOUR_S, WEEK_HOURS, Forecast, LendingLimits, LendingState, LendingTable, ProductionLoad

WEEK_S = WEEK_HOURS * HOUR_S
MINUTE_S = 60.0
LOOK_S = 2.0
"""Interval at which load is looked at; a region's supervisor does so four times as often."""
WINDOW_S = 30.0
"""Time over which first tokens are judged, as in :mod:`etude.run.lending`."""
WORST_S = 300.0
"""Length of the worst moments that are shown."""
FEWEST = 20
"""Calls of which a 95th percentile is taken."""
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A product's week, and the times of a call on its machines. The defaults are roughly those of an 8 B model on an
    H100.
    """

    machines: int = 16
    places: int = 16
    """Calls that one machine answers well at a time."""
    own: int = 3
    """Machines that are never lent."""
    peak: float = 0.6
    """Share of all places that the busiest hour of a weekday fills on average."""
    night: float = 0.08
    """The quietest hour's calls, as a share of the busiest's."""
    weekend: float = 0.45
    """Calls of a Saturday or Sunday, as a share of a weekday's."""
    bursts: int = 4
    """Bursts per week, at unpredictable times."""
    burst_factor: float = 1.5
    burst_s: float = 600.0
    call_s: float = 30.0
    """Mean length of a call."""
    spread: float = 0.8
    """Standard deviation of the logarithm of a call's length, and of its prompt's."""
    prompt_s: float = 0.08
    """Median time in which a prompt is read."""
    step_s: float = 0.008
    """A decode step of one call, which the first token waits for."""
    step_call_s: float = 0.0002
    """Additional time per further call."""

    def rate(self, at_s: float) -> float:
        """Calls a second at a time of the week, bursts aside."""
        hour = at_s / HOUR_S
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * ((hour % 24) - 4) / 24)  # lowest at four in the morning
        day = self.weekend if hour % WEEK_HOURS >= 5 * 24 else 1.0
        share = day * (self.night + (1 - self.night) * math.pow(wave, 1.5))
        return self.peak * self.machines * self.places / self.call_s * share

    def limits(self, lead_s: float) -> LendingLimits:
        """The table's limits; of all that is not said the defaults of a fleet."""
        return LendingLimits(slo_first_token_s=1.0, places=self.places, keep=self.own, lead_s=lead_s)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a user."""

    at_s: float
    length_s: float
    prompt_s: float


def calls_of(traffic: Traffic, week: int, seed: int) -> Iterator[Call]:
    """The calls of one week in order; weeks are alike in their hours and differ in everything else."""
    rng = np.random.default_rng([seed, week])
    bursts = np.sort(rng.uniform(0.0, WEEK_S, traffic.bursts))
    mean = math.log(traffic.call_s) - traffic.spread**2 / 2
    for minute in range(int(WEEK_S / MINUTE_S)):
        at_s = minute * MINUTE_S
        place = int(np.searchsorted(bursts, at_s))
        is_burst = place > 0 and at_s - bursts[place - 1] < traffic.burst_s
        count = rng.poisson(traffic.rate(at_s) * MINUTE_S * (traffic.burst_factor if is_burst else 1.0))
        times: Seconds = np.sort(rng.uniform(at_s, at_s + MINUTE_S, count))
        lengths = np.exp(rng.normal(mean, traffic.spread, count))
        prompts = traffic.prompt_s * np.exp(rng.normal(0.0, traffic.spread, count))
        for at, length, prompt in zip(times.tolist(), lengths.tolist(), prompts.tolist(), strict=True):
            yield Call(week * WEEK_S + at, length, prompt)


class Policy(Protocol):
    """A policy that decides how many machines production has."""

    def look(self, load: ProductionLoad, now_s: float) -> int:
        """Machines that are lent from now on, given the load."""
        ...


@final
class Nothing:
    """Nothing is lent."""

    def look(self, load: ProductionLoad, now_s: float) -> int:
        """None."""
        return 0


@final
class AtNight:
    """A typical manual policy: from 22 to 8 o'clock half of the lendable machines, regardless of load."""

    def __init__(self, traffic: Traffic) -> None:
        self._lent = (traffic.machines - traffic.own) // 2

    def look(self, load: ProductionLoad, now_s: float) -> int:
        """Half of them, or none."""
        hour = now_s / HOUR_S % 24
        return self._lent if hour >= 22 or hour < 8 else 0


@final
class ByTable:
    """The product's table."""

    def __init__(self, traffic: Traffic, lead_s: float, recall_s: float) -> None:
        """Rollouts leave a machine within ``recall_s``."""
        names = [f"machine-{number}" for number in range(traffic.machines)]
        self.table = LendingTable(names, traffic.limits(lead_s), Forecast())
        self._recall_s = recall_s
        self._leaving: dict[str, float] = {}

    def look(self, load: ProductionLoad, now_s: float) -> int:
        """Decide as a region's supervisor does."""
        self._leaving = {name: at for name, at in self._leaving.items() if now_s < at}
        decision = self.table.step(load, self._leaving, now_s)
        self._leaving |= dict.fromkeys(decision.recall, now_s + self._recall_s)
        return sum(state is not LendingState.FREE for state in self.table.states().values())


@dataclass(slots=True)
class WeekResult:
    """Results of one week."""

    started_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    """Time to first token of each call, in the order of their starts."""
    calls: int = 0
    waited: int = 0
    """Calls that waited for a place."""
    lent_s: float = 0.0
    """Machine-seconds that rollouts had."""
    idle_s: float = 0.0
    """Machine-seconds that production did not need: of all machines but ``own``, and but those that its calls fill."""
    returns: int = 0
    """Machines that were given back."""

    def percentile(self, share: float) -> float:
        """Percentile of the times to first token."""
        return float(np.quantile(self.first_token_s, share))

    @property
    def worst_p95_s(self) -> float:
        """The highest 95th percentile of any ``WORST_S``, of those that begin at multiples of it."""
        edges = np.arange(self.started_s[0], self.started_s[-1] + WORST_S, WORST_S)
        places = np.searchsorted(self.started_s, edges)
        windows = (self.first_token_s[low:high] for low, high in pairwise(places.tolist()) if high - low >= FEWEST)
        return max((float(np.quantile(window, 0.95)) for window in windows), default=0.0)


@final
class ProductionModel:
    """Machines and calls of production, across weeks."""

    def __init__(
        self, traffic: Traffic, policy: Policy, lead_s: float, *, first_week: int = 0, look_s: float = LOOK_S
    ) -> None:
        """All machines serve when the first week begins."""
        self._traffic, self._policy, self._lead_s = traffic, policy, lead_s
        self._ends: list[float] = []
        """Times at which running calls end, a heap."""
        self._queue: deque[Call] = deque()
        self._machines = traffic.machines
        """Machines on which production serves."""
        self._back: deque[float] = deque()
        """Times at which machines that were given back serve again."""
        self._lent = 0
        self._look_s = look_s
        self._next_look_s = first_week * WEEK_S
        self._recent: deque[tuple[float, float]] = deque()
        self._result = WeekResult()

    def play(self, week: int, seed: int) -> WeekResult:
        """Simulate one week; the next one continues from its end."""
        self._result = result = WeekResult()
        for call in calls_of(self._traffic, week, seed):
            while self._next_look_s <= call.at_s:
                self._until(self._next_look_s)
                self._look(self._next_look_s)
                self._next_look_s += self._look_s
            self._until(call.at_s)
            result.calls += 1
            if self._queue or len(self._ends) >= self._places:
                result.waited += 1
                self._queue.append(call)
            else:
                self._start(call, call.at_s)
        return result

    @property
    def _places(self) -> int:
        return self._machines * self._traffic.places

    def _until(self, now_s: float) -> None:
        """End calls, and take machines back, until a time; calls that waited take the places."""
        while True:
            end_s = self._ends[0] if self._ends else math.inf
            back_s = self._back[0] if self._back else math.inf
            at_s = min(end_s, back_s)
            if at_s > now_s:
                return
            if end_s <= back_s:
                heappop(self._ends)
            else:
                self._back.popleft()
                self._machines += 1
            while self._queue and len(self._ends) < self._places:
                self._start(self._queue.popleft(), at_s)

    def _start(self, call: Call, at_s: float) -> None:
        traffic = self._traffic
        beside = len(self._ends) / self._machines
        first_s = at_s - call.at_s + traffic.step_s + traffic.step_call_s * beside + call.prompt_s
        heappush(self._ends, at_s + call.prompt_s + call.length_s)
        self._result.started_s.append(at_s)
        self._result.first_token_s.append(first_s)
        self._recent.append((at_s + first_s, first_s))

    def _look(self, now_s: float) -> None:
        recent, traffic = self._recent, self._traffic
        while recent and recent[0][0] < now_s - WINDOW_S:
            recent.popleft()
        seconds = sorted(first_s for _, first_s in recent)
        p95_s = seconds[int(0.95 * (len(seconds) - 1))] if seconds else None
        running, waiting = len(self._ends), len(self._queue)
        load = ProductionLoad(running=running, waiting=waiting, first_token_p95_s=p95_s)
        lent = self._policy.look(load, now_s)
        for _ in range(self._lent, lent):
            if self._back:
                self._back.pop()  # it does not serve yet
            else:
                self._machines -= 1
        result = self._result
        result.returns += max(0, self._lent - lent)
        self._back.extend([now_s + self._lead_s] * (self._lent - lent))
        self._lent = lent
        filled = max(traffic.own, math.ceil((running + waiting) / traffic.places))
        result.idle_s += self._look_s * max(0, traffic.machines - filled)
        result.lent_s += self._look_s * lent
