"""Import path of ``bench`` and ``etude`` for programs that a bench starts, for any folder and interpreter."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout: benches are not part of the package."""
PYTHON_PATH = os.pathsep.join((str(ROOT), str(ROOT / "src")))


def environment() -> dict[str, str]:
    """Variables of this process, with a ``PYTHONPATH`` that a bench's programs need."""
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}
