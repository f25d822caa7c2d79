"""A suite built of a real repository's commits, made again from its records, tried, refreshed and looked for."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from api_models import KEY, ApiModel, behind
from etude.cli.actions.build_suite import refresh, today
from etude.cli.main import main
from etude.dashboard.suite_results import read_results
from etude.errors import SandboxError
from etude.taskgen import preparation
from etude.taskgen.history import validator
from etude.taskgen.history.progress import read_progress
from etude.taskgen.history.records import RECORDS_FILE, HistoryRecord, read_records
from etude.taskgen.testruns import RunObservation
from etude.tasks.repositories.folder import PackageFolder, RepositoryTasks
from etude.tasks.suites import read_retired, suite_of
from etude.types import Split, TestChecks
from histories import COMMITS, HANGING, git, make_history
from pytest_wheels import make_wheels

Messages = Sequence[Mapping[str, Any]]
FIX = "```bash\nsed -i 's/result = 1/result = 0/' tally/__init__.py\n```"
SUBMIT = "```bash\nsubmit\n```"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(autouse=True)
def offline(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("MODEL_KEY", KEY)


def by_prompt(folder: Path) -> dict[str, HistoryRecord]:
    return {record.prompt: record for record in read_records(folder)}


def fixes_what_it_is_asked(messages: Messages) -> str:
    if any(each["role"] == "assistant" for each in messages):
        return SUBMIT
    return FIX if "total of no numbers" in messages[-1]["content"] else SUBMIT


def knows_by_heart(messages: Messages) -> str:
    question = messages[-1]["content"]
    if "tests/test_total.py of the project tally" not in question:
        return "I do not know."
    return "    assert mean([1, 3]) == 2" if "test_mean" in question else "    assert total([1, 2]) == 3"


def test_a_suite_from_a_repository_to_its_refresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository, suite = make_history(tmp_path / "tally", len(COMMITS) - 2), tmp_path / "own"
    assert main(["suite", "build", str(repository), "--out", str(suite)]) == 0
    records = by_prompt(suite)
    assert list(records) == ["the total of no numbers is one too many"]
    (record,) = records.values()
    assert set(record.about) == {"tests/test_total.py::test_total", "tests/test_total.py::test_nothing"}
    assert (record.template, record.difficulty, record.lines) == ("tally:tally", "easy", 2)
    outcomes = {verdict.path: verdict.outcome for verdict in PackageFolder(suite / "tally").verdicts()}
    assert outcomes == {
        COMMITS[1][0]: "kept",
        COMMITS[2][0]: "untested",
        COMMITS[3][0]: "untested",
        COMMITS[4][0]: "survived",
    }

    # A refresh goes on where the build ended, and says so; what is new has its day.
    log = (suite / "tally" / "log.jsonl").read_text()
    assert main(["suite", "refresh", str(suite)]) == 0
    assert "no change since" in capsys.readouterr().err
    make_history(repository)
    before = read_progress(suite)[str(repository)]
    assert main(["suite", "refresh", str(suite)]) == 0
    shown = capsys.readouterr()
    assert f"2 changes, the last time up to {before.newest} on {today()}: 1 kept, 1 survived" in shown.err
    assert "added: add mean of some numbers" in shown.out
    assert read_progress(suite)[str(repository)].newest == git(repository, "rev-parse", "HEAD").strip()
    assert (suite / "tally" / "log.jsonl").read_text().startswith(log)
    records = by_prompt(suite)
    assert {record.added for record in records.values()} == {today()}
    assert list(records) == ["the total of no numbers is one too many", "add mean of some numbers"]
    assert records["add mean of some numbers"].about == ("tests/test_total.py::test_mean",)
    assert "tests/test_total.py::test_total" in records["add mean of some numbers"].others
    task = RepositoryTasks(suite).task(Split.HELDOUT, 0)
    assert isinstance(task.checks, TestChecks)
    assert not any("README" in path for path in task.checks.files)

    # The records alone are enough to make it again, to the same tasks.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("suite.toml", RECORDS_FILE):
        shutil.copyfile(suite / name, copy / name)
    assert main(["suite", "fetch", str(copy)]) == 0
    ours, theirs = (sorted(file.read_bytes() for file in place.glob("*/tasks/*.json")) for place in (suite, copy))
    assert ours == theirs

    # A model that can do one of the two is measured so, by real tests.
    with behind(ApiModel(fixes_what_it_is_asked)) as url:
        command = ["suite", "run", str(copy), "--url", url, "--model", "m", "--key-env", "MODEL_KEY"]
        assert main([*command, "--passes", "4", "--out", str(tmp_path / "out")]) == 0
    results = read_results(tmp_path / "out")
    solved = {record.task_id: record.prompt.startswith("the total") for record in records.values()}
    assert {(each.task_id, each.passed) for each in results.tries} == set(solved.items())
    assert len(results.tries) == 8

    # What is solved always or never is retired, with the reason and the day.
    upkeep = refresh(copy, [results], None, max_share=0.2, day="2026-02-03")
    retired = upkeep.retired
    assert {each.reason for each in retired.values()} == {"solved always: 4 of 4 tries", "solved never: 0 of 4 tries"}
    assert read_retired(copy) == retired
    assert suite_of(copy).version == "2026.02.03"
    assert {each.prompt: each.difficulty for each in read_records(copy)} == {
        "the total of no numbers is one too many": "easy",
        "add mean of some numbers": "hard",
    }
    assert upkeep.difficulties == {records["add mean of some numbers"].task_id: ("easy", "hard")}

    # Its own files are found in a training text, others are not.
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "clean.txt").write_text("nothing of it " * 50)
    assert main(["suite", "contamination", str(suite), str(texts)]) == 0
    (texts / "crawl.py").write_text((repository / "tests" / "test_total.py").read_text())
    (texts / "dump.jsonl").write_text((suite / RECORDS_FILE).read_text())
    capsys.readouterr()
    assert main(["suite", "contamination", str(suite), str(texts), "--json"]) == 1
    traces = json.loads(capsys.readouterr().out)
    assert traces["canary_in"] == ["dump.jsonl"]
    assert {each["task_id"] for each in traces["tasks"]} == {record.task_id for record in records.values()}

    # So is a model that knows its files by heart; two tests are too few to be sure.
    with behind(ApiModel(knows_by_heart)) as url:
        command = ["suite", "contamination", str(suite), "--url", url, "--model", "m", "--key-env", "MODEL_KEY"]
        assert main([*command, "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        assert [each["guided"] for each in memory["tests"]] == [1.0, 1.0]
        assert memory["difference"]["value"] > 0.9
        assert main(command) == 0
    assert "2 tests finished: +" in capsys.readouterr().out


def test_a_change_without_which_its_tests_do_not_end_costs_one_run_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator, "RUN_TIMEOUT_S", 5.0)
    monkeypatch.setattr(validator.ChangeValidator, "_run", None)  # its parts are not run, which would take minutes
    repository, suite = make_history(tmp_path / "tally", history=HANGING), tmp_path / "own"
    assert main(["suite", "build", str(repository), "--out", str(suite)]) == 0
    verdicts = [(verdict.path, verdict.outcome) for verdict in PackageFolder(suite / "tally").verdicts()]
    assert verdicts == [(HANGING[1][0], "hangs")]
    assert read_records(suite) == []


def test_a_build_that_is_interrupted_leaves_the_names_of_what_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object, **__: object) -> list[RunObservation]:
        raise SandboxError("the machine stops")

    suite = tmp_path / "own"
    pins = suite / "tally" / "requirements.txt"
    pins.parent.mkdir(parents=True)
    pins.write_text("pytest==1.0\n")
    monkeypatch.setattr(preparation, "observe", interrupted)
    assert main(["suite", "build", str(make_history(tmp_path / "tally", 2)), "--out", str(suite)]) != 0
    assert pins.read_text() == "pytest==1.0\n"
