"""Observer inside a sandbox: runs a package's tests in forks of one process and records which functions they call.

    stdin: JSON request ──▶ preload pytest ──▶ for each step: write files, fork, run, put the files back ──▶ report file

Each command includes the text of this file, so it imports nothing from étude and supports Python 3.8. A fork per step
saves the start of Python and pytest and isolates the imports of the runs. It examines packages while tasks are made,
before any agent has access: it measures, it does not guard. The report is compressed JSON in base64, so that it can be
read as text of bounded size.

A request has ``report`` (a path), ``options`` of pytest, and ``steps``. A step has ``files`` (path → text, or null for
no file), which are restored afterwards unless ``keep``; then either ``calls`` of one function (``module``,
``function``, ``calls``) or tests: ``targets`` (paths), ``ids`` (null: all, or those in ``named``, path → functions and
classes, plus the number of ``others``), ``seed`` (0: original order), ``watch`` (path → lines of functions to watch;
empty: none), ``record`` (the watched functions whose arguments are recorded); and ``timeout_s``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

MESSAGE_CHARACTERS = 300
"""Maximum characters of a failing test's message."""
CALLS = 60
"""Maximum different calls that are recorded per function."""
CALL_CHARACTERS = 600
"""Maximum characters of one call's arguments as JSON."""
ATTEMPTS = 600
"""Maximum calls per function that are examined."""
WORST = ("passed", "skipped", "failed", "error")
"""Outcomes in ascending order; a test with several reports gets the worst."""


