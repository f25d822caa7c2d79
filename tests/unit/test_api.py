"""The public Python API: the names of ``import etude``, recipes, records of a run on disk, and data frames."""

import math
import subprocess
import sys
from pathlib import Path

import pandas
import polars
import pytest

import etude
from etude.config.loading import default_recipe, parse_config
from etude.ledger.ledger import TRAIN, Ledger
from etude.run.folder import RunFolder
from etude.run.process_name import TRAINER
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventLog
from etude.telemetry.metrics import METRICS
from etude.tokens.chat import ChatTemplate
from ledgers import rollout, task

STEP = dict.fromkeys(METRICS, 0.0)
"""Every metric of a step."""


@pytest.fixture
def run(tmp_path: Path) -> etude.Run:
    """A run with two groups of two, the first of them trained on."""
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    ChatTemplate.train(["read f"], 300).save(folder.model)
    with Ledger.open(folder.ledger) as ledger, EventLog(folder.events, str(TRAINER)) as events:
        for group in range(2):
            ledger.admit_group(task(group), TRAIN, 2, 0)
            for slot in range(2):
                ledger.record(rollout(group, slot, reward=float(slot), name=f"{group}{slot}" * 8), TRAIN)
        assert ledger.claim_batch(1, 1) is not None
        ledger.commit_step(1)
        for reward in (0.25, 0.5):  # computed twice, as after a crash
            events.write(StepDone(step=1, metrics={**STEP, "reward_mean": reward}, ended={"submit": 2}))
        events.write(StepDone(step=2, metrics={**STEP, "reward_mean": 1.0}))  # computed, and not committed
    return etude.open(folder.path)


def test_importing_the_package_loads_nothing_and_has_every_public_name() -> None:
    program = (
        "import sys, etude; print(*(name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules));"
        "print(*(name for name in etude.__all__ if not hasattr(etude, name)))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == []
    assert set(etude.__all__) <= set(dir(etude))
    with pytest.raises(AttributeError, match="'trane'; it has"):
        _ = etude.trane


def test_a_recipe_is_changed_and_checked(tmp_path: Path) -> None:
    recipe = etude.Recipe({"trainer": {"steps": 3}, "tasks": {"options": {"kinds": ["arith"]}}})
    changed = recipe.with_({"trainer.steps": 5, "seed": 1, "tasks.options.kinds": ("slice",)})
    assert (recipe["trainer.steps"], changed["trainer.steps"], changed["seed"]) == (3, 5, 1)
    assert changed["tasks.options.kinds"] == ["slice"]
    (tmp_path / "recipe.toml").write_text(changed.to_toml())
    assert etude.Recipe.load(tmp_path / "recipe.toml").config == changed.config
    with pytest.raises(etude.ConfigError, match=r"with trainer.stepz.*\n.*did you mean 'trainer.steps'"):
        recipe.with_({"trainer.stepz": 5})
    with pytest.raises(etude.ConfigError, match="'seed' is a value, not a section"):
        changed.with_({"seed.of": 5})
    with pytest.raises(KeyError, match=r"trainer\.stepz: no such key"):
        _ = recipe["trainer.stepz"]


def test_a_key_that_was_not_set_does_not_count_as_set() -> None:
    """A missing ``midtrain.tokens`` is refused with a checkpoint, also in a changed recipe."""
    with pytest.raises(etude.ConfigError, match=r"midtrain\.tokens is not"):
        etude.Recipe().with_({"model.checkpoint": "a-model"})


def test_committed_steps_are_read_as_they_were_last_computed(run: etude.Run) -> None:
    (step,) = run.steps()
    assert (step.step, step.reward, step.ended) == (1, 0.5, {"submit": 2})
    assert run.steps().columns()["ended.submit"] == [2]


def test_rollouts_are_found_by_reward_group_and_purpose(run: etude.Run) -> None:
    assert [one.group for one in run.rollouts()] == [1, 1, 0, 0]
    assert {(one.group, one.slot) for one in run.rollouts(reward=">0")} == {(0, 1), (1, 1)}
    assert [one.step for one in run.rollouts(group=0)] == [1, 1]
    assert len(run.rollouts(limit=3)) == 3
    assert len(run.rollouts(purpose="before-greedy")) == len(run.rollouts(version=7)) == 0
    assert run.purposes() == {"train": 4}
    with pytest.raises(etude.ConfigError, match="reward 'high': expected a comparison"):
        run.rollouts(reward="high")


def test_turns_are_text_and_tokens(run: etude.Run) -> None:
    (chosen,) = run.rollouts(group=1, reward="=1")
    (turn,) = run.turns(chosen)
    assert (turn.rollout_id, turn.turn, turn.kind, turn.reward) == (chosen.rollout_id, 0, "act", 1.0)
    assert len(turn.completion_ids) == len(turn.logprobs) == len(turn.versions) == chosen.sampled_tokens
    assert run.turns(run.rollouts(group=1))[0].rollout_id == run.rollouts(group=1)[0].rollout_id


def test_records_become_frames(run: etude.Run) -> None:
    rollouts = run.rollouts()
    pandas_frame, polars_frame = rollouts.to_pandas(), rollouts.to_polars()
    assert isinstance(pandas_frame, pandas.DataFrame)
    assert isinstance(polars_frame, polars.DataFrame)
    assert pandas_frame["reward"].tolist() == polars_frame["reward"].to_list() == [1.0, 0.0, 1.0, 0.0]
    turns = run.turns(rollouts).to_polars()
    assert turns["logprobs"].to_list()[0] == pytest.approx(list(run.turns(rollouts[0])[0].logprobs))
    assert not math.isnan(run.steps().to_pandas()["metrics.loss_tokens"][0])
    assert rollouts[1:3][0] == rollouts[1]


def test_a_frame_without_rows_has_its_columns(run: etude.Run) -> None:
    empty = run.rollouts(reward=">7")
    assert list(empty.to_pandas().columns) == list(run.rollouts().to_pandas().columns)
    assert empty.to_polars().columns == list(empty.columns())


def test_frames_without_their_library_are_refused_by_name(run: etude.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(etude.UserError, match=r"polars is not installed: pip install polars, or read \.columns\(\)"):
        run.rollouts().to_polars()


def test_a_report_is_there_before_the_run_has_written_one(run: etude.Run) -> None:
    assert run.report()["finished"] is False
    assert run.recipe["name"] == "run"


def test_a_recipe_that_cannot_be_run_here_leaves_no_folder(tmp_path: Path) -> None:
    recipe = etude.Recipe({"model": {"checkpoint": str(tmp_path / "none")}, "midtrain": {"tokens": 0}})
    with pytest.raises(etude.ConfigError, match="no Hugging Face checkpoint there"):
        etude.train(recipe, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(etude.ConfigError, match="no recipe at"):
        etude.train(tmp_path / "nosuch.toml")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(etude.RunFolderError, match="is not a run folder"):
        etude.open(tmp_path)


def test_an_error_of_the_run_is_raised_with_its_message(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", parse_config({"name": "broken"}, source="test"))
    (folder.path / "ledger.db").write_bytes(b"no database" * 1000)
    with etude.train(etude.open(folder.path)) as training, pytest.raises(etude.EtudeError, match=r"ledger\.db"):
        training.wait()
