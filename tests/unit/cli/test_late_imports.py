"""Help, wrong options and wrong recipes come at once: a command's module imports its options, and no more."""

import subprocess
import sys

import pytest

from etude.cli.main import COMMANDS

HEAVY = ("torch", "numba", "numpy", "aiohttp")
LIGHT = tuple(name for name, (module, _) in COMMANDS.items() if module != "processes")
"""Commands that import the rest of étude when they run: all but the processes of a run, which nobody starts by hand."""


@pytest.mark.parametrize("command", LIGHT)
def test_help_imports_no_machinery(command: str) -> None:
    program = (
        f"import sys; from etude.cli.main import main; main([{command!r}, '--help']);"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"etude {command}" in outcome.stdout
    assert outcome.stderr.split() == []


@pytest.mark.parametrize(("wrong", "key"), [("--seed=many", "--seed"), ("--set=trainer.steps=many", "trainer.steps")])
def test_a_wrong_option_or_recipe_of_a_run_is_refused_without_torch(wrong: str, key: str) -> None:
    program = (
        f"import sys; from etude.cli.main import main; status = main(['run', 'quickstart', {wrong!r}]);"
        "print(status, 'torch' in sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == ["2", "False"]
    assert key in outcome.stderr
