"""How a run of hidden tests says what passed: lines on a pipe that nobody inside can write by accident.

    grader ──secret──▶ stdin of pytest ──▶ REPORTER (a plugin) ──one mark per passed test──▶ stdout ──▶ grader

The reporter is the first plugin to be imported: it reads the secret, keeps the process's stdout for itself and gives
everything else stderr in its place. What the code under test prints is therefore not read at all. A mark is a keyed
digest of a node id, with its parameters and without; a test that has none did not pass. Ending the process early can
only take marks away.

Code under test that is imported into the same process can find secret and pipe there, as it can change everything else
in that process: marks prove nothing alone. They are what canaries (:mod:`etude.rewards.graders.test_plans`) make
trustworthy, which must have none.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from etude.protocols import ExecResult

MARK_BYTES = 6
"""Of a digest: among thousands of tests no two are alike, but by one chance in millions."""
REPORT_LIMIT = 2500
"""Tests of one run whose marks fit into the 64 KiB that are kept of a command's output."""
STARTED, ENDED = "started", "ended"
"""What is marked besides tests: that the reporter was there before, and after, all of them."""

TAIL_LETTERS = 600
"""Of the output of a run that failed, in the message."""
ENVIRONMENT = MappingProxyType({"PYTHONDONTWRITEBYTECODE": "1"})
"""Variables of every run."""
OPTIONS = (
    *("-p", "no:cacheprovider", "--continue-on-collection-errors", "--maxfail=0", "--rootdir=.", "--tb=short", "-q"),
)
"""Options of every run: node ids begin at the working folder, a module that cannot be imported is one that fails, and
the first failure, of a canary perhaps, is not the end.
"""

REPORTER = f'''\
def _open():
    import hashlib, os
    secret = b""
    while piece := os.read(0, 4096):
        secret += piece
    pipe, write, new, size = os.dup(1), os.write, hashlib.blake2s, {MARK_BYTES}
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def mark(name):
        text = new(name.encode("utf-8", "backslashreplace"), key=secret, digest_size=size).hexdigest()
        write(pipe, text.encode() + b"\\n")

    return mark


def _reporter():
    import os

    if "PYTEST_XDIST_WORKER" in os.environ:
        return {{}}
    mark, running, marked = _open(), {{}}, set()
    mark("{STARTED}")

    def pytest_runtest_logreport(report):
        phases = running.setdefault(report.nodeid, [])
        if report.outcome == "rerun":
            phases.clear()
            return
        phases.append((report.when, report.outcome == "passed" and not hasattr(report, "wasxfail")))

    def pytest_runtest_logfinish(nodeid):
        phases = running.pop(nodeid, [])
        if {{when for when, _ in phases}} >= {{"setup", "call", "teardown"}} and all(passed for _, passed in phases):
            for name in {{nodeid, nodeid.partition("[")[0]}} - marked:
                marked.add(name)
                mark(name)

    def pytest_sessionfinish():
        mark("{ENDED}")

    hooks = (pytest_runtest_logreport, pytest_runtest_logfinish, pytest_sessionfinish)
    return {{hook.__name__: hook for hook in hooks}}


globals().update(_reporter())
del _open, _reporter
'''
"""The plugin's source. In a worker of pytest-xdist it does nothing: whoever started the worker hears of its tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of pytest, as it is to be started."""

    command: Sequence[str]
    paths: Sequence[str]
    """Test modules."""
    name: str = field(default_factory=lambda: "_" + secrets.token_hex(6))
    """Of the plugin, and of the hidden folder below the working folder that it lies in."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def files(self) -> Mapping[str, str]:
        """What has to be written before."""
        return {f".{self.name}/{self.name}.py": REPORTER}

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line; the shell keeps the ``PYTHONPATH`` that the world has."""
        search = f'PYTHONPATH=".{self.name}${{PYTHONPATH:+:$PYTHONPATH}}" exec "$@"'
        return ("sh", "-c", search, "sh", *self.command, "-p", self.name, *OPTIONS, *self.paths)

    def read(self, result: ExecResult, nodes: Iterable[str]) -> "Report":
        """What was seen to pass of ``nodes``."""
        marks = frozenset(result.stdout.split("\n"))
        return Report(
            passed=frozenset(node for node in nodes if self._mark(node) in marks),
            started=self._mark(STARTED) in marks,
            ended=self._mark(ENDED) in marks,
            result=result,
        )

    def _mark(self, name: str) -> str:
        data = name.encode("utf-8", "backslashreplace")
        return hashlib.blake2s(data, key=self.secret.encode(), digest_size=MARK_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run said."""

    passed: frozenset[str]
    """Node ids."""
    started: bool
    """The reporter was loaded."""
    ended: bool
    """pytest came to its own end."""
    result: ExecResult

    @property
    def tail(self) -> str:
        """The end of what was printed, for people."""
        return self.result.stderr.strip()[-TAIL_LETTERS:]
