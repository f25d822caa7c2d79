"""The commands of docs/suites.md do what the page says, in its order, with a small repository and a scripted model."""

import re
import shlex
import sys
import threading
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.loading import load_suite, parse_config
from etude.config.suite import SuiteFile
from etude.dashboard.suite_results import read_results
from etude.tasks.requests import UserRequest
from histories import make_history
from pytest_wheels import make_wheels

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = (REPOSITORY / "docs" / "suites.md").read_text(encoding="utf-8")
SERVER = "examples/suites/scripted.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


def test_the_commands_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheels(tmp_path / "wheels")))
    monkeypatch.chdir(tmp_path)
    make_history(tmp_path / "my-product")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("nothing of it")
    spec = spec_from_file_location("scripted", REPOSITORY / SERVER)
    assert spec is not None and spec.loader is not None
    scripted = module_from_spec(spec)
    spec.loader.exec_module(scripted)
    server = scripted.serve(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    commands = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    try:
        ran = 0
        for program, *arguments in commands:
            if program == "etude":
                here = f"http://127.0.0.1:{server.server_port}/v1"
                assert main([argument.replace("http://127.0.0.1:8000/v1", here) for argument in arguments]) == 0
                ran += 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert ran == 10
    results = read_results(tmp_path / "results" / "other")
    assert [each.passed for each in results.tries] == [False] * 4  # of the scripted policy, which does nothing
    assert {each.measures["calls"] for each in results.tries} == {3}
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_its_tables_are_valid(tmp_path: Path) -> None:
    suite, judged, release = blocks("toml")
    for name in ("restraint.toml", "restraint.calibration.json"):
        (tmp_path / name).write_text("as they are read later")
    (tmp_path / "suite.toml").write_text(f"{suite}\n{judged}")
    assert tomllib.loads(f"{suite}\n{judged}").keys() == SuiteFile.model_fields.keys()
    assert [part.name for part in load_suite(tmp_path).reward.parts] == ["restraint"]
    gate = tomllib.loads(release)
    gate["release"]["every_steps"] = 10
    assert parse_config(gate, source="docs").release.suites[0].recipe == "suites/mine"
    for line in blocks("json"):
        assert UserRequest.model_validate_json(line).keep


def test_every_option_of_the_table_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suite", "run", "--help"]) == 0
    shown = capsys.readouterr().out
    named = set(re.findall(r"`(--[a-z-]+)", DOCUMENT[DOCUMENT.index("## Try a model") : DOCUMENT.index("## Results")]))
    assert len(named) > 10
    assert not [option for option in named if option not in shown], sys.stdout
