"""étude's own runs in `bench loop`: all processes of a run, from a given start, and where the time went.

Facts come from the run's events; what each process took of the processors is read from /proc while it runs. Busy
shares say how long a side computed, CPU seconds what that cost: on a machine whose cores are all wanted the two differ.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeAlias, final

from bench import usage
from bench.loop.contestants import Contestant, ContestantRun, LoopOptions, Mark, recipe
from bench.programs import environment
from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.errors import InfrastructureError
from etude.run.folder import RunFolder, start_from
from etude.run.launchers.fork_server import THREADING
from etude.run.local import run_local
from etude.telemetry.log import EventReader

Taken: TypeAlias = list[tuple[float, dict[str, float]]]
"""(Unix seconds, command → CPU seconds so far), ascending; see :func:`command_cpu_s`."""
Pins: TypeAlias = Mapping[str, int]
"""``etude`` command → the only core that its process may use."""
POLL_S = 0.5
"""Interval at which the processes' CPU seconds are read."""


def run_midtraining(folder: RunFolder) -> RunFolder:
    """Mid-train in a process of its own, unless that has been done; returns the folder, which then has version 0.

    Raises :class:`~etude.errors.InfrastructureError` if it fails.
    """
    command = [sys.executable, "-m", "etude", "midtrain", "--run", str(folder.path)]
    status = subprocess.run(command, stdout=sys.stderr, env={**THREADING, **environment()}, check=False).returncode
    if status != 0:
        raise InfrastructureError(f"mid-training of {folder.path} ended with status {status}: see above")
    return folder


def begin_from(start: RunFolder, path: Path, config: RunConfig) -> RunFolder:
    """A new run in ``path`` whose version 0 is that of ``start``; there is no folder until it has all of it."""
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    folder = RunFolder.create(partial, config)
    start_from(start, folder)
    partial.rename(path)
    return RunFolder.open(path)


def run_etude(
    contestant: Contestant, options: LoopOptions, start: RunFolder, out: Path, pins: Pins = MappingProxyType({})
) -> ContestantRun:
    """Run all steps of a contestant from ``start``, with some of its processes on cores of their own."""
    config = recipe(contestant, options)
    folder = RunFolder.create(out, config)
    start_from(start, folder)
    with CpuWatch(pins) as watch:
        run_local(folder, out=sys.stderr)
    return outcome(contestant, options, folder, watch.taken)


def outcome(contestant: Contestant, options: LoopOptions, folder: RunFolder, taken: Taken) -> ContestantRun:
    """Results of a run, from its events and the sampled CPU seconds."""
    metrics, config = RunMetrics(), recipe(contestant, options)
    for logged in EventReader(folder.events).new():
        metrics.add(logged)
    report = build_report(metrics, config, machine={}, date="", commit="")
    seconds = metrics.phase_s("rl") or 0.0
    cpu_s = _of_phase(metrics, taken)
    train, engine = number_at(report, "busy.trainer") or 0.0, number_at(report, "busy.engine") or 0.0
    wait = sum(timed.event.metrics["wait_s"] for timed in metrics.steps) / seconds if seconds else 0.0
    return ContestantRun(
        contestant=contestant,
        folder=folder,
        steps=len(metrics.steps),
        rollouts=len(metrics.steps) * config.rollouts.rollouts_per_step,
        seconds=seconds,
        signal_tokens=int(number_at(report, "tokens.trained") or 0),
        busy_trainer=train,
        busy_engine=engine,
        phases={
            "generate": engine,
            "sandbox": cpu_s.get("sandboxes", 0.0) / seconds if seconds else 0.0,
            "train": train,
            "wait": wait,
            "sync": max(0.0, 1.0 - train - wait),
        },
        cpu_s={name: spent / max(1, len(metrics.steps)) for name, spent in cpu_s.items()},
        staleness_max=number_at(report, "staleness.max"),
        marks=_marks(metrics, options),
    )


def _marks(metrics: RunMetrics, options: LoopOptions) -> tuple[Mark, ...]:
    published = {timed.event.version: timed.at_s for timed in metrics.published}
    return tuple(
        Mark(version=step, step=step, seconds=metrics.phase_s("rl", until_s=published[step]) or 0.0)
        for step in options.marked
    )


def _of_phase(metrics: RunMetrics, taken: Taken) -> dict[str, float]:
    """CPU seconds of each process while the run was in its RL phase."""
    during = [spent for at_s, spent in taken if metrics.in_phase(at_s, "rl")]
    if not during:
        return {}
    names = {name for spent in during for name in spent}  # also of a process that ended before the phase did
    return {name: max(spent.get(name, 0.0) for spent in during) - during[0].get(name, 0.0) for name in names}


@final
class CpuWatch:
    """Reads the CPU seconds of this process's étude children, by command, while its context is open; pins some."""

    def __init__(self, pins: Pins = MappingProxyType({})) -> None:
        self.taken: Taken = []
        self._pins = pins
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-watch")
        self._outcome: Future[None] | None = None

    def __enter__(self) -> Self:
        self._outcome = self._thread.submit(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.shutdown()
        if self._outcome is not None and error is None:
            self._outcome.result()  # figures of a watch that failed would be too low

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            commands = etude_commands()
            self.taken.append((time.time(), command_cpu_s(commands)))
            for pid, command in commands.items():
                if command in self._pins:
                    pin(pid, self._pins[command])


def etude_commands() -> dict[int, str]:
    """Process id → ``etude`` command, of all below this process."""
    commands = {}
    for pid in usage.descendants(os.getpid()):
        words = usage.command_line(pid)
        if words[1:3] == ["-m", "etude"]:
            commands[pid] = words[3]
    return commands


def command_cpu_s(commands: Mapping[int, str]) -> dict[str, float]:
    """Command → CPU seconds so far of its process; ``sandboxes``: all below those."""
    result: dict[str, float] = {}
    for pid, command in commands.items():
        with suppress(FileNotFoundError, ProcessLookupError):
            result[command] = usage.cpu_s([pid])
            result["sandboxes"] = result.get("sandboxes", 0.0) + usage.cpu_s(usage.descendants(pid))
    return result


def pin(pid: int, core: int) -> None:
    """Let a process and its threads use one core, if the machine has it."""
    if core in os.sched_getaffinity(0):
        for thread in usage.threads(pid):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, {core})
