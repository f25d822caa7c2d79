"""Changes that a stopped run allows, and the end of a run."""

from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.keys import tables
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, RunFolderError
from etude.ledger.ledger import Ledger
from etude.run.folder import RunFolder, exclusive
from etude.run.resuming import CHANGEABLE, REASONS, change, changed_config, is_finished, measured_fact
from ledgers import fill


def run_of(path: Path, *settings: str, steps_done: int = 0) -> RunFolder:
    """A run that has done ``steps_done`` steps."""
    folder = RunFolder.create(path, default_recipe(["trainer.steps=2", *settings]))
    with Ledger.open(folder.ledger) as ledger:
        for step in range(1, steps_done + 1):
            fill(ledger, f"task {step}")
            assert ledger.claim_batch(step, 1) is not None
            ledger.commit_step(step)
    return folder


def test_what_bits_depend_on_stays_while_steps_have_to_be_done_again(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", "trainer.checkpoint_steps=4", "trainer.steps=8", steps_done=6)
    (folder.checkpoints / "step-00000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^trainer.steps = 9: 2 steps after the last checkpoint"):
        changed_config(folder, ["trainer.steps=9"])
    assert changed_config(folder, ["trainer.checkpoint_steps=1"]).trainer.checkpoint_steps == 1
    (folder.checkpoints / "step-00000006").mkdir()
    assert changed_config(folder, ["trainer.steps=9"]).trainer.steps == 9


def test_the_table_names_keys_that_there_are() -> None:
    keys = {key.path for table in tables() for key in table.keys}
    assert keys >= CHANGEABLE
    assert REASONS.keys() <= {path.partition(".")[0] for path in keys}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("trainer.learning_rate=1", "must come from one algorithm"),
        ("tasks.heldout_every=7", "the held-out tasks would change"),
        ("midtrain.tokens=0", "its initial weights depend on it"),
        ("eval.tasks=3", "its evaluations before and after training could not be compared"),
        ("seed=9", "must come from one algorithm"),
        ("optimiser.state=8bit", "its moments were computed with it"),
    ],
)
def test_what_a_run_is_stays_as_it_was(setting: str, reason: str, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"^{setting.partition('=')[0]} = .*{reason}.*start another run"):
        changed_config(folder, [setting])


def test_limits_and_steps_may_change_while_the_run_is_down(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    config = changed_config(folder, ["trainer.steps=200", "rollouts.concurrency=256", "engine.options.threads=2"])
    change(folder, config)
    assert folder.config() == config
    assert config.trainer.steps == 200
    with exclusive(folder, "supervisor"), pytest.raises(RunFolderError, match="is in use"):
        change(folder, changed_config(folder, ["trainer.steps=300"]))
    assert folder.config().trainer.steps == 200


def test_moments_may_move_to_the_host_and_back(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", "trainer.device=cuda", "engine.device=cuda")
    assert changed_config(folder, ["optimiser.state=offload"]).optimiser.state == "offload"


def test_a_run_is_finished_when_its_end_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path / "run", steps_done=2)
    assert not is_finished(folder, folder.config())
    with Ledger.open(folder.ledger) as ledger:
        ledger.facts.set(measured_fact("after"), "2")
    assert is_finished(folder, folder.config())
    assert not is_finished(folder, changed_config(folder, ["trainer.steps=3"]))
    with pytest.raises(ConfigError, match=r"trainer\.steps = 1: 2 steps are done already"):
        is_finished(folder, changed_config(folder, ["trainer.steps=1"]))
    assert main(["run", "--resume", str(folder.path)]) == 0
    text = capsys.readouterr().out
    assert "is finished: 2 steps" in text
    assert f"run --resume {folder.path} --set trainer.steps=4" in text
    unmeasured = run_of(tmp_path / "unmeasured", "eval.enabled=false", steps_done=2)
    assert is_finished(unmeasured, unmeasured.config())


def test_a_run_is_read_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    mixture = "midtrain.mixture={'text:books' = 0.5, 'stdlib' = 0.5}"
    folder = RunFolder.create(
        tmp_path / "run", default_recipe(["model.checkpoint=models/one", mixture, "sft.file=/far/chats.jsonl"])
    )
    monkeypatch.chdir(tmp_path)
    config = folder.config()
    assert config.model.checkpoint == str(tmp_path / "here" / "models" / "one")
    assert config.midtrain.shares.keys() == {f"text:{tmp_path / 'here' / 'books'}", "stdlib"}
    assert config.sft.file == "/far/chats.jsonl"
    assert config.tasks.folder == RunConfig().tasks.folder == ""
