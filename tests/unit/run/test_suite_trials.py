"""The recipe with which a version is tried on a suite: its harness, reward and judge."""

from pathlib import Path

import pytest

from etude.config.loading import default_recipe
from etude.config.release import SuiteConfig
from etude.errors import ConfigError
from etude.run.suite_trials import check_suites, trial_config, trial_name
from judged_suites import RUBRIC, write_suite

JUDGE = "http://127.0.0.1:9"
PAID = "reward.parts=[{name='calls', source='behaviour.malformed_calls', version=1, weight=-1.0, range=[0.0, 9.0]}]"


def named(place: Path) -> SuiteConfig:
    return SuiteConfig(name="side", recipe=str(place))


def test_a_suite_with_a_reward_is_scored_by_it_alone(tmp_path: Path) -> None:
    run = default_recipe(["harness.options.max_turns=3", "hints.weight=0.1", PAID])
    config = trial_config(run, named(write_suite(tmp_path / "side", JUDGE)))
    assert [part.name for part in config.reward.parts] == ["restraint", "kept"]
    assert config.judge.kind == "model"
    assert (config.harness, config.sandboxes.kind, config.hints.weight) == (run.harness, "local", 0.0)


def test_a_suite_without_one_is_scored_as_the_run_is(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text('name = "bugs"\nsplit = "heldout"\n[tasks]\nfamily = "bugfix"\n')
    run = default_recipe([PAID])
    config = trial_config(run, named(tmp_path))
    assert (config.reward, config.tasks.family) == (run.reward, "suite")


def test_tries_of_another_rubric_are_others(tmp_path: Path) -> None:
    run, suite = default_recipe(), named(write_suite(tmp_path / "side", JUDGE))
    first = trial_name(trial_config(run, suite), suite)
    assert first.startswith("side-") and trial_name(trial_config(run, suite), suite) == first
    (tmp_path / "side" / "restraint.toml").write_text(RUBRIC.replace("much more", "far more"))
    assert trial_name(trial_config(run, suite), suite) != first
    assert trial_name(run, suite) == "side", "of a reward that is the grade alone"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('source = "judge.restraint"', 'source = "judge.tact"', "there is no judge.rubrics.tact"),
        ("votes = 3", "votes = 5", "cannot be trusted: "),
    ],
)
def test_what_is_wrong_with_a_suite_is_named_before_a_run(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = write_suite(tmp_path / "side", JUDGE) / "suite.toml"
    file.write_text(file.read_text().replace(old, new))
    run = default_recipe(["release.every_steps=1", f"release.suites=[{{name='side', recipe='{file.parent}'}}]"])
    with pytest.raises(ConfigError, match=r"release\.suites, 'side' \(recipe = ") as error:
        check_suites(run)
    assert words in str(error.value)
