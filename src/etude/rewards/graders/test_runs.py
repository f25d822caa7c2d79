"""Hidden test plans and test runs, canaries included. Pure.

    real plan        every test as it is                                 all of them have to pass
    canary-only      no agent's code: which tests run at all             (an untouched sandbox)
    mixed plans      each guarded test a canary by a coin of its own     canaries must not pass, all others have to

Guarded are tests that the agent cannot know and that fail without its work, every row of them: what passes anyway, or
was seen before, would tell by failing that it is a canary. They are as they were in every plan. Each plan is run in a
fresh sandbox, so that no two can be compared; tests have the same names and places in all of them.

Code that passes what it cannot do has to say of every such test whether it is real, and sees nothing that depends on
it: r tests and p mixed plans leave one chance in 2^(r·p), where r counts guarded tests that it cannot do itself. A
canary fails where nothing but assertions is left to be done, so that what comes after it finds what it always finds
(:mod:`etude.rewards.graders.canaries`).

    grader ──secret──▶ stdin of pytest ──▶ REPORTER (a plugin) ──one mark per passed test──▶ stdout ──▶ grader

The reporter is the first plugin to be imported: it reads the secret, takes the process's stdout for itself and gives
everything else stderr in its place. What the code under test prints is therefore not read at all. A mark is a keyed
digest of a node id, with its parameters and without; a test that has none did not pass. Ending the process early can
only take marks away. Code under test that is imported into the same process can find secret and pipe there, as it can
change everything else in that process: marks prove nothing alone, canaries make them trustworthy, which must have none.
"""

import hashlib
import math
import random
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from etude.protocols import ExecResult
from etude.rewards.graders.canaries import Alteration, SiteKind, TestSource

COINS = 12
"""Thrown at least in all mixed plans, so that who can do no test at all passes one time in 4,096."""
LEAST_MIXED_PLANS = 3
"""So that who lacks a single test of many passes one time in eight."""
MOST_MIXED_PLANS = 6
"""The most that :class:`~etude.types.TestChecks` have time for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestPlan:
    """The tests of one test run."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Test modules that are not as they were: path → source."""
    real: frozenset[str] = frozenset()
    """Node ids that have to pass."""
    canaries: frozenset[str] = frozenset()
    """Node ids that must not pass; without parameters where none of a test's may."""


