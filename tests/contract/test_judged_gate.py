"""A suite with a judge as a release gate: weights of a run on a real engine, a judge behind real HTTP."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from api_models import KEY, ApiModel, behind
from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.suite_results import read_results
from etude.errors import ConfigError, UserError
from etude.releases.gate import GateFacts, checks
from etude.releases.states import Release, ReleaseState
from etude.run.folder import RunFolder
from etude.run.phase_models import publish_start
from etude.run.preflight import check_judges
from etude.run.release_gate import GateMeasurements
from etude.run.resolve import resolve
from etude.run.store_outages import StoreOutages
from etude.run.suite_trials import check_suites
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.weights.publish import Publisher
from etude.weights.pull import pull
from etude.weights.tensors import to_stored, to_tensors
from judged_suites import write_suite
from judges import verdict
from tiny_runs import make_tiny_start

Messages = Sequence[Mapping[str, Any]]
TASKS = 2
"""Requests of the suite."""


class Judge:
    """Judges labelled texts as people did, and tries by the scores that it is given; without one it refuses."""

    def __init__(self) -> None:
        self.scores: Iterator[int] = iter(())
        self.api = ApiModel(self._say)

    def _say(self, messages: Messages) -> str:
        question = str(messages[-1]["content"])
        if "turn 0 heard" in question:
            score = next(self.scores, None)
            if score is None:
                raise web.HTTPForbidden
            return verdict(question, score, aspect="restraint")
        return verdict(question, 1 if "x = 2' >" in question else 3, aspect="restraint")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setenv("ETUDE_JUDGE_KEY", KEY)
    return Judge()


@pytest.fixture
def url(judge: Judge) -> Iterator[str]:
    with behind(judge.api) as place:
        yield place


@pytest.fixture
def suite(tmp_path: Path, url: str) -> Path:
    """A suite with a calibrated judge."""
    folder = write_suite(tmp_path / "side", url)
    assert main(["judge", "calibrate", str(folder)]) == 0
    return write_suite(folder, url, calibrations='{ restraint = "@restraint.calibration.json" }')


def recipe(start: Path, suite: Path) -> RunConfig:
    """A run that reads a few tokens a turn, with the suite as its gate."""
    gate = f"release.suites=[{{name='restraint', recipe='{suite}', count=64, margin=0.8}}]"  # two tasks prove little
    settings = [
        "midtrain.tokens=0",
        "harness.options.max_turns=1",
        "rollouts.max_attempts=1",
        "engine.device=cpu",
        "trainer.device=cpu",
    ]
    release = ["release.every_steps=1", "release.tasks=2", gate]
    return resolve(default_recipe([f"model.checkpoint={start}", *settings, *release]))


@pytest.fixture
def run(tmp_path: Path, suite: Path) -> RunFolder:
    """A run with two versions whose weights differ."""
    start = make_tiny_start(tmp_path / "start")
    folder = RunFolder.create(tmp_path / "run", recipe(start, suite))
    with EventLog(folder.events, "trainer") as events:
        publish_start(folder, start, events, StoreOutages("store", 60.0))
    state = {name: torch.flip(each, [0]) for name, each in to_tensors(pull(open_log(folder), 0).state).items()}
    with Publisher(open_log(folder)) as publisher:
        publisher.publish(to_stored(state), version=1, step=1).result()
    return folder


def release(folder: RunFolder, version: int) -> Release:
    record = open_log(folder).read(version)
    assert record is not None
    return Release(version=version, digest=record.digest, state=ReleaseState.CANDIDATE)


def measure(folder: RunFolder, gate: GateMeasurements | None = None) -> GateFacts:
    """Both versions by the processes of a gate."""
    gate = gate or GateMeasurements(folder, folder.config().release)
    return asyncio.run(gate.measure(release(folder, 1), release(folder, 0)))


def blocked(folder: RunFolder, facts: GateFacts) -> list[str]:
    return [f"{check.name}: {check.says}" for check in checks(facts, folder.config().release) if not check.passed]


def test_a_gate_judges_both_versions_by_the_suites_own_rubric(run: RunFolder, suite: Path, judge: Judge) -> None:
    judge.scores = iter([3] * 3 * TASKS + [1] * 3 * TASKS)  # of the candidate, which is tried first: three votes a try
    facts = measure(run)
    assert facts.against is not None
    assert facts.against.suites["restraint"].value == 1.0, "all of the scale, each try"
    assert facts.missing == ()
    assert not [each for each in blocked(run, facts) if "restraint" in each]

    before = len(judge.api.requests)
    command = ["suite", "run", str(suite), "--run", f"{run.path}:0", "--out", str(suite.parent / "out")]
    judge.scores = iter([2] * 3 * TASKS)
    assert main([*command, "--pass-at", "0.5"]) == 0
    results = read_results(suite.parent / "out")
    assert (results.parts, len(results.tries)) == (("restraint", "kept"), TASKS)
    assert all((one.reward, one.passed, one.measures["restraint"]) == (0.5, True, 0.5) for one in results.tries)
    assert all(one.measures["kept"] in (0.0, 1.0) for one in results.tries)
    assert len(judge.api.requests) == before + 3 * TASKS


def test_an_unreachable_judge_blocks_the_candidate_and_does_not_score_zero(run: RunFolder, suite: Path) -> None:
    file = suite / "suite.toml"
    file.write_text(file.read_text().replace('missing = "wait"', 'missing = "mask"'))  # so that nobody waits
    with pytest.raises(UserError, match=r"suite restraint: version 1 could not be measured in 3 attempts: .*restraint"):
        measure(run)


def test_what_is_wrong_with_a_suite_is_said_before_the_run(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, suite = tmp_path / "start", write_suite(tmp_path / "side", url)
    config = default_recipe(["release.every_steps=1", f"release.suites=[{{name='kind', recipe='{suite}'}}]"])
    with pytest.raises(ConfigError, match=r"'kind' \(recipe = .*\): the judge of 'restraint' cannot be trusted"):
        check_suites(config)
    monkeypatch.delenv("ETUDE_JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"rejects the key in ETUDE_JUDGE_KEY, which is not set: export ETUDE_JUDGE_"):
        list(check_judges(config))
    monkeypatch.setenv("ETUDE_JUDGE_KEY", KEY)
    assert [(each.name, each.works) for each in check_judges(config)] == [("judge", True)]
    write_suite(suite, "http://127.0.0.1:9")
    (finding,) = check_judges(config)
    assert not finding.works and "will wait for it" in finding.words
    gone = default_recipe(["release.every_steps=1", f"release.suites=[{{name='gone', recipe='{start}'}}]"])
    with pytest.raises(ConfigError, match=r"release.suites, 'gone'.*no recipe at"):
        check_suites(gone)
