"""Classes and functions that a recipe names."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from etude.config import plugins
from etude.config.inference import ENGINES
from etude.config.loading import dump_run, load_recipe, parse_config
from etude.config.log import SINKS
from etude.config.plugins import Registry, load
from etude.config.rollouts import HARNESSES
from etude.config.tasks import FAMILIES, GRADERS, PROVIDERS
from etude.config.training import ADVANTAGES, LOSSES
from etude.errors import ConfigError

FAMILY = '''"""A family."""
from pydantic import Field
from etude.config.section import Section

class MyOptions(Section):
    """Mine."""
    size: int = Field(default=3, ge=1)
    """How large."""

class MyTasks:
    Options = MyOptions
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(FAMILY, encoding="utf-8")
    (tmp_path / "run.toml").write_text('[tasks]\nfamily = "@env.py:MyTasks"\noptions = {size = 7}\n', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "choice",
    [FAMILIES, GRADERS, HARNESSES, PROVIDERS, ENGINES, LOSSES, ADVANTAGES, SINKS],
    ids=lambda choice: choice.key,
)
def test_every_row_is_there(choice: Registry) -> None:
    for name in choice.builtins.keys() - {
        "wandb",
        "trackio",
        "mlflow",
    }:  # their packages: tests/contract/test_trackers.py
        assert callable(choice.find(name))


def test_a_file_beside_the_recipe_has_options_of_its_own(recipe: Path) -> None:
    assert load_recipe(recipe).tasks.options.model_dump() == {"size": 7}
    with pytest.raises(ConfigError, match=r"unknown key 'tasks\.options\.sise': did you mean 'tasks\.options\.size'"):
        load_recipe(recipe, ["tasks.options.sise=7"])
    with pytest.raises(ConfigError, match=r"tasks\.options\.size = 0: Input should be greater"):
        load_recipe(recipe, ["tasks.options.size=0"])


def test_a_run_keeps_a_copy_that_it_goes_on_with(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    (run / "run.toml").write_text(dump_run(load_recipe(recipe), run), encoding="utf-8")
    (recipe / "env.py").unlink()
    config = load_recipe(run)
    assert config.tasks.options.model_dump() == {"size": 7}
    (copy,) = (run / "plugins").iterdir()
    assert config.tasks.family == f"@{copy}:MyTasks"
    again = tmp_path_factory.mktemp("again")
    dump_run(config, again)
    assert [file.name for file in (again / "plugins").iterdir()] == [copy.name]
    copy.write_text(FAMILY + "# changed\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="was changed since the run began"):
        load_recipe(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bugfx", r"tasks\.family = 'bugfx' is no task family: did you mean 'bugfix'\? Expected 'bugfix'.*module:Name"),
        ("@env.py:MyTask", r"there is no 'MyTask' in .*env\.py; did you mean 'MyTasks'"),
        ("@none.py:MyTasks", r"cannot be imported: FileNotFoundError"),
        ("nowhere.at_all:Name", r"cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("@broken.py:Name", r"cannot be imported: ZeroDivisionError: division by zero \(.*broken\.py, line 2\)"),
    ],
)
def test_a_wrong_name_is_explained(recipe: Path, name: str, message: str) -> None:
    (recipe / "broken.py").write_text("x = 0\ny = 1 / x\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, [f"tasks.family={name}", "tasks.options={}"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    ...", r"tasks\.family = '@wrong\.py:Mine' cannot be made: TypeError: Mine\(\) takes no arguments"),
        ("    def __init__(self, *given): self.x = 1 / 0", r"made: ZeroDivisionError: .*wrong\.py, line 2\)"),
    ],
)
def test_what_cannot_be_made_is_named_with_its_line(recipe: Path, body: str, message: str) -> None:
    (recipe / "wrong.py").write_text(f"class Mine:\n{body}\n", encoding="utf-8")
    config = load_recipe(recipe, ["tasks.family=@wrong.py:Mine", "tasks.options={}"])
    with pytest.raises(ConfigError, match=message):
        FAMILIES.make(config.tasks.family, config.tasks.options, None)


def test_a_package_gives_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="acme", value="etude.tasks.lookup:LookupFamily", group=plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda **query: EntryPoints([point]).select(**query))
    assert FAMILIES.find("acme") is load("etude.tasks.lookup:LookupFamily", "test")


def test_a_reward_function_is_the_same_wherever_the_run_lies() -> None:
    assert plugins.portable("@/a/b/plugins/r.0123.py:f") == plugins.portable("@/c/plugins/r.0123.py:f")
    assert plugins.portable("package.module:f") == "package.module:f"


def test_a_loss_of_ones_own_has_defaults_and_any_correction() -> None:
    tree: dict[str, Any] = {"loss": {"kind": "etude.trainer.losses:policy_gradient"}}
    loss = parse_config(tree, source="test").loss
    assert (loss.baseline, loss.aggregation, loss.correction) == ("mean", "token_mean", "none")
    assert parse_config({"loss": tree["loss"] | {"correction": "mis"}}, source="test").loss.correction == "mis"