class HiddenTestPlanner:
    """Makes the test plans of one grading."""

    def __init__(
        self,
        sources: Mapping[str, str],
        must_pass: Sequence[str],
        about: int,
        rng: random.Random,
        *,
        seen: Mapping[str, str] | None = None,
        idle: Collection[str] = (),
    ) -> None:
        """``sources`` are the hidden test modules by path; those that are no Python have no canaries.

        The first ``about`` of ``must_pass`` are what the task is about. ``seen`` are the modules that the agent had in
        their places. ``idle`` are node ids, without parameters, of which something passes in an untouched sandbox.
        """
        self._rng = rng
        self._must_pass = tuple(must_pass)
        others = frozenset(map(test_of, must_pass[about:]))
        self._modules = dict(_modules(sources, must_pass[:about], others.union(idle), seen or {}))
        self._order = [(path, name) for path, module in self._modules.items() for name in module.tests]

    @property
    def guarded(self) -> frozenset[str]:
        """Node ids that can be canaries."""
        return frozenset(node for path, name in self._order for node in self._modules[path].tests[name])

    @property
    def mixed_plans(self) -> int:
        """Number of mixed plans to be run."""
        tests = len(self._order)
        return min(MOST_MIXED_PLANS, max(LEAST_MIXED_PLANS, math.ceil(COINS / tests))) if tests else 0

    def real(self) -> HiddenTestPlan:
        """Every test as it is."""
        return HiddenTestPlan(real=frozenset(self._must_pass))

    def mixed(self) -> HiddenTestPlan:
        """Each guarded test is real or a canary, whatever the others are."""
        changes: dict[str, list[Alteration]] = {path: [] for path in self._modules}
        canaries: set[str] = set()
        replaced: set[str] = set()
        for path, name in self._order:
            if not self._rng.getrandbits(1):
                continue
            change = self._modules[path].source.alteration(name, self._rng)
            changes[path].append(change)
            nodes = self._modules[path].tests[name]
            replaced.update(nodes)
            canaries.update(map(test_of, nodes) if change.kind is SiteKind.ROWS else nodes)
        return HiddenTestPlan(
            files={path: self._modules[path].source.altered(changed) for path, changed in changes.items()},
            real=frozenset(self._must_pass) - replaced,
            canaries=frozenset(canaries),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    source: TestSource
    tests: Mapping[str, tuple[str, ...]]
    """Node ids by definition, from top to bottom of the module."""


def _modules(
    sources: Mapping[str, str], about: Sequence[str], telling: Collection[str], seen: Mapping[str, str]
) -> Iterator[tuple[str, _Module]]:
    """The modules with their guarded tests; ``telling`` are names of tests that would tell what they are, as would one
    that runs the same function, inherited from the same class.
    """
    for path in dict.fromkeys(map(module_of, about)):
        try:
            source = TestSource(sources[path])
        except (KeyError, ValueError):
            continue
        seen_texts = _texts(seen.get(path, ""))
        shared = {source.definition_of(name_of(node)) for node in telling if module_of(node) == path}
        tests: dict[str, list[str]] = {}
        for node in about:
            definition = source.definition_of(name_of(node)) if module_of(node) == path else None
            if definition is not None:
                tests.setdefault(definition, []).append(node)
        order = [
            name
            for name in sorted(tests, key=source.line_of)
            if source.text_of(name) not in seen_texts and name not in shared
        ]
        if order:
            yield path, _Module(source=source, tests={name: tuple(tests[name]) for name in order})


def _texts(text: str) -> frozenset[str]:
    """The functions of a module, as they are written."""
    try:
        source = TestSource(text)
    except ValueError:
        return frozenset()
    return frozenset(map(source.text_of, source.definitions))


def module_of(node: str) -> str:
    """The module path in a pytest node id."""
    return node.partition("::")[0]


def test_of(node: str) -> str:
    """A pytest node id without parameters."""
    return node.partition("[")[0]


def name_of(node: str) -> str:
    """The qualified name in a node id, without parameters: ``TestA::test_b`` of ``a.py::TestA::test_b[1-2]``."""
    return test_of(node).partition("::")[2]


MARK_BYTES = 6
"""Size of a digest: among thousands of tests no two are alike, but by one chance in millions."""
REPORT_LIMIT = 2500
"""Tests of one run whose marks fit into the 64 KiB that are kept of a command's output."""
STARTED, ENDED = "started", "ended"
"""Marks besides those of tests: the reporter was there before, and after, all of them."""

TAIL_LETTERS = 600
"""Limit of a failed run's output in a message."""
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
"""The plugin's source. In a worker of pytest-xdist it does nothing: its controller reports the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestRun:
    """The command and files of one pytest run."""

    command: Sequence[str]
    paths: Sequence[str]
    """Test modules."""
    name: str = field(default_factory=lambda: "_" + secrets.token_hex(6))
    """Name of the plugin, and of the hidden folder below the working folder that it lies in."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def files(self) -> Mapping[str, str]:
        """Files that have to be written before."""
        return {f".{self.name}/{self.name}.py": REPORTER}

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line; the shell keeps the ``PYTHONPATH`` that the sandbox has."""
        search = f'PYTHONPATH=".{self.name}${{PYTHONPATH:+:$PYTHONPATH}}" exec "$@"'
        return ("sh", "-c", search, "sh", *self.command, "-p", self.name, *OPTIONS, *self.paths)

    def read(self, result: ExecResult, nodes: Iterable[str]) -> "Report":
        """Report about ``nodes``."""
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
    """Report of one pytest run."""

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
