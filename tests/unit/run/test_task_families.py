"""The tasks of a recipe."""

from pathlib import Path
from random import Random

import pytest

from etude.config.loading import default_recipe, parse_config
from etude.errors import ConfigError
from etude.run.phase_data import open_reading
from etude.run.task_families import open_demonstrations, open_family
from etude.run.task_sandboxes import image_store
from etude.tasks.corpora.corpus import tokenizer_texts
from etude.tasks.harbor.folder import read_task
from etude.tasks.harbor.images import image_name
from etude.tasks.harbor.settings import TaskFolderError
from etude.tasks.repositories.folder import PackageFolder
from etude.tokens.chat import ChatTemplate
from etude.types import Split, Task, TestChecks
from harbor_folders import write_folder


def test_a_harbor_task_with_a_dockerfile_is_practised_in_the_image_that_was_built_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dockerfile = {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN touch made"}
    source = read_task(write_folder(tmp_path / "tasks" / "a", dockerfile))
    config = parse_config(
        {
            "tasks": {"family": "harbor", "folder": str(tmp_path / "tasks")},
            "sandboxes": {"kind": "ns", "images": str(tmp_path / "images")},
        },
        source="here",
    )
    with pytest.raises(TaskFolderError, match="`etude tasks check` builds it"):
        open_family(config)
    built = image_store(config.sandboxes, config.tasks).add((), workdir="/app", name=image_name(source))
    task = open_family(config).task(Split.TRAIN, 0)
    assert task.environment is not None
    assert task.environment.image == built.digest

    write_folder(tmp_path / "tasks" / "b", {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN false"})
    family = open_family(config)
    assert (family.size(Split.TRAIN), family.task(Split.TRAIN, 0).task_id) == (1, task.task_id)
    assert "is set aside" in caplog.text


def test_a_task_that_cannot_be_probed_is_taken_only_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    checks = TestChecks(files={}, must_pass=("a.py::test_a",), about=1, artefacts=("a",))
    task = Task(task_id="0", family="repository", template="t", split=Split.TRAIN, prompt="p", files={}, checks=checks)
    PackageFolder(tmp_path / "pkg-1").add(task, {})
    tables = {"tasks": {"family": "repository", "folder": str(tmp_path)}, "sandboxes": {"kind": "ns"}}
    with pytest.raises(ConfigError, match=r"1 tasks have no probe(.|\n)*tasks\.options\.unprobed = true"):
        open_family(parse_config(tables, source="here"))
    tables["tasks"]["options"] = {"unprobed": True}  # type: ignore[assignment]  # TOML
    assert open_family(parse_config(tables, source="here")).task(Split.TRAIN, 0) == task


def test_a_family_of_ones_own_shows_mid_training_how_its_tasks_are_done(tmp_path: Path) -> None:
    family = Path(__file__).parents[3] / "examples" / "extend" / "shown.py"
    config = default_recipe([f"tasks.family=@{family}:Letters", "midtrain.mixture={code=0.5, sessions=0.5}"])
    chat = ChatTemplate.train(tokenizer_texts(open_demonstrations(config), config.seed), 512)
    data = open_reading(config, "midtrain", chat, tmp_path)
    assert set(data.heldout) == {"code", "sessions"}
    opened = open_family(config)
    prompts = {split: {opened.task(split, i).prompt for i in range(opened.size(split) or 0)} for split in Split}
    for split in Split:
        shown = open_demonstrations(config, split)
        assert {shown.session(Random(seed))[0].content for seed in range(200)} == prompts[split]
        assert "upper()" in str(shown.code(Random(0)))


def test_a_family_that_shows_nothing_is_told_how_it_could() -> None:
    family = Path(__file__).parents[3] / "examples" / "extend" / "family.py"
    config = default_recipe(
        [f"tasks.family=@{family}:Sums", f"tasks.graders={{near='@{family.parent}/grader.py:Near'}}"]
    )
    with pytest.raises(ConfigError, match=r"midtrain\.tokens = 0(.|\n)*its method 'demonstrations'"):
        open_demonstrations(config)
