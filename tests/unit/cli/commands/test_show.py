"""``etude show``: the right view for the argument, messages for mistakes, JSON for programs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.errors import ConfigError
from etude.ledger.archive import parse_comparison
from etude.ledger.ledger import TRAIN, Ledger
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from ledgers import rollout, task


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two groups of two."""
    folder = RunFolder.create(tmp_path_factory.mktemp("showing") / "run", default_recipe())
    ChatTemplate.train(["read f"], 300).save(folder.model)
    with Ledger.open(folder.ledger) as ledger:
        for group in range(2):
            ledger.admit_group(task(group), TRAIN, 2, 0)
            for slot in range(2):
                ledger.record(rollout(group, slot, reward=float(slot), name=f"{group}{slot}" * 8), TRAIN)
    return folder.path


def shown(run: Path, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert main(["show", str(run), *map(str, options)]) == 0
    return capsys.readouterr().out


def lines(run: Path, capsys: pytest.CaptureFixture[str], *options: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(run, capsys, *options, "--json").splitlines()]


def test_nothing_asked_is_an_overview(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run, capsys)
    assert "0 of 100 steps committed" in text
    assert f"etude show {run} with" in text
    assert "  --group 1 " in text
    (message,) = lines(run, capsys)
    assert message["purposes"][0]["outcomes"] == {"graded": 4, "failed": 0, "dropped": 0, "quarantined": 0}


def test_before_training_there_is_something_to_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    with Ledger.open(folder.ledger) as ledger:
        ledger.admit_group(task(0), "before-greedy", 1, 0)
        ledger.record(rollout(0, 0, reward=None), "before-greedy")
    text = shown(folder.path, capsys)
    assert "--limit 20 --purpose before-greedy" in text
    assert "--group 0 --purpose before-greedy" in text


def test_filters_make_a_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 of 4" in shown(run, capsys, "--limit", 2)
    result = lines(run, capsys, "--reward", ">0.5", "--sort", "tokens")
    assert [rollout["rollout_id"][:2] for rollout in result] == ["11", "01"]
    assert result[0]["traits"]["turns"] == 1
    assert "no rollout is like that" in shown(run, capsys, "--reason", "never")
    assert "4 rollouts" in shown(run, capsys, "--purpose", "train")


def test_a_group_and_a_rollout_are_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run, capsys, "--group", 1)
    assert text.count("━━ rollout") == 2
    assert text.count("turn 0 ·") == 2
    assert "2 compared" in text
    assert shown(run, capsys, "--group", 1, "--slot", 0).count("━━ rollout") == 1
    (message,) = lines(run, capsys, "--rollout", "01")
    assert (message["group"], message["slot"], message["turns"][0]["advantage"]) == (0, 1, 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--reward", "high"], "reward 'high': expected a comparison"),
        (["--reward", ">=much"], "reward '>=much'"),
        (["--group", "0", "--limit", "3"], "--limit would have no effect"),
        (["--group", "0", "--has-hint"], "--has-hint would have no effect"),
        (["--rollout", "01", "--slot", "0"], "--rollout already chooses"),
        (["--tokens"], "--tokens needs --group N or --rollout ID"),
        (["--slot", "1"], "--slot needs --group N"),
        (["--limit", "0"], "--limit 0: expected 1 or more"),
        (["--purpose", "tarin"], "no rollouts of --purpose 'tarin'; choose another --purpose: train"),
        (["--version", "99"], "--version 99: tokens of its rollouts are of versions 1 to 1"),
        (["--group", "9"], "no group 9"),
        (["--group", "0", "--purpose", "x"], "its purposes are train, choose with --purpose"),
        (["--group", "0", "--slot", "9"], "slot 9 has ended"),
        (["--rollout", "zz"], "has no rollout 'zz'"),
        (["--rollout", "0"], "begins several ids"),
        (["--group", "0", "--export", "html"], "--export prints one rollout"),
    ],
)
def test_a_mistake_is_one_line_with_the_value(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["show", str(run), *options]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert len(text.splitlines()) == 1


def test_a_run_that_may_only_be_read_is_read(run: Path) -> None:
    within = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []  # root may write anywhere
    log, places = run / "ledger.db-wal", run / "ledger.db-shm"
    for file in (log, places):
        file.unlink(missing_ok=True)  # readers that may write leave them behind

    def question() -> subprocess.CompletedProcess[str]:
        command = [*within, sys.executable, "-m", "etude", "show", str(run)]
        run.chmod(0o500)
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            run.chmod(0o700)

    assert "of 100 steps committed" in question().stdout
    log.write_bytes(b"what was written last")
    assert "look into a copy of the folder" in question().stderr
    log.unlink()


def test_comparisons_are_read_as_they_are_meant() -> None:
    message = [parse_comparison(text) for text in (">=0.5", "< 0", " =1", "!=-1e-3", ">1", "<=.5")]
    assert message == [(">=", 0.5), ("<", 0.0), ("=", 1.0), ("!=", -0.001), (">", 1.0), ("<=", 0.5)]
    for wrong in ("0.5", ">=", "=>1", "", ">1 2"):
        with pytest.raises(ConfigError, match="expected a comparison"):
            parse_comparison(wrong)


def test_a_rollout_is_printed_for_other_tools(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(shown(run, capsys, "--rollout", "01", "--export", "harbor"))
    assert (made["schema_version"], made["session_id"]) == ("ATIF-v1.8", "01" * 8)
    assert made["steps"][1]["metrics"]["completion_token_ids"] == [1]
    assert shown(run, capsys, "--rollout", "01", "--export", "html").startswith("<!DOCTYPE html>")


def test_a_list_is_of_tasks_that_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line["task_id"] for line in lines(run, capsys, "--task", "1")] == ["1", "1"]
    assert lines(run, capsys, "--hacked") == []
