"""Invalid values and combinations of ``[judge]`` are refused."""

from pathlib import Path

import pytest

from etude.config.loading import default_recipe, load_recipe
from etude.errors import ConfigError

BASE = ("judge.kind=model", "judge.options.url=https://api.example.com/v1", "judge.options.model=m")


def test_without_a_url_no_one_judges_and_nothing_else_has_an_effect() -> None:
    assert default_recipe().judge.kind == "none"
    with pytest.raises(
        ConfigError, match=r"unknown key 'judge\.options\.votes': it would have no effect with judge\.kind = 'none'"
    ):
        default_recipe(["judge.options.votes=3"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["judge.kind=model", "judge.options.url=https://api.example.com/v1"], r"judge\.options\.model is missing"),
        (["judge.kind=model", "judge.options.url=ftp://x", "judge.options.model=m"], "expected http"),
        (["judge.kind=model", "judge.options.url=https://u:secret@x/v1", "judge.options.model=m"], "password in it"),
        ([*BASE, "judge.options.votes=3"], "judge.options.temperature = 0"),
        ([*BASE, "judge.options.temperature=1e-38"], "judge.options.temperature = 1e-38"),
        ([*BASE, "judge.options.cost_per_run=5"], "without judge.options.prices"),
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
        '[judge]\nkind = "model"\noptions = {url = "https://x/v1", model = "m"}\nrubrics = {style = "@style.toml"}\n',
        encoding="utf-8",
    )
    assert load_recipe(recipe).judge.rubrics == {"style": "words"}
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("@style", "@other"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"judge.rubrics.style = '@other.toml' cannot be read"):
        load_recipe(recipe)
