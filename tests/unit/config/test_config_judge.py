"""What ``[judge]`` refuses."""

from pathlib import Path

import pytest

from etude.config.loading import default_recipe, load_recipe
from etude.errors import ConfigError

BASE = ("judge.url=https://api.example.com/v1", "judge.model=m")


def test_without_a_url_no_one_judges_and_nothing_else_has_an_effect() -> None:
    assert default_recipe().judge.url == ""
    with pytest.raises(ConfigError, match=r"judge.votes would have no effect without judge.url"):
        default_recipe(["judge.votes=3"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["judge.url=https://api.example.com/v1"], "judge.model is missing"),
        (["judge.url=ftp://x", "judge.model=m"], "expected http"),
        (["judge.url=https://u:secret@x/v1", "judge.model=m"], "password in it"),
        ([*BASE, "judge.votes=3"], "judge.temperature = 0"),
        ([*BASE, "judge.temperature=1e-38"], "judge.temperature = 1e-38"),
        ([*BASE, "judge.cost_per_run=5"], "without judge.prices"),
        ([*BASE, 'judge.calibrations={style="x"}'], "there is no judge.rubrics.style"),
    ],
)
def test_what_would_not_work_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        default_recipe(overrides)
    assert "secret" not in str(caught.value).replace("password", "")


def test_rubrics_lie_in_files_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "style.toml").write_text("words", encoding="utf-8")
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        '[judge]\nurl = "https://x/v1"\nmodel = "m"\nrubrics = {style = "@style.toml"}\n', encoding="utf-8"
    )
    assert load_recipe(recipe).judge.rubrics == {"style": "words"}
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("@style", "@other"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"judge.rubrics.style = '@other.toml' cannot be read"):
        load_recipe(recipe)
