"""Runs of a package's tests, and calls of its functions, in a sandbox: requests and results.

Owns the communication with the observer in the sandbox (:mod:`~etude.taskgen.observer`). Not for grading: the package's
code could forge the report.
"""

import asyncio
import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.taskgen import observer
from etude.types import Json

REPORT = "/tmp/etude-report"
START_S = 60.0
"""Allowance for the start of Python and pytest on a busy machine."""
REPORT_BYTES = 256 << 20
"""Maximum unpacked size of a report, larger than any real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """One run of tests on the files in the sandbox, some of them replaced."""

    targets: tuple[str, ...]
    """Files and folders to pass to pytest."""
    ids: tuple[str, ...] | None = None
    """Node ids to run; ``None``: those of ``named``, or all."""
    named: Mapping[str, Sequence[str]] | None = None
    """Path → functions and classes whose tests to run, if the ids are not available yet; ``None``: all."""
    others: int = 0
    """Number of tests to run besides those in ``named``: the first in collection order."""
    seed: int = 0
    """Seed of the order; 0: original order."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Path → text, or ``None`` to remove the file; the original files are restored afterwards."""
    watch: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Path → first lines of the functions to watch."""
    record: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Watched functions whose arguments are recorded."""
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one function on the files in the sandbox, some of them replaced."""

    module: str
    function: str
    calls: tuple[tuple[Json, ...], ...]
    files: Mapping[str, str | None] = field(default_factory=dict)
    timeout_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of one test."""

    status: str
    """``passed``, ``failed``, ``skipped`` (also expected failures) or ``error`` (its fixtures failed)."""
    seconds: float
    message: str
    """First line of a failing test's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """Result of one step of a run."""

    tests: Mapping[str, RunOutcome]
    errors: tuple[tuple[str, str], ...]
    """Files that could not be collected, and why."""
    reached: Mapping[str, frozenset[str]]
    """``path:line`` of a function → node ids that reached it; a file means all its tests, an empty string all tests."""
    calls: Mapping[str, tuple[str, ...]]
    """``path:line`` of a function → different argument lists as JSON."""
    results: tuple[tuple[bool, Json], ...]
    """Results of calls: true and the value if the function returned a plain value; else false and a reason."""
    ended: str
    """Empty, ``timeout``, ``crash`` or the signal that ended it."""
    seconds: float
    output: str
    """End of the printed output."""

    def passed(self, test: str) -> bool:
        """Return true if a test passed in this run."""
        return test in self.tests and self.tests[test].status == "passed"


async def observe(
    sandbox: Sandbox, steps: Sequence[TestRun | Calls], *, options: Sequence[str], hash_seed: int = 0
) -> list[RunObservation]:
    """Run steps in a sandbox, each in a fork of one process; return their observations.

    Raises :class:`~etude.errors.SandboxError` with the printed output if there is no report.
    """
    program = await asyncio.to_thread(Path(observer.__file__).read_text, encoding="utf-8")
    request = {"report": REPORT, "options": list(options), "steps": [asdict(step) for step in steps]}
    result = await sandbox.exec(
        ["python3", "-c", program],
        stdin=json.dumps(request),
        timeout_s=START_S + sum(step.timeout_s for step in steps),
        environment={"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    text = await sandbox.read_file(REPORT)
    if text is None:
        how = "ran out of time" if result.timed_out else f"ended with {result.exit_code}"
        raise SandboxError(f"the observer of a package's tests {how}: {(result.stderr or result.stdout)[-1000:]}")
    return read_report(text)


def read_report(text: str) -> list[RunObservation]:
    """The observations in a report, which code of the package may have written. Raises
    :class:`~etude.errors.SandboxError`.
    """
    try:
        unpacker = zlib.decompressobj()
        report = json.loads(unpacker.decompress(base64.b64decode(text), REPORT_BYTES))
        if report["error"]:
            raise SandboxError(f"no tests can be run: {report['error']}; is pytest in the image?")
        return [_observation(step) for step in report["steps"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise SandboxError(f"the report of a package's tests cannot be read: {error}") from error


def _observation(step: Mapping[str, Any]) -> RunObservation:
    return RunObservation(
        tests={
            test: RunOutcome(status=status, seconds=seconds, message=message)
            for test, (status, seconds, message) in step["tests"].items()
        },
        errors=tuple((file, why) for file, why in step["errors"]),
        reached={name: frozenset(owners) for name, owners in step["reached"].items()},
        calls={name: tuple(calls) for name, calls in step["calls"].items()},
        results=tuple((ok is True, value) for ok, value in step["results"]),
        ended=step["ended"],
        seconds=step["seconds"],
        output=step["output"],
    )
