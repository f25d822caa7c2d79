"""`bench startup`: processor time of commands that need no model, and time from `etude run` to its first step.

Each command is started several times in its own process, in turns, and the smallest user and system time counts: what
exceeds it is due to the machine. Python alone, and with the packages that read options and settings, are beside them.
`etude run quickstart` is started as often; the smallest time from its start to the event of the first mid-training step
counts, before which the recipe is checked, a tokenizer is trained and the held-out loss is measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from etude.telemetry.events import ImitationProgress
from etude.telemetry.log import EventReader
from etude.types import Json

COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "python": ("-c", "pass"),
        "import typer": ("-c", "import typer"),
        "import pydantic": ("-c", "import pydantic"),
        "import etude": ("-c", "import etude"),
        "etude --help": ("-m", "etude", "--help"),
        "etude --version": ("-m", "etude", "--version"),
        "etude show --help": ("-m", "etude", "show", "--help"),
        "etude run --help": ("-m", "etude", "run", "--help"),
        "etude plan --help": ("-m", "etude", "plan", "--help"),
        "etude config": ("-m", "etude", "config"),
    }
)
"""Contestant → the arguments of Python."""
HELP_CPU_S = Goal("help_cpu_s", "at most", 0.15, "Processor seconds of `etude --help`.")
COMMAND_HELP_CPU_S = Goal(
    "command_help_cpu_s",
    "at most",
    0.35,
    "Processor seconds of `etude run --help`, whose options need the kinds of sandboxes.",
)
FIRST_STEP_S = Goal("first_step_s", "at most", 5, "Seconds from `etude run quickstart` to its first training step.")
POLL_S = 0.02
"""Interval at which the events of a run are read."""
LIMIT_S = 120.0
"""Longest time until the first step."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--starts", type=int, default=10, help="starts of each command (10)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure, and return the bench object."""
    started_s, seconds, firsts = time.perf_counter(), dict[str, list[float]](), list[float]()
    with so_far() as state:
        for _ in range(options.starts):
            for name, arguments in COMMANDS.items():
                seconds.setdefault(name, []).append(_cpu_s(arguments))
            firsts.append(_first_step_s())
    rows: list[Json] = [
        {"contestant": name, "cpu_s": round(min(each), 3), "starts": len(each)} for name, each in seconds.items()
    ]
    goals: dict[str, Json] = {
        HELP_CPU_S.name: HELP_CPU_S.judge(min(seconds.get("etude --help", ()), default=None)),
        COMMAND_HELP_CPU_S.name: COMMAND_HELP_CPU_S.judge(min(seconds.get("etude run --help", ()), default=None)),
        FIRST_STEP_S.name: FIRST_STEP_S.judge(min(firsts, default=None)),
    }
    figures: dict[str, Json] = {"results": rows, "goals": goals}
    return envelope("startup", time.perf_counter() - started_s, figures, interrupted=state.interrupted)


def _cpu_s(arguments: tuple[str, ...]) -> float:
    """User and system seconds of one start of Python."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return usage.ru_utime + usage.ru_stime


def _first_step_s() -> float:
    """Seconds from the start of a run to its first step of mid-training; the run is stopped then."""
    with tempfile.TemporaryDirectory(prefix="etude-startup-") as folder:
        place = Path(folder) / "run"
        command = [sys.executable, "-m", "etude", "run", "quickstart", "--out", str(place)]
        began_s = time.time()  # the clock of events
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                return _await_step(place / "events", began_s + LIMIT_S) - began_s
            finally:
                process.terminate()


def _await_step(events: Path, deadline_s: float) -> float:
    """Wait for the first step of mid-training; returns the time of its event. Raises ``TimeoutError``."""
    while time.time() < deadline_s:
        time.sleep(POLL_S)
        for logged in EventReader(events).new():
            if isinstance(logged.event, ImitationProgress):
                return logged.at_s
    raise TimeoutError(f"`etude run quickstart` took no step within {LIMIT_S:g} s")


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    return results_page(result, ("contestant", "cpu_s", "starts"))
