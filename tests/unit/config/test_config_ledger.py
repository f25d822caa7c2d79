"""Allowed places of a recipe's ledger; passwords in a recipe are refused."""

from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.loading import default_recipe, dump_toml
from etude.errors import ConfigError

SERVER = "postgresql://me@db.example:5432/runs"
SECRET = "s3cret"


def test_a_server_survives_the_recipe() -> None:
    config = default_recipe([f"ledger.url={SERVER}"])
    assert config.ledger.url == SERVER
    assert SERVER in dump_toml(config)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"postgresql://me:{SECRET}@db/runs", "PGPASSWORD or ~/.pgpass"),
        (f"postgresql://db/runs?user=me&password={SECRET}", "has a password in it"),
        (f"postgresql://db/runs?sslPassword={SECRET}", "has a password in it"),
        (f"mysql://me:{SECRET}@db/runs", "expected postgresql://"),
        ("postgresql://db/runs#mine", "every run gets one of its own"),
    ],
)
def test_what_is_refused_is_refused_without_repeating_secrets(
    url: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        default_recipe([f"ledger.url={url}"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    assert main(["run", str(recipe), "--ledger", url, "--out", str(tmp_path / "run")]) == 2
    assert SECRET not in str(caught.value) + "".join(capsys.readouterr())
    assert not (tmp_path / "run").exists()


def test_a_server_can_be_chosen_on_the_command_line_of_a_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    assert main(["run", str(recipe), "--ledger", SERVER, "--dry-run"]) == 0
    assert f'url = "{SERVER}"' in capsys.readouterr().out
    assert main(["run", "--resume", str(tmp_path), "--ledger", SERVER]) == 2
    assert "ledger would have no effect with --resume" in capsys.readouterr().err
