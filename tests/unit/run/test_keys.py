"""The run key: read from its file or the environment; derived keys reveal nothing about it."""

from pathlib import Path

import pytest

from etude.cli.commands.keys import derive
from etude.config.recipe import RunConfig
from etude.errors import RunFolderError
from etude.run.folder import RunFolder
from etude.run.keys import RUN_KEY_FILE, RUN_KEY_VARIABLE, KeyRole, derive_key


def test_roles_have_keys_of_their_own_that_every_machine_derives_alike() -> None:
    # HMAC-SHA256 as `printf engine | openssl dgst -sha256 -hmac key` has it: any language can derive them.
    assert derive_key("key", KeyRole.ENGINE) == "05e9323d6e381c0ceaf5c9b9ba9fdf37f0ad6f1bbed90142566acd4ea275b547"
    assert len({derive_key(key, role) for key in ("a", "b") for role in KeyRole}) == 2 * len(KeyRole)


def test_the_environment_counts_more_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    own = folder.key(KeyRole.ENGINE)
    monkeypatch.setenv(RUN_KEY_VARIABLE, "k" * 32)
    assert folder.key(KeyRole.ENGINE) == derive_key("k" * 32, KeyRole.ENGINE) != own
    (folder.path / RUN_KEY_FILE).unlink()
    assert folder.key(KeyRole.ENGINE) == derive_key("k" * 32, KeyRole.ENGINE)


def test_a_key_that_can_be_guessed_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    monkeypatch.setenv(RUN_KEY_VARIABLE, "hunter2")
    with pytest.raises(RunFolderError, match=r"ETUDE_RUN_KEY has 7 characters: .* at least 32") as error:
        folder.key(KeyRole.ADMIN)
    assert "hunter2" not in str(error.value)


def test_a_run_of_an_older_version_is_told_the_new_name_of_its_secret(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    (folder.path / RUN_KEY_FILE).rename(folder.path / "admin.key")
    with pytest.raises(RunFolderError, match=r"run\.key is missing, .*: mv .*admin\.key .*run\.key"):
        folder.key(KeyRole.ADMIN)
    (folder.path / "admin.key").unlink()
    with pytest.raises(RunFolderError, match="set ETUDE_RUN_KEY to the key of this run"):
        folder.key(KeyRole.ADMIN)


def test_a_person_can_print_the_key_of_a_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    derive(folder.path, "engine")
    assert capsys.readouterr().out == folder.key(KeyRole.ENGINE) + "\n"
