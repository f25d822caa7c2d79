"""How often each task is needed, and plans that are refused before a run starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.config.tasks import ENDLESS_FAMILIES, THIRD_PARTY_FAMILIES
from etude.errors import ConfigError
from etude.run.preflight import check_ready
from etude.run.task_families import open_family
from etude.run.task_plan import TaskPlan, plan_tasks
from etude.types import Split
from harbor_folders import write_folder

PLAN = TaskPlan(family="harbor", steps=100, groups_per_step=4, epochs=0, train=50, heldout=7)


def test_a_plan_says_how_many_epochs_the_steps_are() -> None:
    assert PLAN.describe() == [
        "50 training tasks, 4 a step: 12.5 steps an epoch; 100 steps are 8 epochs",
        "7 held-out tasks",
    ]
    endless = replace(PLAN, family="bugfix", train=None, heldout=None)
    assert endless.describe() == ["bugfix makes new training tasks without end: 100 steps × 4 = 400"]
    for plan in (PLAN, endless, replace(PLAN, epochs=8), replace(PLAN, epochs=9)):
        plan.check()


def test_epochs_that_are_too_few_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"epochs = 7 of 50 .* 350, .* 100 .* 4 need 400: .* to 87, .* to 8,"):
        replace(PLAN, epochs=7).check()


def test_a_side_without_tasks_is_refused_with_the_keys_that_help() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.heldout_every.*metadata\.etude\.split.*eval\.enabled"):
        replace(PLAN, heldout=0).check()
    with pytest.raises(ConfigError, match="none is left to train on"):
        replace(PLAN, train=0).check()


def test_families_without_end_are_those_that_say_no_size() -> None:
    for family in set(ENDLESS_FAMILIES) - set(THIRD_PARTY_FAMILIES):  # one of these needs a server
        config = default_recipe([f"tasks.family={family}", "sandboxes.kind=ns"])
        assert open_family(config).size(Split.TRAIN) is None
        assert plan_tasks(config).train is None
        with pytest.raises(ConfigError, match="epochs would have no effect"):
            default_recipe([f"tasks.family={family}", "sandboxes.kind=ns", "tasks.epochs=2"])


@pytest.fixture
def harbor(tmp_path: Path) -> list[str]:
    """Settings of a run with three training tasks and a held-out one."""
    for number in range(4):
        side = "heldout" if number == 3 else "train"
        write_folder(tmp_path / f"t{number}", {"task.toml": f"[metadata.etude]\nsplit = '{side}'"})
    return ["tasks.family=harbor", f"tasks.folder={tmp_path}", "sandboxes.kind=ns", "rollouts.groups_per_step=1",
            "rollouts.concurrency=24", "trainer.steps=7"]  # fmt: skip


def test_a_start_is_refused_where_tasks_are_too_few(harbor: list[str], tmp_path: Path) -> None:
    assert plan_tasks(default_recipe(harbor)).describe()[0].endswith("3 steps an epoch; 7 steps are 2.33 epochs")
    plan_tasks(default_recipe([*harbor, "tasks.epochs=3"])).check()
    with pytest.raises(ConfigError, match=r"tasks\.epochs = 2"):
        list(check_ready(default_recipe([*harbor, "tasks.epochs=2"]), tmp_path / "run"))
    write_folder(tmp_path / "t3", {"task.toml": "[metadata.etude]\nsplit = 'train'"})
    with pytest.raises(ConfigError, match=r"eval\.enabled"):
        list(check_ready(default_recipe(harbor), tmp_path / "run"))
    plan_tasks(default_recipe([*harbor, "eval.enabled=false"])).check()


def test_a_dry_run_says_it(harbor: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text("")
    settings = [part for setting in harbor for part in ("--set", setting)]
    assert main(["run", str(recipe), "--dry-run", *settings]) == 0
    assert "# tasks: 3 training tasks, 1 a step: 3 steps an epoch; 7 steps are 2.33 epochs\n# tasks: 1 held-out" in (
        capsys.readouterr().out
    )
    assert main(["run", str(recipe), "--dry-run", *settings, "--set", "tasks.epochs=1"]) == 2
    assert "tasks.epochs = 1 of 3 training tasks" in capsys.readouterr().err
    assert main(["run", str(recipe), "--dry-run", *settings, "--set", "tasks.folder=nowhere"]) == 0
    assert "# tasks.folder: nowhere" in capsys.readouterr().out
