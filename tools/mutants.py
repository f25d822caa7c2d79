"""Mutation testing of the pure cores: the share of planted bugs that their tests notice.

    core ──mutations──▶ mutants ──sample──▶ a fork each: replace the function's code ──▶ run its tests ──▶ verdict

    python tools/mutants.py [CORE ...] [--mutants 50] [--seed 0] [--workers 1] [--out FILE]

``mutants.toml`` names the modules and tests of each core; the bugs are those of
:mod:`etude.tasks.repositories.mutations`. pytest imports and collects the tests of a core once. A fork of that process
runs them and notes which functions each of them calls. Then, for each mutant, another fork puts the mutant's code into
the function object and runs the tests that call it, the quickest first, until one fails. A mutant that no test calls
survives. Mutants that ``mutants.toml`` lists as equivalent, with the reason, are not run.
Prints one JSON object with the survivors; the exit status is 1 if a core is below ``KILLED_SHARE``.
``--out`` keeps verdicts, so that a later call does not repeat mutants that were killed.

Not mutated: code outside of functions, functions that Numba compiles, words of errors and docstrings, the types of
variables, the order of the arguments of symmetric functions.
"""

import argparse
import ast
import builtins
import contextlib
import difflib
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import pytest

from etude.clock import date_utc
from etude.run.machine_info import describe_machine, source_commit
from etude.tasks.repositories.mutations import mutants
from etude.tasks.repositories.spans import Function, SourceText, apply

KILLED_SHARE = 0.9
"""Share of a core's mutants that its tests should notice."""
COMPILED = {"inlined", "borrowing", "vector", "kernel"}
"""Decorators of functions that Numba compiles: their bytecode is not what runs."""
SYMMETRIC = {"min", "max", "np.minimum", "np.maximum", "suppress"}
"""Functions whose arguments may be in any order."""
SLOWER, SLACK_S = 5.0, 5.0
"""A mutant is stopped after ``SLOWER`` times the time of its tests without a bug, plus ``SLACK_S``."""
POLL_S = 0.005
UNFIT = 3
"""Exit status of a fork whose function does not take the mutant's code (other variables of an outer scope)."""

Place: TypeAlias = tuple[str, int]
"""A function: its file and its first line."""
Callers: TypeAlias = Mapping[Place, Sequence[tuple[float, int]]]
"""Function → the tests that call it: seconds and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mutant of a core."""

    file: Path
    function: Function
    operator: str
    right: str
    """The whole file without the bug."""
    text: str
    """The whole file with the bug."""

    @property
    def place(self) -> Place:
        """The function that has the bug."""
        return str(self.file.resolve()), self.function.line

    @property
    def key(self) -> str:
        """Its name in the file of verdicts; a new one once the module changes."""
        return hashlib.sha256(f"{self.file}\n{self.text}".encode()).hexdigest()[:16]

    @property
    def bug(self) -> str:
        """The lines without the bug and with it, on one line: ``-… +…``."""
        lines = list(difflib.unified_diff(self.right.splitlines(), self.text.splitlines(), lineterm="", n=0))[2:]
        return " ".join(line[0] + line[1:].strip() for line in lines if not line.startswith("@@"))

    def matches(self, row: Mapping[str, str]) -> bool:
        """True if ``row`` names this bug, or the line that it changes."""
        return self.bug == row.get("bug") or ("line" in row and f"{self.bug} ".startswith(f"-{row['line']} "))


def candidates(modules: Sequence[str]) -> Iterator[Candidate]:
    """Every mutant of the functions in ``modules``, except changed words, types, and the order of symmetric
    arguments.
    """
    for entry in modules:
        module, _, owner = entry.partition(":")
        file = Path("src/etude", module).with_suffix(".py")
        source = SourceText(str(file), file.read_text(encoding="utf-8"))
        for function in source.functions():
            if not function.qualname.startswith(owner):
                continue
            names = {node.id for node in function.node.decorator_list if isinstance(node, ast.Name)}
            nodes = list(ast.walk(function.node))
            statements = [node for node in nodes if isinstance(node, ast.stmt)]
            silent = [source.span(node) for node in statements if _is_silent(node)]
            types = [source.span(node.annotation) for node in nodes if isinstance(node, ast.AnnAssign)]
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            alike = {
                source.span(value)[0] for call in calls if ast.unparse(call.func) in SYMMETRIC for value in call.args
            }
            for mutant in () if names & COMPILED else mutants(source, function):
                start = mutant.edit.start
                is_word = any(first <= start < last for first, last in silent)
                is_type = any(first <= start < last for first, last in types)
                ignored = {"wrong_text": is_word, "swapped_arguments": start in alike}
                if not is_type and not ignored.get(mutant.operator):
                    text = apply(source.text, [mutant.edit])
                    yield Candidate(
                        file=file, function=function, operator=mutant.operator, right=source.text, text=text
                    )


