"""The notebook of the examples, executed cell by cell: a run trained, read, evaluated and exported from Python."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
DEADLINE_S = 900
"""Of a cell: a bound on what hangs, not on what a busy machine is slow at."""


@pytest.mark.heavy("a minute")
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_the_first_run_goes_as_written() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]  # it has no annotations
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    client = NotebookClient(notebook, timeout=DEADLINE_S, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    assert any("step 3: reward" in text for text in printed)
    assert any("version 3: config.json" in text for text in printed)
