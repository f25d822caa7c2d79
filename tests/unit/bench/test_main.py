"""`python -m bench`: every bench is there, with options and a table, and every module of them can be imported."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, main, options_parser
from bench.programs import ROOT

MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "bench").rglob("*.py"))
RIVALS = {"bench.loop.trl_worker", "bench.losses.worker", "bench.trainer.worker"}
"""Programs that run in an environment of TRL's own."""


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_options_and_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m bench {name}" in capsys.readouterr().out
    bench = import_module(f"bench.{BENCHES[name][0]}")
    assert callable(bench.run) and callable(bench.table)
    options = options_parser(name, bench).parse_args(["--json"])
    assert options.json
    if "quick" in vars(options):
        assert options_parser(name, bench).parse_args(["--quick"]).quick


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported(module: str) -> None:
    if module not in RIVALS:
        import_module(module)


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nosuch"])
    assert "invalid choice: 'nosuch'" in capsys.readouterr().err


def test_an_error_of_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grading", "--contestants", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("bench: ")


def test_a_bench_prints_one_object_whatever_the_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench", "templates", "--from", str(tmp_path), "--json"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["command"] == f"python -m bench templates --from {tmp_path} --json"
    assert {"bench", "machine", "commit", "date", "seconds", "results", "goals"} <= result.keys()