def _is_silent(node: ast.stmt) -> bool:
    """True for an error, and for a string that stands alone: the docstring of an attribute."""
    is_note = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_note or isinstance(node, ast.Raise | ast.Assert)


class Mutation:
    """A pytest plugin that runs the collected tests on each mutant instead of once."""

    def __init__(self, sample: Sequence[Candidate], workers: int, judge: Callable[[Candidate, str], None]) -> None:
        self._waiting = list(sample)
        self._workers = workers
        self._judge = judge
        self._running: dict[int, tuple[Candidate, float, str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let Hypothesis stop at the first failure, without looking for a simpler one."""
        from hypothesis import Phase, settings  # pytest rewrites it first

        settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests without a bug, then those that call its function for each mutant."""
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be imported")
        places = {candidate.place for candidate in self._waiting}
        functions = _functions(places)
        callers = _callers(session, functions)
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._workers:
                    candidate = self._waiting.pop()
                    self._start(session, candidate, functions[candidate.place], callers.get(candidate.place, ()))
                time.sleep(POLL_S)
                for child in list(self._running):
                    self._look_after(child)
        finally:
            for child in self._running:
                os.killpg(child, signal.SIGKILL)
        return True

    def _start(
        self,
        session: pytest.Session,
        candidate: Candidate,
        functions: Sequence[FunctionType],
        tests: Sequence[tuple[float, int]],
    ) -> None:
        if not tests:
            self._judge(candidate, "uncalled")
            return
        folder = tempfile.mkdtemp(prefix="etude-mutant-")
        if child := os.fork():
            limit_s = SLOWER * sum(seconds for seconds, _ in tests) + SLACK_S
            self._running[child] = candidate, time.monotonic() + limit_s, folder
            return
        status = UNFIT
        try:
            os.setpgid(0, 0)
            tempfile.tempdir = folder
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(silence, stream)
            _plant(candidate, functions)
            os.chdir(folder)  # a mutant may write wherever it is
            status = 1
            status = int(_fails([session.items[index] for _, index in sorted(tests)], session))
        finally:
            os._exit(status)

    def _look_after(self, child: int) -> None:
        candidate, until_s, folder = self._running[child]
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and time.monotonic() < until_s:
            return
        with contextlib.suppress(ProcessLookupError):  # what its tests started ends, too
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        del self._running[child]
        shutil.rmtree(folder, ignore_errors=True)
        verdicts = {0: "survived", UNFIT: "unfit"}
        self._judge(candidate, verdicts.get(os.waitstatus_to_exitcode(status), "killed") if ended else "timeout")


def _fails(items: Sequence[pytest.Item], session: pytest.Session) -> bool:
    """Run tests until one fails."""
    for item, following in pairwise([*items, None]):
        assert item is not None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return True
    return False


def _callers(session: pytest.Session, functions: Mapping[Place, Sequence[FunctionType]]) -> Callers:
    """Run every test in a fork, without a bug. Raises ``SystemExit`` if one fails."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            raise SystemExit("a test fails without a mutant")
        callers: dict[Place, list[tuple[float, int]]] = defaultdict(list)
        for index, (seconds, called) in enumerate(json.loads(text)):
            for file, line in called:
                callers[file, line].append((seconds, index))
        return callers
    try:
        called_now: set[Place] = set()
        _watch(functions, called_now)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            rows = [_calls(session, item, called_now) for item in session.items]
        if not session.testsfailed:
            with os.fdopen(writer, "w", encoding="utf-8") as pipe:
                json.dump(rows, pipe)
    finally:
        os._exit(0)


def _calls(session: pytest.Session, item: pytest.Item, called: set[Place]) -> tuple[float, Sequence[Place]]:
    """Seconds of a test, and what it called."""
    began_s = time.monotonic()
    called.clear()
    _fails([item], session)
    return time.monotonic() - began_s, sorted(called)


def _watch(functions: Mapping[Place, Sequence[FunctionType]], called: set[Place]) -> None:
    """Let each function add its place to ``called`` when it is called."""
    vars(builtins)["__called__"] = lambda *place: called.add(place)
    for path in {path for path, _ in functions}:
        source = SourceText(path, Path(path).read_text(encoding="utf-8"))
        watched = [function for function in source.functions() if (path, function.line) in functions]
        for function in watched:
            call = ast.parse(f"__called__({path!r}, {function.line})").body[0]
            ast.increment_lineno(call, function.node.lineno - 1)
            function.node.body.insert(len(function.node.body) - len(function.code), call)
        module = compile(source.tree, path, "exec", dont_inherit=True)
        for function in watched:
            for one in functions[path, function.line]:
                one.__code__ = _code(module, function)


def _functions(places: set[Place]) -> Mapping[Place, list[FunctionType]]:
    """The function objects of each place, whatever decorates them."""
    at: dict[Place, list[FunctionType]] = {place: [] for place in places}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_name != "<lambda>":
            at.get((thing.__code__.co_filename, thing.__code__.co_firstlineno), []).append(thing)
    return at


def _plant(candidate: Candidate, functions: Sequence[FunctionType]) -> None:
    """Give the function objects the code and the constant defaults of the mutant.

    Raises ``ValueError`` if the code does not fit.
    """
    path, line = candidate.place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = compile(candidate.text, path, "exec", dont_inherit=True)
        source = SourceText(path, candidate.text)
    code = _code(module, candidate.function)
    arguments = next(function.node.args for function in source.functions() if function.line == line)
    for function in functions:
        function.__code__ = code
        function.__defaults__ = tuple(map(_default, arguments.defaults, function.__defaults__ or ())) or None
        for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if node is not None and function.__kwdefaults__:
                function.__kwdefaults__[argument.arg] = _default(node, function.__kwdefaults__[argument.arg])


def _code(module: CodeType, function: Function) -> CodeType:
    """The code of a function in that of its module."""
    inner = [code for code in module.co_consts if isinstance(code, CodeType)]
    while (inner[0].co_name, inner[0].co_firstlineno) != (function.node.name, function.line):
        inner = [*inner[1:], *(code for code in inner[0].co_consts if isinstance(code, CodeType))]
    return inner[0]


def _default(node: ast.expr, old: object) -> object:
    return node.value if isinstance(node, ast.Constant) else old


def measure(name: str, core: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run a sample of a core's mutants; the figures, and its survivors."""
    possible = list(candidates(core["modules"]))
    draw = random.Random(f"{options.seed} {name}")
    drawn = draw.sample(possible, min(options.mutants, len(possible)))
    sample = [candidate for candidate in drawn if not any(map(candidate.matches, core.get("equivalent", ())))]
    lines = options.out.read_text(encoding="utf-8").split() if options.out and options.out.exists() else []
    killed = set(lines)
    verdicts = {candidate.key: "killed" for candidate in sample if candidate.key in killed}

    def judge(candidate: Candidate, verdict: str) -> None:
        verdicts[candidate.key] = verdict
        sys.stderr.write(f"{name} {len(verdicts)}/{len(sample)} {verdict} {candidate.file}:{candidate.operator}\n")
        if options.out and verdict in ("killed", "timeout"):
            with options.out.open("a", encoding="utf-8") as file:
                file.write(candidate.key + "\n")

    waiting = [candidate for candidate in sample if candidate.key not in killed]
    tests = [str(Path("tests", test)) for test in core["tests"]]
    with contextlib.redirect_stdout(sys.stderr):
        arguments = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", *tests]
        if waiting and pytest.main(arguments, plugins=[Mutation(waiting, options.workers, judge)]):
            raise SystemExit(f"the tests of {name} do not run: {' '.join(tests)}")
    counts = Counter(verdicts.values())
    tried = len(verdicts) - counts["unfit"]
    return {
        "possible": len(possible),
        "equivalent": len(drawn) - len(sample),
        "tried": tried,
        **{verdict: counts[verdict] for verdict in ("killed", "timeout", "survived", "uncalled", "unfit")},
        "killed_share": round((counts["killed"] + counts["timeout"]) / tried, 3) if tried else None,
        "modules": _by_module(sample, verdicts),
        "survivors": [
            {"function": f"{one.file}:{one.function.qualname}", "operator": one.operator, "bug": one.bug}
            for one in sample
            if verdicts[one.key] in ("survived", "uncalled")
        ],
    }


def _by_module(sample: Sequence[Candidate], verdicts: Mapping[str, str]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for candidate in sample:
        counts[str(candidate.file)][verdicts[candidate.key]] += 1
    return {file: dict(count) for file, count in sorted(counts.items())}


def main() -> int:
    """Measure cores and print the figures."""
    cores = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="make mutants", description="Mutation testing of the pure cores.")
    parser.add_argument("cores", nargs="*", metavar="CORE", help=f"one of {', '.join(cores)} (all)")
    parser.add_argument("--mutants", type=int, default=50, help="at most so many of each core, drawn by the seed (50)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws others (0)")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--out", type=Path, help="file of mutants that were killed, which are not run again")
    options = parser.parse_args()
    if unknown := set(options.cores) - set(cores):
        parser.error(f"no such core: {', '.join(sorted(unknown))}; there are {', '.join(cores)}")
    began_s = time.monotonic()
    results = {name: measure(name, cores[name], options) for name in options.cores or cores}
    result = {
        "mutants": "tools/mutants.py",
        "machine": describe_machine(),
        "commit": source_commit(),
        "date": date_utc(),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "cores": results,
    }
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return int(any((row["killed_share"] or 0.0) < KILLED_SHARE for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