class Observer:
    """A pytest plugin that records the tests' outcomes and durations and the functions that each reached."""

    def __init__(self, step: dict[str, Any]) -> None:
        self.step = step
        self.tests: dict[str, list[Any]] = {}
        self.errors: list[list[str]] = []
        self.reached: dict[str, set[str]] = {}
        self.calls: dict[str, set[str]] = {}
        self._attempts: dict[str, int] = {}
        self._owner = self._test = self._file = ""
        self._seen: set[Any] = set()
        root = Path.cwd()
        self._watched = {
            (str(root / path), line): f"{path}:{line}"
            for path, lines in step.get("watch", {}).items()
            for line in lines
        }
        self._recorded = {f"{path}:{line}" for path, lines in step.get("record", {}).items() for line in lines}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Select the requested tests and order them by the seed: shuffle the groups, then the tests in each."""
        ids, named = self.step.get("ids"), self.step.get("named")
        if ids is not None:
            self.select(config, items, set(ids))
        elif named is not None:
            requested = {item.nodeid for item in items if is_in(item.nodeid, named)}
            others = [item.nodeid for item in items if item.nodeid not in requested][: self.step["others"]]
            self.select(config, items, requested.union(others))
        if self.step.get("seed"):
            shuffler = random.Random(self.step["seed"])
            groups: dict[str, list[Any]] = {}
            for item in items:
                groups.setdefault(item.nodeid.rpartition("::")[0], []).append(item)
            ordered = list(groups.values())
            shuffler.shuffle(ordered)
            for group in ordered:
                shuffler.shuffle(group)
            items[:] = [item for group in ordered for item in group]

    def select(self, config: Any, items: list[Any], ids: set[str]) -> None:
        """Deselect all tests except ``ids``."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
        items[:] = [item for item in items if item.nodeid in ids]

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that could not be collected."""
        if report.failed:
            self.errors.append([report.nodeid, str(report.longrepr)[-1000:]])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute the functions reached from now on to this test."""
        self._owner = self._test = nodeid
        self._file = nodeid.partition("::")[0]
        self._seen.clear()

    def pytest_runtest_logfinish(self) -> None:
        """Attribute the functions reached from now on to no test."""
        self._owner = ""
        self._seen.clear()

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        """Attribute the functions that a fixture of a wider scope reaches to all tests that share it.

        The fixtures that it needs are set up before, so the last fixture announced is the one that runs.
        """
        shared = {"class": self._file, "module": self._file, "package": "", "session": ""}
        self._owner = shared.get(fixturedef.scope, self._test)
        self._seen.clear()

    def pytest_runtest_call(self, item: Any) -> None:
        """Attribute functions to the test itself, whose fixtures are ready."""
        self._owner = item.nodeid
        self._seen.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record one phase of one test."""
        outcome = report.outcome
        if getattr(report, "wasxfail", None) is not None:
            outcome = "skipped"
        elif outcome == "failed" and report.when != "call":
            outcome = "error"
        by_name = self.tests.setdefault(report.nodeid, ["passed", 0.0, ""])
        by_name[1] += report.duration
        if WORST.index(outcome) > WORST.index(by_name[0]):
            by_name[0] = outcome
            by_name[2] = message_of(report)[:MESSAGE_CHARACTERS] if outcome != "skipped" else ""

    def profile(self, frame: Any, event: str, argument: object) -> None:
        """Record a function call; the interpreter calls this when any function begins or ends."""
        if event != "call":
            return
        code = frame.f_code
        key = (code.co_filename, code.co_firstlineno)
        if key in self._seen and key not in self._watched:
            return
        name = self._watched.get(key)
        if name is None:
            self._seen.add(key)
            return
        if key not in self._seen:
            self._seen.add(key)
            self.reached.setdefault(name, set()).add(self._owner)
        if name in self._recorded:
            self.record(name, frame)

    def record(self, name: str, frame: Any) -> None:
        """Record the arguments of a call if they are plain."""
        calls = self.calls.setdefault(name, set())
        attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
        if len(calls) >= CALLS or attempts > ATTEMPTS:
            return
        code, local = frame.f_code, frame.f_locals
        arguments = [local.get(variable, Ellipsis) for variable in code.co_varnames[: code.co_argcount]]
        after = code.co_argcount + code.co_kwonlyargcount
        if code.co_flags & 0x04:  # *args
            arguments += local.get(code.co_varnames[after], (Ellipsis,))
            after += 1
        if code.co_flags & 0x08 and local.get(code.co_varnames[after]):  # **kwargs
            return
        if all(map(is_plain, arguments)):
            text = json.dumps(arguments)
            if len(text) <= CALL_CHARACTERS:
                calls.add(text)

    def report(self) -> dict[str, Any]:
        """All observations of this run."""
        return {
            "tests": self.tests,
            "errors": self.errors,
            "reached": {name: sorted(owners) for name, owners in self.reached.items()},
            "calls": {name: sorted(calls) for name, calls in self.calls.items()},
        }


def is_in(test: str, named: dict[str, list[str]]) -> bool:
    """Return true if ``named`` lists a test's function or class for its file."""
    path, *places = test.partition("[")[0].split("::")
    return not set(named.get(path, ())).isdisjoint(places)


def message_of(report: Any) -> str:
    """The message of a failing test, as one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", report.longrepr))
    return text.strip().splitlines()[0] if text.strip() else ""


def is_plain(value: object, depth: int = 8) -> bool:
    """Return true if JSON can represent a value exactly: no tuple, no subclass, no deep nesting."""
    kind = type(value)
    if kind is list:
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)  # type: ignore[attr-defined]  # a list
    if kind is dict:
        items = value.items()  # type: ignore[attr-defined]  # a dict
        return depth > 0 and all(type(key) is str and is_plain(item, depth - 1) for key, item in items)
    if kind is str:
        return not any(0xD800 <= ord(character) < 0xE000 for character in str(value))
    if isinstance(value, float):
        return kind is float and math.isfinite(value)
    return value is None or kind in (bool, int)


def run_tests(step: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Run the tests of one step, in this process."""
    import pytest

    observer = Observer(step)
    if step.get("watch"):
        threading.setprofile(observer.profile)
        sys.setprofile(observer.profile)
    status = pytest.main([*options, "--continue-on-collection-errors", *step["targets"]], plugins=[observer])
    sys.setprofile(None)
    return dict(observer.report(), status=int(status))


