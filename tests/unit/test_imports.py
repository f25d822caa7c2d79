"""The words of étude and its command line are light: they start without the machinery they may never need."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        *("etude.config.recipe", "etude.types", "etude.protocols"),
        *("etude.cli.main", "etude.run.rollouts", "etude.cli.commands.weights"),
    ],
)
def test_a_light_module_loads_no_machinery(module: str) -> None:
    program = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == []
