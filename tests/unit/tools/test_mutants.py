"""A planted bug is noticed if, and only if, a test fails because of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mutants

MODULE = '''"""A core."""


def larger(first: int, second: int = 0) -> int:
    """The larger one."""
    if first < 0:
        raise ValueError("below zero")
    result: int | None = max(first, second)
    return result


def decided(is_so: bool) -> str:
    return "yes" if is_so else "no"


def kept(number: int) -> int:
    with open("kept", "w") as file:
        file.write(str(number))
    return number


def inlined(function):
    return function


@inlined
def compiled(number: int) -> int:
    return number + 1
'''
TESTS = """import pytest
from core import decided, kept, larger


def test_larger():
    assert (larger(1, 2), larger(2, 1), larger(0)) == (2, 2, 0)
    with pytest.raises(ValueError):
        larger(-1)


def test_kept():
    assert kept(3) == 3
"""
RUN = """
import argparse, json, mutants, sys
from pathlib import Path
options = argparse.Namespace(mutants=99, seed=0, workers=2, out=Path("killed"))
equivalent = [{"bug": "-if first < 0: +if first <= 0:"}, {"line": "return function"}]
core = {"modules": ["core"], "tests": ["test_core.py"], "equivalent": equivalent}
json.dump([mutants.measure("small", core, options) for _ in range(2)], sys.stdout)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one core and its tests."""
    for name, text in (("src/etude/core.py", MODULE), ("tests/test_core.py", TESTS), ("pytest.ini", "[pytest]\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_of_errors_types_and_compiled_functions_are_not_mutated(project: Path) -> None:
    bugs = list(mutants.candidates(["core"]))
    assert {one.function.qualname for one in bugs} == {"larger", "decided", "kept", "inlined"}
    assert not {"wrong_text", "wrong_sign"} & {one.operator for one in bugs if one.function.qualname == "larger"}
    assert all(one.text != MODULE and one.bug for one in bugs)
    assert len({one.key for one in bugs}) == len(bugs)


def test_survivors_are_what_no_test_notices_and_killed_ones_are_remembered(project: Path) -> None:
    paths = os.pathsep.join([str(project / "src/etude"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, again = json.loads(done.stdout)
    assert again["survivors"] == first["survivors"]
    assert (again["killed"], again["tried"]) == (first["killed"], first["tried"])
    survivors = [(one["function"].partition(":")[2], one["operator"]) for one in first["survivors"]]
    assert ("decided", "swapped_branches") in survivors  # no test calls it
    assert "larger" not in {function for function, _ in survivors}
    assert first["equivalent"] == 2
    assert ("inlined", "missing_return") not in survivors
    assert first["uncalled"] == len([function for function, _ in survivors if function != "kept"])
    assert not (project / "kept").exists()
