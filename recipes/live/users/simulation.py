"""A day of the population: who begins a session when, what they say about it, and the hidden truth.

    day and night ──▶ next person ──▶ session with the product ──▶ signals ──▶ POST /feedback
                                              └─▶ satisfaction ──▶ truth.jsonl, which is never sent

Owns the arrivals and the file of truth. Tastes are :mod:`population`'s, the session is :mod:`backend`'s.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Protocol, final

import aiohttp
from backend import Caller, Product, Requests, Work
from population import Person, Signal, population_satisfaction

from etude.aio import background_task
from etude.errors import EtudeError

LATENCY = "latency"
"""Kind of the signal that the product itself reports with every session: seconds that a turn took on average."""
ABANDONED = "abandoned"
IDLE_S = 1.0
"""Pause while nobody wants anything."""
LAST_S = 10.0
"""Longest time of the day's last sessions beyond it."""
AWAY_S = 2.0
"""Pause of somebody whom the product could not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPlan:
    """The load of a compressed day."""

    seconds: float
    """Length of the day."""
    days: float = 1.0
    """Days for which people come: beyond 1 it is the night after, for tests that are not over."""
    begun_s: float = 0.0
    """Seconds of it that are over already."""
    rate: float
    """Sessions a second at noon, if nobody has left."""
    at_once: int = 48
    """Sessions at a time; who comes while the product has as many, waits."""
    consent: float = 0.95
    """Share of the people who let their sessions be learnt from."""
    seed: int = 0


class Reports(Protocol):
    """The way of signals to the product."""

    def send(self, work: Work, user: str, signals: Sequence[Signal]) -> None:
        """Report signals of a user about a session; they are sent later."""
        ...


@final
class Truth:
    """What people really think, a line of JSON for each session; the trainer never sees it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8", buffering=1)

    def write(self, person: Person, work: Work, day: float, *, signals: Sequence[Signal], abandoned: bool) -> float:
        """Note one session; returns how satisfied the person is."""
        outcome = work.outcome
        satisfied = person.satisfaction(outcome, day)
        row = {
            "session": work.session_id,
            "user": person.user,
            "taste": person.taste_name,
            "conduct": person.conduct.value,
            "unix_s": round(time.time(), 3),
            "day": round(day, 4),
            "template": work.task.template,
            "versions": sorted(work.versions, key=int),
            "outcome": asdict(outcome),
            "abandoned": abandoned,
            "satisfied": round(satisfied, 4),
            "population_satisfied": round(population_satisfaction(outcome), 4),
            "signals": {signal.kind: signal.value for signal in signals},
        }
        self._file.write(json.dumps(row) + "\n")
        return satisfied

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Simulation:
    """A population in front of the product, for as long as :meth:`run` is not cancelled."""

    def __init__(
        self, people: Sequence[Person], plan: DayPlan, product: Product, requests: Requests, reports: Reports,
        truth: Truth,
    ) -> None:  # fmt: skip
        self._people = people
        self._plan = plan
        self._product = product
        self._requests = requests
        self._reports = reports
        self._truth = truth
        self._rng = Random(f"arrivals|{plan.seed}|{time.time_ns()}")
        self._busy: set[str] = set()
        self._next = int(time.time() * 1000) % 10_000_000  # requests of a day that is resumed are new ones
        self._started_s = time.monotonic() - plan.begun_s
        self.sessions = 0
        """Sessions that ended."""
        self.failed = 0
        """Sessions in which the product could not be reached."""
        self.satisfied = 0.0
        """Sum of the satisfaction of all."""

    @property
    def day(self) -> float:
        """The time of the day, from 0; beyond 1 the next one has begun."""
        return (time.monotonic() - self._started_s) / self._plan.seconds

    @property
    def left(self) -> int:
        """People who have left for good."""
        return sum(person.left for person in self._people)

    async def run(self) -> None:
        """Let people come, until cancelled or the day is over.

        consumes: the population's wishes; produces: sessions, signals, truth; waits for: the next arrival, a free
        place; woken by: its own clock; on shutdown: sessions in progress are given up.
        """
        places, left_s = asyncio.Semaphore(self._plan.at_once), (self._plan.days - self.day) * self._plan.seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s) + LAST_S), asyncio.TaskGroup() as group:
                while self.day < self._plan.days:
                    person = self._draw()
                    if person is None:
                        await asyncio.sleep(IDLE_S)
                        continue
                    await places.acquire()
                    self._busy.add(person.user)
                    group.create_task(self._serve(person, places))
                    await asyncio.sleep(self._rng.expovariate(self._arrival_rate()))

    def _arrival_rate(self) -> float:
        """Sessions a second that are begun now: fewer at night, and where people have left."""
        wishes = sum(person.load(self.day % 1.0) for person in self._people)
        return max(1e-3, self._plan.rate * wishes / len(self._people))

    def _draw(self) -> Person | None:
        """Who comes next; ``None`` where everybody is asleep, busy or gone."""
        free = [person for person in self._people if not (person.left or person.user in self._busy)]
        weights = [person.load(self.day % 1.0) for person in free]
        return self._rng.choices(free, weights)[0] if free and sum(weights) > 0 else None

    async def _serve(self, person: Person, places: asyncio.Semaphore) -> None:
        try:
            await self._use(person)
            self.sessions += 1
        except (EtudeError, aiohttp.ClientError, OSError):
            self.failed += 1
            await asyncio.sleep(AWAY_S)
        finally:
            self._busy.discard(person.user)
            places.release()

    async def _use(self, person: Person) -> None:
        """One session of one person, to the signals."""
        self._next += 1
        consents = Random(f"consent|{person.user}").random() < self._plan.consent
        caller = Caller(user=person.user, region=person.taste.region, consent="train" if consents else "none")
        began_s, abandoned = time.monotonic(), False
        async with self._product.open(self._requests.draw(self._next), caller) as (work, steps):
            async for _ in steps:
                if len(work.steps) >= person.taste.max_turns and not work.submitted:
                    abandoned = True
                    break
        day, outcome = self.day, work.outcome
        seconds = (time.monotonic() - began_s) / max(1, outcome.turns)
        signals = [] if abandoned else list(person.signals(outcome, day))
        satisfied = self._truth.write(person, work, day, signals=signals, abandoned=abandoned)
        person.experience(satisfied)
        self.satisfied += satisfied
        events = [*signals, Signal(kind=LATENCY, value=round(seconds, 4))]
        if abandoned:
            events.append(Signal(kind=ABANDONED, value=1.0))
        self._reports.send(work, person.user, events)

    async def tell(self, every_s: float) -> None:
        """Print how the day goes, for ever."""
        while True:
            await asyncio.sleep(every_s)
            mean = self.satisfied / self.sessions if self.sessions else 0.0
            print(
                f"day {self.day:5.2f} · {self.sessions} sessions, {self.failed} failed · satisfied {mean:.3f} so far · "
                f"{self.left} of {len(self._people)} people have left",
                flush=True,
            )


async def run_day(simulation: Simulation, *, every_s: float = 30.0) -> None:
    """Run a day to its end, with a line now and then."""
    async with background_task(simulation.tell(every_s)):
        await simulation.run()
