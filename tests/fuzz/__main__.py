"""Command line of the fuzzer: ``python -m tests.fuzz --minutes 60`` prints one JSON object.

Targets take turns, so that an interrupted run has tried all of them. Findings are in the object and, with ``--out``, in
files that can be put into ``corpus/``. The exit status is 1 if there are any.
"""

import argparse
import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from etude.clock import date_utc
from etude.run.machine_info import describe_machine, source_commit
from tests.fuzz.fuzzing import Fuzzing
from tests.fuzz.targets import TARGETS, seeds_of

MORE_BYTES = 4 << 30
"""Memory that all targets and their inputs may take."""
TURN_S = 0.5
"""Time of a target before it is another one's turn."""


def main() -> int:
    """Fuzz, print the result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long, all targets together (1)")
    parser.add_argument("--seed", type=int, default=0, help="another one tries other inputs (0)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="one of these alone; may be repeated")
    parser.add_argument("--out", type=Path, help="folder for the inputs that were found")
    options = parser.parse_args()
    _limit_memory()
    started_s = time.monotonic()
    runs = {name: _begin(name, options.seed) for name in options.target or TARGETS}
    with suppress(KeyboardInterrupt):  # the results so far are printed
        _take_turns(list(runs.values()), started_s + 60 * options.minutes)
    result = {
        "fuzz": "tests.fuzz",
        "machine": describe_machine(),
        "commit": source_commit(),
        "date": date_utc(),
        "seconds": round(time.monotonic() - started_s, 1),
        "processor_s": round(time.process_time(), 1),  # without the children of native targets
        "seed": options.seed,
        "executions": sum(run.executions for run in runs.values()),
        "findings": sum(len(run.findings) for run in runs.values()),
        "targets": {name: _row(run) for name, run in runs.items()},
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    if options.out is not None:
        _write(runs, options.out)
    return 1 if result["findings"] else 0


def _limit_memory() -> None:
    """Limit this process's memory, so that an input that needs more is a finding instead of the end of the process."""
    now_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MORE_BYTES, now_bytes + MORE_BYTES))


def _begin(name: str, seed: int) -> Fuzzing:
    seeds = seeds_of(name)
    run = Fuzzing(TARGETS[name], list(seeds), Random(f"{seed} {name}"))
    for data in seeds:
        run.attempt(data)
    return run


def _take_turns(runs: list[Fuzzing], until_s: float) -> None:
    while True:
        for run in runs:
            turn_s = time.monotonic() + TURN_S
            while (now_s := time.monotonic()) < turn_s:
                if now_s >= until_s:
                    return
                run.step()


def _row(run: Fuzzing) -> dict[str, Any]:
    return {
        "executions": run.executions,
        "accepted": run.accepted,
        "endings": len(run.pool),
        "findings": [finding.fault for finding in run.findings.values()],
    }


def _write(runs: dict[str, Fuzzing], out: Path) -> None:
    for name, run in runs.items():
        for number, finding in enumerate(run.findings.values()):
            place = out / name.replace(" ", "-")
            place.mkdir(parents=True, exist_ok=True)
            (place / f"found-{number}").write_bytes(finding.data)


if __name__ == "__main__":
    sys.exit(main())
