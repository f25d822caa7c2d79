"""The reporter in a real pytest: its marks, and the effect of printing, dying and lying tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_results import ended
from etude.rewards.graders.test_runs import ENVIRONMENT, HiddenTestRun, Report

CASES = """\
import os, sys, unittest
import pytest

sys.stdout.write("0123456789ab\\\\n" * 3)
os.write(1, b"printed\\\\n")

def test_right(): print("x" * 100)
def test_wrong(): assert 1 == 2
@pytest.mark.parametrize("text", ["a::b", "é"])
def test_parameters(text): assert text
def test_skipped(): pytest.skip()
@pytest.mark.xfail
def test_expected(): assert 1 == 2
@pytest.mark.xfail
def test_unexpected(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_torn_down(broken): pass
class T(unittest.TestCase):
    def test_method(self): self.assertTrue(True)
def test_input(): assert sys.stdin is None or os.read(0, 1) == b""
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    files = {
        "tests/test_cases.py": CASES,
        "tests/test_broken.py": "import nowhere\n",
        "test_dies.py": "import os\ndef test_first(): pass\ndef test_dies(): os._exit(0)\ndef test_last(): pass\n",
        "lib/found.py": "",
        "test_found.py": "import found\ndef test_found(): pass\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def report(sandbox: Path, paths: list[str], nodes: list[str], environment: dict[str, str] | None = None) -> Report:
    """The parsed report of a pytest run."""
    run = HiddenTestRun(command=(sys.executable, "-m", "pytest"), paths=paths)
    for name, text in run.files.items():
        (sandbox / name).parent.mkdir(exist_ok=True)
        (sandbox / name).write_text(text, encoding="utf-8")
    ours = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    variables = {**ours, **ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(environment or {})}
    done = subprocess.run(run.argv, cwd=sandbox, env=variables, input=run.secret, capture_output=True, text=True)
    return run.read(ended(done.returncode, done.stdout, done.stderr), nodes)


def test_what_passed_and_nothing_else_is_marked(sandbox: Path) -> None:
    names = ["right", "wrong", "skipped", "expected", "unexpected", "torn_down", "input", "parameters[a::b]"]
    nodes = [f"tests/test_cases.py::test_{name}" for name in names]
    nodes += [
        "tests/test_cases.py::T::test_method",
        "tests/test_cases.py::test_parameters[\\xe9]",
        "tests/test_cases.py::test_parameters",
    ]
    heard = report(sandbox, ["tests/test_broken.py", "tests/test_cases.py"], nodes)
    assert heard.started
    assert heard.ended
    assert heard.passed == {nodes[0], *nodes[6:]}
    assert not set(heard.result.stdout) - set("0123456789abcdef\n")


def test_a_process_that_dies_leaves_the_marks_it_has(sandbox: Path) -> None:
    nodes = [f"test_dies.py::test_{name}" for name in ("first", "dies", "last")]
    heard = report(sandbox, ["test_dies.py"], nodes)
    assert (heard.started, heard.ended, heard.passed) == (True, False, frozenset(nodes[:1]))
    assert heard.result.exit_code == 0


def test_the_search_path_of_the_sandbox_is_unchanged(sandbox: Path) -> None:
    heard = report(sandbox, ["test_found.py"], ["test_found.py::test_found"], {"PYTHONPATH": "lib"})
    assert heard.passed == {"test_found.py::test_found"}


def test_marks_are_good_for_one_run() -> None:
    first, second = (HiddenTestRun(command=("pytest",), paths=("a.py",)) for _ in range(2))
    assert first.secret != second.secret
    assert first.name != second.name
    marks = "\n".join(first._mark(name) for name in ("a.py::test_a", "started"))
    assert first.read(ended(stdout=marks), ["a.py::test_a"]).passed == {"a.py::test_a"}
    forged = second.read(ended(stdout=marks + "\na.py::test_a\nstarted\n"), ["a.py::test_a"])
    assert (forged.passed, forged.started) == (frozenset(), False)


def test_the_tail_of_the_output_is_for_people() -> None:
    heard = HiddenTestRun(command=(), paths=()).read(ended(stderr="x" * 5000 + " the end \n"), [])
    assert heard.tail.endswith("the end")
    assert len(heard.tail) <= 600
