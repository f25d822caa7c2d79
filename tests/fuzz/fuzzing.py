"""Feeds a reader inputs like those that it is made for; all but its result and its own errors is a finding.

seeds ──mutate──▶ input ──▶ reader ──▶ result, documented error: how it ended is new? ──▶ into the pool
└──▶ any other error, or seconds, or memory: a finding, one for each place
"""

import resource
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from types import TracebackType
from typing import Any, TypeAlias

from tests.fuzz.mutation import mutate

SLOW_S = 2.0
"""Processor time that no input of 64 KiB may take."""
MOST_KIB = 256 << 10
"""Memory that no such input may take."""
MOST_POOL = 2000
"""Inputs that others are made of."""


HANGS_S = 120
"""Time after which a child is ended: processor time may be scarce."""

FORK = get_context("fork")
_Pipe: TypeAlias = "Connection[Any, Any]"
_Outcome: TypeAlias = tuple[str, bool, dict[str, str]]
"""How an input ended, whether with a result, and what was wrong: kind or place → words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader of bytes from outside."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    """Errors by which it says, as documented, that an input is none."""
    saved: tuple[str, ...] = ()
    """Patterns of the files of a saved run that are such inputs."""
    native: bool = False
    """True if it calls a library that may end the process: inputs are read in a child."""


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
    _child: "_Child | None" = None

    def __post_init__(self) -> None:
        if self.target.native:
            self._child = _Child(self.target)

    def step(self) -> None:
        """Try one input."""
        data = mutate(self.random, self.pool)
        if self.attempt(data) and len(self.pool) < MOST_POOL:
            self.pool.append(data)

    def attempt(self, data: bytes) -> bool:
        """Try an input; returns whether it ended as none did before."""
        self.executions += 1
        end, accepted, faults = self._child.read(data) if self._child else _read(self.target, data)
        self.accepted += accepted
        for place, fault in faults.items():
            self.findings.setdefault(place, Finding(data=data, fault=fault))
        if end in self._seen:
            return False
        self._seen.add(end)
        return True


def fuzz(target: Target, seeds: Sequence[bytes], executions: int, seed: int = 0) -> Fuzzing:
    """Try the seeds unchanged, and then ``executions`` mutations of them."""
    fuzzing = Fuzzing(target, list(seeds), Random(seed))
    for data in seeds:
        fuzzing.attempt(data)
    for _ in range(executions):
        fuzzing.step()
    return fuzzing


class _Child:
    """A process that reads inputs for a target, and another one when it has died of one."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._start()

    def _start(self) -> None:
        self._ours, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(self._target, self._ours, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def read(self, data: bytes) -> _Outcome:
        """The outcome of an input; the death of the process is one of the outcomes."""
        self._ours.send_bytes(data)
        with suppress(EOFError, ConnectionResetError):
            if self._ours.poll(HANGS_S):
                outcome: _Outcome = self._ours.recv()
                return outcome
            self._process.kill()
        self._process.join()
        self._ours.close()
        end = f"its process ends with {self._process.exitcode}"
        self._start()
        return end, False, {end: end}


def _serve(target: Target, theirs: _Pipe, ours: _Pipe) -> None:
    """Read inputs for as long as the parent has the other end."""
    theirs.close()
    with suppress(EOFError):
        while True:
            ours.send(_read(target, ours.recv_bytes()))


def _read(target: Target, data: bytes) -> _Outcome:
    started_s, peak_kib = time.process_time(), _peak_kib()
    accepted, faults = False, {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(data)
        end, accepted = "result", True
    except target.errors as error:
        end = _end(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  # what it does not name is the finding, a library's panic, too
        end = _end(error)
        faults[end] = f"{end}: {error!s:.200}"
    if (seconds := time.process_time() - started_s) > SLOW_S:
        faults["slow"] = f"it takes {seconds:.1f} s"
    if (grown_kib := _peak_kib() - peak_kib) > MOST_KIB:
        faults["memory"] = f"it takes {grown_kib >> 10} MiB"
    return end, accepted, faults


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
