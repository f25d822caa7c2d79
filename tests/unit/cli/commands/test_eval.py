"""`etude eval --against`: which version of which run is meant."""

from pathlib import Path

import pytest

from etude.cli.actions.evaluate_run import parse_against
from etude.cli.commands.eval import numbers
from etude.config.loading import default_recipe
from etude.errors import ConfigError, RunFolderError
from etude.run.folder import RunFolder


def test_a_version_is_of_this_run_and_a_folder_another_one(tmp_path: Path) -> None:
    mine, other = (RunFolder.create(tmp_path / name, default_recipe()) for name in ("mine", "other:3"))
    assert parse_against("7", mine) == (mine, 7)
    assert parse_against(f"{tmp_path}/other:3:12", mine) == (other, 12)
    assert parse_against(f"{tmp_path}/mine", other) == (mine, None)
    with pytest.raises(ConfigError, match="--against 'nowhere:2': expected a version of this run"):
        parse_against("nowhere:2", mine)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="not a run folder"):
        parse_against(f"{tmp_path}/empty:2", mine)


def test_lists_of_numbers_are_read() -> None:
    assert numbers("--k", "1,4") == [1, 4]
    with pytest.raises(ConfigError, match="--k '1,x': expected whole numbers"):
        numbers("--k", "1,x")
