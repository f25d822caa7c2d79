"""`bench startup`: processor time from typing a command to its words, of commands that need no model.

Each is started some times in a process of its own, in turns, and the least user and system time counts: what is above
it is the machine's. Python alone, and with the packages that options and settings are read with, are beside them.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

from bench.report import Goal, envelope, so_far
from bench.tables import results_page
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
        "etude config": ("-m", "etude", "config"),
    }
)
"""Contestant → the arguments of Python."""
HELP_CPU_S = Goal("help_cpu_s", "at most", 0.15)
"""Processor time of `etude --help`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--starts", type=int, default=10, help="starts of each command (10)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure, and return the bench object."""
    started_s, seconds = time.perf_counter(), dict[str, list[float]]()
    with so_far() as state:
        for _ in range(options.starts):
            for name, arguments in COMMANDS.items():
                seconds.setdefault(name, []).append(_cpu_s(arguments))
    rows: list[Json] = [
        {"contestant": name, "cpu_s": round(min(each), 3), "starts": len(each)} for name, each in seconds.items()
    ]
    goals: dict[str, Json] = {HELP_CPU_S.name: HELP_CPU_S.judge(min(seconds.get("etude --help", ()), default=None))}
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


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    return results_page(result, ("contestant", "cpu_s", "starts"))
