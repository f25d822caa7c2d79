"""The oracle of suites (`examples/suites/oracle.py`), where two tasks ask in the same words."""

import subprocess
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "suites"


def test_of_several_answers_that_of_this_tree_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    oracle = import_module("oracle")
    (tmp_path / "sums.py").write_text("one\ntwo\nthree\n")
    answers = [{"sums.py": "one\n2\n3\nfour\n"}, {"sums.py": "one\ntwo\n3\n", "more/new.py": "x\n"}]
    command = oracle.WRITE.format(packed=oracle._packed(answers)).removeprefix("```bash\n").removesuffix("```")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "sums.py").read_text() == "one\ntwo\n3\n"
    assert (tmp_path / "more" / "new.py").read_text() == "x\n"
