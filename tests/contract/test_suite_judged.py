"""A suite with a judge: requests without tests, and a model and a judge behind real HTTP."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from api_models import KEY, ApiModel, behind
from etude.cli.main import main
from etude.dashboard.suite_results import SuiteResults, read_results
from etude.errors import ExitCode
from judged_suites import RUBRIC, write_suite
from judges import verdict

Messages = Sequence[Mapping[str, Any]]

CHANGES, LOOKS = "```bash\necho 'x = 2' > beta.py\n```", "```bash\ncat *.py\n```"
SUBMITS = "```bash\nsubmit\n```"


def eager(messages: Messages) -> str:
    """An agent that changes the file ``beta.py`` where it is asked about it."""
    if any(message["role"] == "assistant" for message in messages):
        return SUBMITS
    return CHANGES if "beta" in messages[-1]["content"] else LOOKS


def score_of(messages: Messages) -> str:
    """A judge that holds a command which writes a file against the agent."""
    question = str(messages[-1]["content"])
    return verdict(question, 1 if "x = 2' >" in question else 3, aspect="restraint")


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str, ApiModel]]:
    """The URLs of a model and of its judge, and the judge."""
    monkeypatch.setenv("MODEL_KEY", KEY)
    monkeypatch.setenv("ETUDE_JUDGE_KEY", KEY)
    judge = ApiModel(score_of)
    with ExitStack() as stack:
        yield stack.enter_context(behind(ApiModel(eager))), stack.enter_context(behind(judge)), judge


def try_it(suite: Path, url: str, out: Path, *options: str, status: int = 0) -> SuiteResults | None:
    command = ["suite", "run", suite, "--url", url, "--model", "m", "--key-env", "MODEL_KEY", "--out", out, *options]
    assert main([*map(str, command)]) == status
    return read_results(out) if status == 0 else None


def test_a_calibrated_judge_scores_what_was_said_and_done(
    tmp_path: Path, urls: tuple[str, str, ApiModel], capsys: pytest.CaptureFixture[str]
) -> None:
    model, judge_url, judge = urls
    suite = write_suite(tmp_path / "side", judge_url)
    try_it(suite, model, tmp_path / "out", status=ExitCode.USER_ERROR)
    assert "the judge of 'restraint' cannot be trusted" in capsys.readouterr().err
    assert main(["judge", "calibrate", str(suite)]) == 0
    assert (suite / "restraint.calibration.json").is_file()
    write_suite(suite, judge_url, calibrations='{ restraint = "@restraint.calibration.json" }')
    assert main(["judge", "check", str(suite)]) == 0

    results = try_it(suite, model, tmp_path / "out", "--passes", "2")
    assert results is not None
    by_task = {(each.task_id, each.number): each for each in results.tries}
    quiet, loud = (by_task[task_id, 1] for task_id in results.tasks)
    assert (quiet.reward, quiet.passed, quiet.measures["restraint"], quiet.measures["kept"]) == (1.0, True, 1.0, 1.0)
    assert (loud.reward, loud.passed, loud.measures["restraint"], loud.measures["kept"]) == (0.0, False, 0.0, 0.0)
    assert results.parts == ("restraint", "kept")
    question = str(judge.requests[-1]["messages"][-1]["content"])
    assert "turn 0 said| " in question  # the words of calls whose tokens nobody knows
    judged = len(judge.requests)
    assert try_it(suite, model, tmp_path / "out", "--passes", "2") == results
    assert len(judge.requests) == judged  # nothing is judged twice

    assert main(["suite", "compare", str(tmp_path / "out"), str(tmp_path / "out")]) == 0
    assert "restraint" in capsys.readouterr().out


def test_two_rubrics_are_not_compared(
    tmp_path: Path, urls: tuple[str, str, ApiModel], capsys: pytest.CaptureFixture[str]
) -> None:
    model, judge_url, _ = urls
    suite = write_suite(tmp_path / "side", judge_url)
    unsure = ("--set", "judge.allow_uncalibrated=true")
    try_it(suite, model, tmp_path / "one", *unsure)
    (suite / "restraint.toml").write_text(RUBRIC.replace("much more", "far more"))
    try_it(suite, model, tmp_path / "one", *unsure, status=ExitCode.USER_ERROR)
    assert "has tries of reward = " in capsys.readouterr().err
    try_it(suite, model, tmp_path / "two", *unsure)
    assert main(["suite", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == ExitCode.USER_ERROR
    assert "were scored by two rewards or rubrics" in capsys.readouterr().err


def test_a_judge_that_is_away_is_never_a_zero(
    tmp_path: Path, urls: tuple[str, str, ApiModel], capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, _ = urls
    suite = write_suite(tmp_path / "side", "http://127.0.0.1:9")
    rules = ("judge.allow_uncalibrated=true", "judge.options.timeout_s=1", "rollouts.outage_s=1")
    options = [word for rule in (*rules, "rollouts.max_outage_s=2") for word in ("--set", rule)]
    try_it(suite, model, tmp_path / "out", *options, status=ExitCode.USER_ERROR)
    assert read_results(tmp_path / "out").tries == ()
    assert "judge" in capsys.readouterr().err
