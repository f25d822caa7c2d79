"""The observer's results for tests that pass, fail, hang, crash and share fixtures."""

import base64
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from etude.taskgen import observer

PACKAGE = """
def double(value):
    return value * 2

def shared():
    return 1

def odd(value, *more, flag=False, **rest):
    return (value,)

def never():
    return 0
"""
TESTS = """
import os, time, pytest
from pkg import double, odd, shared

@pytest.fixture(scope="module")
def base():
    return shared()

def test_passes(base): assert double(2) == 4; assert double([1]) == [1, 1]; assert double((1,)) == (1, 1)
def test_second(base): pass
def test_fails(): assert double(1) == 3, "one doubled"
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.fixture
def broken(): raise RuntimeError("fixture")
def test_error(broken): pass
def test_odd(): odd(1, 2, 3); odd(1, flag=True); odd(1, x=2)
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
LINES = {"pkg.py": [2, 5, 8, 11]}


def observe(folder: Path, *steps: dict[str, Any]) -> list[dict[str, Any]]:
    report = folder / "report"
    options = ["--rootdir=.", "-o", "addopts=", "-p", "no:cacheprovider"]
    request = {"report": str(report), "options": options, "steps": [{"timeout_s": 30, **step} for step in steps]}
    done = subprocess.run(
        [sys.executable, "-c", Path(observer.__file__).read_text(encoding="utf-8")],
        input=json.dumps(request).encode(),
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder), **ALONE},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(report.read_bytes())))
    assert result["error"] == ""
    steps_seen: list[dict[str, Any]] = result["steps"]
    return steps_seen


def package(tmp_path: Path, tests: str = TESTS) -> Path:
    (tmp_path / "pkg.py").write_text(PACKAGE)
    (tmp_path / "test_pkg.py").write_text(tests)
    (tmp_path / "test_bad.py").write_text("import nothing_of_the_kind\n")
    return tmp_path


def test_outcomes_reach_and_calls_are_seen(tmp_path: Path) -> None:
    step = {"targets": ["."], "watch": LINES, "record": {"pkg.py": [2, 8]}}
    (seen,) = observe(package(tmp_path), step)
    outcomes = {test.partition("::")[2]: outcome[0] for test, outcome in seen["tests"].items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_second": "passed",
        "test_fails": "failed",
        "test_skipped": "skipped",
        "test_expected": "skipped",
        "test_error": "error",
        "test_odd": "passed",
    }
    assert "one doubled" in seen["tests"]["test_pkg.py::test_fails"][2]
    assert [file for file, _ in seen["errors"]] == ["test_bad.py"]
    assert seen["reached"]["pkg.py:2"] == ["test_pkg.py::test_fails", "test_pkg.py::test_passes"]
    assert seen["reached"]["pkg.py:5"] == ["test_pkg.py"]
    assert "pkg.py:11" not in seen["reached"]
    assert seen["calls"]["pkg.py:2"] == ["[1]", "[2]", "[[1]]"]
    assert seen["calls"]["pkg.py:8"] == ["[1, 2, 3]", "[1]"]


def test_files_are_replaced_for_one_step_and_every_step_is_a_process_of_its_own(tmp_path: Path) -> None:
    ids = ["test_pkg.py::test_passes", "test_pkg.py::test_odd"]
    wrong = {"pkg.py": PACKAGE.replace("* 2", "* 3"), "new/extra.py": "x = 1\n", "test_bad.py": None}
    broken, right = observe(
        package(tmp_path),
        {"targets": ["."], "ids": ids, "files": wrong},
        {"targets": ["test_pkg.py"], "ids": ids, "seed": 3},
    )
    assert {test: outcome[0] for test, outcome in broken["tests"].items()} == dict(
        zip(ids, ("failed", "passed"), strict=True)
    )
    assert broken["errors"] == []
    assert {outcome[0] for outcome in right["tests"].values()} == {"passed"}
    assert (tmp_path / "pkg.py").read_text() == PACKAGE
    assert not (tmp_path / "new" / "extra.py").exists()
    assert (tmp_path / "test_bad.py").exists()


def test_tests_that_are_named_run_and_some_others(tmp_path: Path) -> None:
    tests = "import pytest\n" + "".join(f"def test_{n}(): pass\n" for n in range(6))
    tests += "@pytest.mark.parametrize('n', [1, 2])\ndef test_many(n): pass\nclass Named:\n    def test_7(self): pass\n"
    tests += "class TestNamed:\n    def test_8(self): pass\n"
    named = {"test_pkg.py": ["test_4", "test_many", "TestNamed"], "test_gone.py": ["test_0"]}
    (seen,) = observe(package(tmp_path, tests), {"targets": ["test_pkg.py"], "named": named, "others": 2})
    places = ["test_0", "test_1", "test_4", "test_many[1]", "test_many[2]", "TestNamed::test_8"]
    assert list(seen["tests"]) == [f"test_pkg.py::{place}" for place in places]


def test_orders_differ_by_seed(tmp_path: Path) -> None:
    tests = "import pytest\n" + "".join(f"def test_{n}(): pass\n" for n in range(12))
    seen = observe(package(tmp_path, tests), *({"targets": ["test_pkg.py"], "seed": seed} for seed in (0, 1, 2, 1)))
    orders = [list(step["tests"]) for step in seen]
    assert orders[0] == [f"test_pkg.py::test_{n}" for n in range(12)]
    assert orders[1] == orders[3]
    assert len({tuple(order) for order in orders}) == 3


def test_hangs_and_crashes_are_told_and_end_only_their_step(tmp_path: Path) -> None:
    hang = "import subprocess, time\ndef test_hang():\n    subprocess.Popen(['sleep', '60'])\n    time.sleep(60)\n"
    crash = "import os\ndef test_crash(): os._exit(3)\n"
    seen = observe(
        package(tmp_path),
        {"targets": ["test_pkg.py"], "files": {"test_pkg.py": hang}, "timeout_s": 3},
        {"targets": ["test_pkg.py"], "files": {"test_pkg.py": crash}},
        {"targets": ["test_pkg.py"], "ids": ["test_pkg.py::test_odd"]},
    )
    assert [step["ended"] for step in seen] == ["timeout", "crash", ""]
    assert seen[2]["tests"]["test_pkg.py::test_odd"][0] == "passed"


def test_calls_return_plain_values_or_names(tmp_path: Path) -> None:
    calls = [[2], ["a"], [None], [[1, {"a": 1.5}]]]
    seen = observe(
        package(tmp_path),
        {"module": "pkg", "function": "double", "calls": calls},
        {"module": "pkg", "function": "odd", "calls": [[1]]},
        {"module": "pkg", "function": "missing", "calls": [[1]]},
        {
            "module": "pkg",
            "function": "double",
            "calls": [[1]],
            "files": {"pkg.py": "def double(x): raise SystemExit\n"},
        },
    )
    assert [step["results"] for step in seen] == [
        [[True, 4], [True, "aa"], [False, "TypeError"], [True, [1, {"a": 1.5}, 1, {"a": 1.5}]]],
        [[False, "=tuple"]],
        [[False, "AttributeError"]],
        [[False, "SystemExit"]],
    ]
