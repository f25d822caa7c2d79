"""Hidden test plans and test runs, canaries included. Pure.

    real plan        every test unchanged                               all of them have to pass
    canary-only      without the agent's code: finds tests that run     (an untouched sandbox)
    mixed plans      each guarded test is a canary at random            canaries must not pass, all others have to

Guarded tests are those that the agent cannot know and that fail in every row without its work: a test that passes
anyway, or that the agent has seen, would reveal by failing that it is a canary. Other tests are unchanged in every
plan. Each plan runs in a fresh sandbox, so that no two can be compared; tests have the same names and places in all of
them.

Code that passes tests without solving them has to guess for each whether it is real: with r guarded tests that it
cannot solve and p mixed plans, the chance is one in 2^(r·p). A canary fails at a point where only assertions follow, so
that later tests find the usual state (:mod:`etude.rewards.graders.canaries`).

    grader ──secret──▶ stdin of pytest ──▶ REPORTER (a plugin) ──one mark per passed test──▶ stdout ──▶ grader

The reporter is the first plugin to be imported: it reads the secret, keeps the process's stdout for itself and replaces
it with stderr for all other code. So the output of the code under test is not read at all. A mark is a keyed digest of
a node id, with and without its parameters; a test without a mark did not pass. Ending the process early can only lose
marks. Code under test that is imported into the same process can find secret and pipe there, as it can change
everything else in that process: marks alone prove nothing. Canaries, which must have no mark, make them trustworthy.
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
"""Least number of random choices over all mixed plans: code that solves no test passes one time in 4,096."""
LEAST_MIXED_PLANS = 3
"""Least number of mixed plans: code that fails to solve one test of many passes one time in eight."""
MOST_MIXED_PLANS = 6
"""Largest number of mixed plans: :class:`~etude.types.TestChecks` have no time for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestPlan:
    """The tests of one test run."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Changed test modules: path → source."""
    real: frozenset[str] = frozenset()
    """Node ids that have to pass."""
    canaries: frozenset[str] = frozenset()
    """Node ids that must not pass; without parameters if no case of the test may pass."""


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
        """``sources`` are the hidden test modules by path; those that are not valid Python have no canaries.

        The first ``about`` tests of ``must_pass`` specify the task. ``seen`` are the modules that the agent had at
        these paths. ``idle`` are node ids, without parameters, of tests with a case that passes in an untouched
        sandbox.
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
        """A plan with every test unchanged."""
        return HiddenTestPlan(real=frozenset(self._must_pass))

    def mixed(self) -> HiddenTestPlan:
        """A plan in which each guarded test is real or a canary, independently of the others."""
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
    """The modules with their guarded tests. ``telling`` are names of tests that would reveal whether they are canaries;
    so would another test that runs the same function, inherited from the same class.
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
    """The source texts of a module's functions."""
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
"""Size of a digest: among thousands of tests, the chance of a collision is one in millions."""
REPORT_LIMIT = 2500
"""Largest number of tests of one run: their marks fit into the 64 KiB of a command's output that are stored."""
STARTED, ENDED = "started", "ended"
"""Additional marks: the reporter ran before, and after, all tests."""

TAIL_LETTERS = 600
"""Limit of a failed run's output in a message."""
ENVIRONMENT = MappingProxyType({"PYTHONDONTWRITEBYTECODE": "1"})
"""Variables of every run."""
OPTIONS = (
    *("-p", "no:cacheprovider", "--continue-on-collection-errors", "--maxfail=0", "--rootdir=.", "--tb=short", "-q"),
)
"""Options of every run: node ids are relative to the working folder, a module that cannot be imported counts as failed,
and a failure, perhaps of a canary, does not end the run.
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
"""The plugin's source. It does nothing in a worker of pytest-xdist: the controller reports the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestRun:
    """The command and files of one pytest run."""

    command: Sequence[str]
    paths: Sequence[str]
    """Test modules."""
    name: str = field(default_factory=lambda: "_" + secrets.token_hex(6))
    """Name of the plugin, and of its hidden folder in the working folder."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def files(self) -> Mapping[str, str]:
        """Files that have to be written before the run."""
        return {f".{self.name}/{self.name}.py": REPORTER}

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line; the shell preserves the ``PYTHONPATH`` of the sandbox."""
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
    """True if the reporter was loaded."""
    ended: bool
    """True if pytest ended by itself."""
    result: ExecResult

    @property
    def tail(self) -> str:
        """The end of the output, for people."""
        return self.result.stderr.strip()[-TAIL_LETTERS:]