class Caught:
    """Context that catches everything an untrusted function raises, even ``SystemExit``, and stores its name."""

    def __init__(self) -> None:
        self.name = ""

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self.name = "" if kind is None else kind.__name__
        return True


def run_calls(step: dict[str, Any]) -> dict[str, Any]:
    """Call one function; return per call a flag, true if its result is plain JSON, and the result or a name."""
    function: Any = None
    with Caught() as loading:
        __import__(step["module"])
        function = sys.modules[step["module"]]
        for part in step["function"].split("."):
            function = getattr(function, part)
    if loading.name:
        return {"results": [[False, loading.name]] * len(step["calls"])}
    results: list[list[Any]] = []
    for arguments in step["calls"]:
        with Caught() as calling:
            value = function(*arguments)
            text = json.dumps([True, value] if is_plain(value) else [False, f"={type(value).__name__}"])
        results.append([False, calling.name] if calling.name else json.loads(text))
    return {"results": results}


def run_step(step: dict[str, Any], options: list[str], number: int, folder: Path) -> dict[str, Any]:
    """Run one step in a fork and wait for it."""
    path, log = (folder / f"etude-step-{os.getpid()}-{number}.{kind}" for kind in ("json", "log"))
    before = {name: read(Path(name)) for name in step.get("files", {})}
    for name, text in step.get("files", {}).items():
        write(Path(name), None if text is None else text.encode("utf-8"))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        in_fork(step, options, path, log)
    ended = wait(child, started + step["timeout_s"])
    if not step.get("keep"):
        for name, data in before.items():
            write(Path(name), data)
    report: dict[str, Any] = {"tests": {}, "errors": [], "reached": {}, "calls": {}, "results": [], "status": -1}
    try:
        report.update(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        ended = ended or "crash"
    report["output"] = (read(log) or b"")[-4000:].decode("utf-8", "replace")
    for file in (path, log):
        write(file, None)
    return dict(report, ended=ended, seconds=time.monotonic() - started)


def in_fork(step: dict[str, Any], options: list[str], path: Path, log: Path) -> None:
    """Run one step in the forked process, write its result to a file, and exit."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        report = run_calls(step) if "calls" in step else run_tests(step, options)
        path.write_text(json.dumps(report), encoding="utf-8")
    finally:
        os._exit(0)


def wait(child: int, deadline: float) -> str:
    """Wait for a fork to exit; return ``timeout`` or the signal that ended it, or an empty string."""
    ended = ""
    pause = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            ended = "timeout"
            kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    kill(child, signal.SIGKILL)  # processes that it left running
    return ended or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")


def kill(group: int, number: int) -> None:
    """Kill a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def read(file: Path) -> bytes | None:
    """A file's bytes, or ``None`` if there is no file."""
    return file.read_bytes() if file.exists() else None


def write(file: Path, data: bytes | None) -> None:
    """Write the bytes to a file; remove the file for ``None``."""
    if data is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    elif file.exists():
        file.unlink()


def preload() -> None:
    """Import the modules that every pytest run needs, once."""
    import _pytest.config

    for name in _pytest.config.default_plugins:
        __import__(f"_pytest.{name}")


def main() -> None:
    """Read the request, run its steps, write the report."""
    request = json.load(sys.stdin)
    target = Path(request["report"])
    sys.argv = ["pytest"]
    report: dict[str, Any] = {"steps": [], "error": ""}
    try:
        preload()
    except ImportError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    else:
        for number, step in enumerate(request["steps"]):
            report["steps"].append(run_step(step, request["options"], number, target.parent))
    target.write_bytes(base64.b64encode(zlib.compress(json.dumps(report).encode("utf-8"), 6)))


if __name__ == "__main__":
    main()
