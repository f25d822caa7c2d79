"""A suite tried with models behind real HTTP, in real sandboxes: kept tries, two APIs, Harbor's tasks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from api_models import KEY, ApiModel, behind
from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.config.release import SuiteConfig
from etude.dashboard.suite_results import SuiteResults, read_results
from etude.run.evaluate import EvalRequest, read_evaluation, resolve_version
from etude.run.folder import RunFolder, exclusive
from etude.run.phase_models import publish_start
from etude.run.resolve import resolve
from etude.run.store_outages import StoreOutages
from etude.telemetry.log import EventLog
from harbor_folders import write_folder
from tiny_runs import make_tiny_start

Messages = Sequence[Mapping[str, Any]]


@pytest.fixture
def bugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of short bugs."""
    monkeypatch.setenv("MODEL_KEY", KEY)
    folder = tmp_path / "bugs"
    folder.mkdir()
    tasks = '[tasks]\nfamily = "bugfix"\n[sandboxes]\nkind = "local"\n'
    (folder / "suite.toml").write_text(f'name = "bugs"\nsplit = "heldout"\n{tasks}')
    return folder


def try_it(suite: Path, url: str, out: Path, *options: str, status: int = 0) -> SuiteResults | None:
    command = ["suite", "run", suite, "--url", url, "--model", "m", "--key-env", "MODEL_KEY", "--out", out, *options]
    assert main([*map(str, command)]) == status
    return read_results(out) if status == 0 else None


def submits(messages: Messages) -> str:
    return "submit" if len(messages) > 1 else "test"


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_tries_are_kept_with_what_they_cost(bugs: Path, tmp_path: Path, api: str) -> None:
    model, options = ApiModel(submits, [429, 503]), ("--api", api, "--harness", "coding", "--tasks", "3")
    with behind(model) as url:
        results = try_it(bugs, url, tmp_path / "out", *options, "--passes", "2")
        assert results is not None
        assert len(results.tries) == 6
        assert {each.measures["calls"] for each in results.tries} == {2}
        assert {each.measures["sampled_tokens"] for each in results.tries} == {2}
        assert all(each.measures["cached_tokens"] == 6 for each in results.tries)
        calls = len(model.requests)
        assert calls == 2 + 12
        assert try_it(bugs, url, tmp_path / "out", *options, "--passes", "2") == results
        assert len(model.requests) == calls  # nothing is tried twice
        more = try_it(bugs, url, tmp_path / "out", *options[:-1], "4", "--passes", "2")
        assert more is not None
        assert len(more.tries) == 8
        assert len(model.requests) == calls + 4


def test_another_model_does_not_go_on_in_the_same_folder(
    bugs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with behind(ApiModel(submits)) as url:
        options = ("--harness", "coding", "--tasks", "1")
        try_it(bugs, url, tmp_path / "out", *options)
        try_it(bugs, url, tmp_path / "out", *options, "--temperature", "0.5", status=2)
        assert "has tries of temperature = 1.0, and this is 0.5: name another folder" in capsys.readouterr().err


def test_two_commands_do_not_try_in_the_same_folder_at_once(
    bugs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", ("--harness", "coding", "--tasks", "1")
    out.mkdir()
    with behind(ApiModel(submits)) as url:
        with exclusive(RunFolder(out), "suite"):
            try_it(bugs, url, out, *options, status=2)
        assert f"{out} is in use: its 'suite' process is running already" in capsys.readouterr().err
        assert not (out / "events").exists()
        assert try_it(bugs, url, out, *options) is not None


def test_an_api_that_refuses_every_call_ends_it_at_once(
    bugs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_KEY", "wrong")
    with behind(ApiModel(submits, message="no such key")) as url:
        try_it(bugs, url, tmp_path / "out", "--harness", "coding", "--tasks", "2", status=2)
    assert "answers 401 for the model 'm': no such key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --url and --model of an API, or --run"),
        (("--url", "x", "--model", "m"), "--url 'x' is not a URL"),
        (("--url", "http://x", "--model", "m", "--key-env", "NO_SUCH"), "--key-env NO_SUCH: the variable is not set"),
        (("--url", "http://x", "--model", "m", "--extra", "[1]"), "--extra '[1]': expected an object"),
        (("--url", "http://x", "--model", "m", "--passes", "0"), "--passes 0: expected 1 or more"),
        (("--url", "http://x", "--model", "m", "--harness", "shel"), "harness.kind = 'shel' is no harness"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(
    bugs: Path, tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["suite", "run", str(bugs), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "tries.db").exists()


def answers(messages: Messages) -> str:
    """Solves one of two tasks in a shell."""
    first = messages[0 if messages[0]["role"] == "user" else 1]["content"]
    if len([each for each in messages if each["role"] == "assistant"]) == 0:
        return f"```bash\necho {'yes' if 'answer' in first else 'no'} > answer.txt\n```"
    return "```bash\nsubmit\n```"


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_folder_of_harbor_tasks_runs_as_a_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_KEY", KEY)
    write_folder(tmp_path / "harbor" / "easy")
    write_folder(tmp_path / "harbor" / "vague", {"instruction.md": "Do what is to be done.\n"})
    with behind(ApiModel(answers)) as url:
        results = try_it(tmp_path / "harbor", url, tmp_path / api, "--api", api, "--prices", "1", "0", "2")
    assert results is not None
    assert {each.template: each.passed for each in results.tries} == {"easy": True, "vague": False}
    assert {each.measures["tool_errors"] for each in results.tries} == {0}
    capsys.readouterr()
    assert main(["suite", "report", str(tmp_path / api), "--html", str(tmp_path / "page.html")]) == 0
    assert "50.0%" in capsys.readouterr().out
    assert "Quality against cost" in (tmp_path / "page.html").read_text()
    assert main(["suite", "compare", str(tmp_path / api), str(tmp_path / api), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["difference"]["sampled"]["sign_test"]["ties"] == 2


def test_weights_of_a_run_are_tried_with_its_own_harness(
    bugs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_tiny_start(tmp_path / "start")
    devices = ["engine.device=cpu", "trainer.device=cpu"]
    settings = [f"model.checkpoint={checkpoint}", "midtrain.tokens=0", "harness.options.max_turns=2", *devices]
    folder = RunFolder.create(tmp_path / "run", resolve(default_recipe(settings)))
    with EventLog(folder.events, "trainer") as events:
        publish_start(folder, checkpoint, events, StoreOutages("store", 60.0))
    command = ["suite", "run", str(bugs), "--run", f"{folder.path}:0", "--tasks", "3", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    results = read_results(tmp_path / "out")
    assert (results.model, results.api, results.harness) == ("run v0", "etude", "coding")
    assert len(results.tries) == 3
    assert all(1 <= each.measures["calls"] <= 2 and each.measures["sampled_tokens"] >= 1 for each in results.tries)
    gate = SuiteConfig(name="bugs-1", recipe=str(bugs), count=3)
    request = EvalRequest(version=0, tasks=3, greedy=False, suite=gate)
    tries = read_evaluation(folder, request, 0, resolve_version(folder, 0)[1]).tries["sampled"]
    assert [each and each.task_id for each in tries[0]] == list(results.tasks)  # what a release gate would find there
    assert main([*command, "--set", "seed=1"]) == 2
    assert main([*command, "--temperature", "0.5"]) == 2
    errors = capsys.readouterr().err
    assert "--set would have no effect with --run" in errors
    assert "--temperature would have no effect with --run" in errors
