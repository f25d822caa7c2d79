"""Feeds a reader inputs like those that it is made for; all but its result and its own errors is a finding.

seeds ──mutate──▶ input ──▶ reader ──▶ result, documented error: how it ended is new? ──▶ into the pool
└──▶ any other error, or seconds, or memory: a finding, one for each place
"""

import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType

from tests.fuzz.mutation import mutate

SLOW_S = 2.0
"""Processor time that no input of 64 KiB may take."""
MOST_KIB = 256 << 10
"""Memory that no such input may take."""
MOST_POOL = 2000
"""Inputs that others are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader of bytes from outside."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    """Errors by which it says, as documented, that an input is none."""
    saved: tuple[str, ...] = ()
    """Patterns of the files of a saved run that are such inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that a reader does not deal with."""

    data: bytes
    fault: str


@dataclass(slots=True)
class Fuzzing:
    """One target, fuzzed for as long as it is called."""

    target: Target
    pool: list[bytes]
    random: Random
    executions: int = 0
    accepted: int = 0
    """Executions that ended with a result."""
    findings: dict[str, Finding] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def step(self) -> None:
        """Try one input."""
        data = mutate(self.random, self.pool)
        if self.attempt(data) and len(self.pool) < MOST_POOL:
            self.pool.append(data)

    def attempt(self, data: bytes) -> bool:
        """Try an input; returns whether it ended as none did before."""
        self.executions += 1
        started_s, peak_kib = time.process_time(), _peak_kib()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.target.read(data)
            end = "result"
            self.accepted += 1
        except self.target.errors as error:
            end = _end(error)
        except Exception as error:  # noqa: BLE001  # what it does not name is the finding
            end = _end(error)
            self.findings.setdefault(end, Finding(data=data, fault=f"{end}: {error!s:.200}"))
        if (seconds := time.process_time() - started_s) > SLOW_S:
            self.findings.setdefault("slow", Finding(data=data, fault=f"it takes {seconds:.1f} s"))
        if (grown_kib := _peak_kib() - peak_kib) > MOST_KIB:
            self.findings.setdefault("memory", Finding(data=data, fault=f"it takes {grown_kib >> 10} MiB"))
        if end in self._seen:
            return False
        self._seen.add(end)
        return True


def fuzz(target: Target, seeds: Sequence[bytes], executions: int, seed: int = 0) -> Fuzzing:
    """Try seeds as they are, then so many mutations of them."""
    fuzzing = Fuzzing(target, list(seeds), Random(seed))
    for data in seeds:
        fuzzing.attempt(data)
    for _ in range(executions):
        fuzzing.step()
    return fuzzing


def _peak_kib() -> int:
    """The most memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _end(error: BaseException) -> str:
    """The way an input ended: the error, and the places in étude that it went through last."""
    places: list[str] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/etude/')[2].rpartition('/site-packages/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    cause = f" of {type(error.__cause__).__name__}" if error.__cause__ else ""
    return f"{type(error).__name__}{cause} at {' < '.join(places[:-3:-1])}"
