"""A real run on this machine whose second engine is production's: lent, and taken back, again and again.

    a page of metrics ──▶ the run's supervisor ──▶ the engine starts, and ends
         ▲ idle, busy, idle, …                        │ its calls go on elsewhere
         └────────────── this bench ◀── its process ──┘

Seconds are from the moment at which production's page says that calls wait until the engine's process is gone. When
the run is done its ledger is counted: what it planned and does not have is lost.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import tomli_w
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from bench.tiny_recipe import GROUP_SIZE, tiny_recipe
from etude.errors import InfrastructureError
from etude.ledger.changes import TRAIN
from etude.ledger.states import GroupState
from etude.run.folder import RunFolder
from etude.run.stores import open_ledger
from etude.telemetry.events import EngineStats, ProcessStarted
from etude.telemetry.log import EventReader
from etude.types import RolloutStatus

ENGINE = "serve-1"
"""The engine that is lent: the last one of the region."""
STEPS, GROUPS = 200, 4
START_S, RUN_S = 300.0, 900.0
"""Longest times for an engine to start, and for the run."""
POLL_S = 0.02
BUSY_S = 2.0
"""Time that production keeps its machine, and for which rollouts have it once the engine serves."""
RECIPE = tiny_recipe(
    "lending",
    rollouts={"groups_per_step": GROUPS},
    harness={"options": {"max_turns": 4}},
    trainer={"steps": STEPS},
    effort={"weight": 1.0, "prices": {"call_tokens": 0.01, "final_tokens": 0.01}},
)


@dataclass(slots=True)
class RecallResult:
    """Results of a run with a lent engine."""

    recall_s: list[float] = field(default_factory=list)
    lost: int = 0
    """Rollouts that the run planned and does not have, or has ungraded."""
    rollouts: int = 0
    tokens: int = 0
    """Tokens that the lent engine sampled."""


class IdleProduction:
    """A page of production's metrics, as vLLM's servers have it."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._running = Gauge("vllm:num_requests_running", "Running.", registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Waiting.", registry=registry)
        self._server, _ = start_http_server(0, "127.0.0.1", registry)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        with urlopen(self.url, timeout=10):
            pass

    def wait(self, calls: int) -> None:
        """Set the number of waiting calls."""
        self._waiting.set(calls)

    def close(self) -> None:
        """Be away."""
        self._server.shutdown()
        self._server.server_close()


def measure_recalls(count: int) -> RecallResult:
    """Lend and take back ``count`` times in one run.

    Raises :class:`~etude.errors.InfrastructureError` for a run that fails.
    """
    production = IdleProduction()
    try:
        with tempfile.TemporaryDirectory(prefix="etude-lending-") as scratch:
            return _measure(production, Path(scratch), count)
    finally:
        production.close()


def _measure(production: IdleProduction, scratch: Path, count: int) -> RecallResult:
    lending = {"places": 4, "metrics": [production.url], "own": 0, "lead_s": 0.0, "calm_s": 0.5}
    region = {"name": "home", "engines": 2, "lent_engines": 1, "lending": lending}
    for name, tree in (("recipe", RECIPE), ("fleet", {"home": "home", "regions": [region]})):
        (scratch / f"{name}.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    folder, result = RunFolder(scratch / "run"), RecallResult()
    command = [sys.executable, "-m", "etude", "run", str(scratch / "recipe.toml")]
    command += ["--fleet", str(scratch / "fleet.toml"), "--out", str(folder.path)]
    with (scratch / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        try:
            for _ in range(count):
                pid = _await(lambda: _serving(folder), run, START_S)
                if not pid:
                    break
                time.sleep(BUSY_S)
                began_s = time.monotonic()
                production.wait(1)
                if not _await(partial(_is_gone, pid), run, START_S):
                    break
                result.recall_s.append(time.monotonic() - began_s)
                time.sleep(BUSY_S)
                production.wait(0)
            status = run.wait(timeout=RUN_S)
        finally:
            run.terminate()
    if status != 0:
        raise InfrastructureError(f"the run ended with {status}: {(scratch / 'out').read_text()[-800:]}")
    return _counted(folder, result)


def _counted(folder: RunFolder, result: RecallResult) -> RecallResult:
    with open_ledger(folder) as ledger:
        groups = list(ledger.groups(TRAIN, [GroupState.CONSUMED]))
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.status is RolloutStatus.GRADED]
    result.rollouts, result.lost = len(graded), STEPS * GROUPS * GROUP_SIZE - len(graded)
    events = [logged.event for logged in EventReader(folder.events, ENGINE).new()]
    result.tokens = sum(event.generated_tokens for event in events if isinstance(event, EngineStats))
    return result


def _await(what: Callable[[], int], run: subprocess.Popen[bytes], timeout_s: float) -> int:
    """The first value that is not 0; 0 once the run or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and run.poll() is None:
        if value := what():
            return value
        time.sleep(POLL_S)
    return 0


def _serving(folder: RunFolder) -> int:
    """The process of the lent engine, if it runs and has sampled; else 0."""
    if not folder.events.exists():
        return 0
    pid, started_s = 0, 0.0
    for logged in EventReader(folder.events, "supervisor").new():
        if isinstance(logged.event, ProcessStarted) and logged.event.process == ENGINE:
            pid, started_s = logged.event.pid, logged.at_s
    if not pid or _is_gone(pid):
        return 0
    logs = EventReader(folder.events, ENGINE).new()
    sampled = (each.event.generated_tokens for each in logs
               if isinstance(each.event, EngineStats) and each.at_s > started_s)  # fmt: skip
    return pid if any(sampled) else 0


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
