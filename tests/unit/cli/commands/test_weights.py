"""``etude weights``: its views of a store, and exports from it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from rich.console import Console

from etude.cli.actions.weight_store import log_of, versions_table
from etude.cli.main import main
from etude.config.loading import parse_config
from etude.run.folder import RunFolder
from etude.run.weight_log import KEY_VARIABLE, open_log, open_store
from etude.types import Json
from etude.weights.digest import state_digest
from etude.weights.interop.checkpoint import read_checkpoint
from etude.weights.interop.version_folder import read_version
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from synthetic_updates import synthetic_version

Etude: TypeAlias = Callable[..., str]
VERSIONS = 6


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    with Publisher(open_store(url)) as publisher:
        for version in range(VERSIONS):
            publisher.publish(synthetic_version(version), version=version, step=version, recipe="études").result()
        publisher.settle()
    return url


@pytest.fixture
def log(store: str) -> WeightLog:
    return log_of(store)


@pytest.fixture
def etude(store: str, capsys: pytest.CaptureFixture[str]) -> Etude:
    """Run ``etude weights COMMAND STORE …``; returns its output, after the exit status if that is not 0."""

    def run(command: str, *arguments: object) -> str:
        status = main(["weights", command, store, *map(str, arguments)])
        printed = capsys.readouterr()
        return printed.out if status == 0 else f"{status}: {printed.out}{printed.err}"

    return run


def packs(store: str) -> list[Path]:
    return sorted((Path(store) / "packs").iterdir(), key=lambda pack: pack.stat().st_size)


@pytest.mark.parametrize("width", [60, 200])
def test_versions_are_listed_with_their_lineage_and_links(log: WeightLog, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(versions_table(log))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "0 → 4" in text and (width < 200 or text.count("études") == VERSIONS)
    assert all(record.digest[:12] in text for version in range(VERSIONS) if (record := log.read(version)))


def test_a_sound_store_is_proven_and_needs_no_repair(etude: Etude) -> None:
    assert etude("verify").count("sound") == 1
    assert etude("verify", "--all").count("sound") == VERSIONS + 2
    assert "nothing is broken" in etude("repair")


def test_damage_is_named_fixed_from_a_mirror_and_gone(etude: Etude, store: str, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    assert f"version {VERSIONS - 1}" in etude("relay", mirror, "--once")
    victim = packs(store)[-1]
    victim.write_bytes(bytes(victim.stat().st_size))
    damaged = etude("verify")
    assert damaged.startswith("2: ") and "weights repair" in damaged and victim.name in damaged
    etude("repair", "--mirror", mirror)
    assert "sound" in etude("verify")
    assert pull(log_of(store)).digest == state_digest(synthetic_version(VERSIONS - 1))


def test_a_version_becomes_safetensors(etude: Etude, tmp_path: Path) -> None:
    assert "version 3" in etude("pull", tmp_path / "out", "--version", 3)
    assert state_digest(read_checkpoint(tmp_path / "out")) == state_digest(synthetic_version(3))
    assert "not empty" in etude("pull", tmp_path / "out", "--version", 3)


def test_a_folder_of_versions_is_begun_and_extended(etude: Etude, tmp_path: Path) -> None:
    root = tmp_path / "versions"
    root.mkdir()
    etude("pull", root, "--versions", "--version", 2)
    etude("pull", root, "--versions")
    base = read_checkpoint(root / "weight_v000002")
    assert state_digest(base) == state_digest(synthetic_version(2))
    newest = read_version(root, VERSIONS - 1, base=base, at=2)
    assert state_digest(newest) == state_digest(synthetic_version(VERSIONS - 1))


def test_two_versions_are_compared(etude: Etude, log: WeightLog) -> None:
    assert "0 of" in etude("diff", 1, 1)
    first, last = pull(log, 1).state, pull(log, 4).state
    changed = sum(int((first[name].numbers != last[name].numbers).sum()) for name in first)
    assert f"{changed:,} of" in etude("diff", 1, 4)
    assert all(name in etude("diff", 1, 4, "--all") for name in first)


def test_a_way_back_is_made_once(etude: Etude, log: WeightLog) -> None:
    etude("invert", 5, 4)
    assert any((link.source, link.target) == (5, 4) for link in log.links())
    assert "one already" in etude("invert", 5, 4)
    assert "is not a way back" in etude("invert", 4, 5)


def test_collecting_says_what_it_would_do(etude: Etude, log: WeightLog) -> None:
    assert "would remove" in etude("gc", "--keep", 0, "--grace-s", 0, "--dry-run")
    assert log.versions() == list(range(VERSIONS))


@pytest.mark.parametrize(("loss", "oldest"), [({}, 4), ({"reference_beta": 0.1, "reference_version": 3}, 2)])
def test_collecting_in_a_run_keeps_what_its_trainer_is_held_to(tmp_path: Path, loss: Json, oldest: int) -> None:
    folder = RunFolder.create(tmp_path / "run", parse_config({"loss": loss}, source="test"))
    with Publisher(open_log(folder), PublishOptions(anchor_every=2)) as publisher:
        for version in range(VERSIONS):
            publisher.publish(synthetic_version(version), version=version, step=version).result()
            publisher.settle()
    assert main(["weights", "gc", str(folder.path), "--keep", "0", "--grace-s", "0"]) == 0
    assert open_log(folder).versions()[0] == oldest
    if oldest < 4:
        assert pull(open_log(folder), 3).digest == state_digest(synthetic_version(3))


def test_a_version_that_is_not_there_is_refused(etude: Etude, tmp_path: Path) -> None:
    assert f"the newest is {VERSIONS - 1}" in etude("pull", tmp_path / "other", "--version", 99)
    assert str(VERSIONS - 1) in etude("ls")


@pytest.mark.parametrize("action", ["ls", "verify", "gc", "pull"])
def test_what_is_no_store_is_refused_and_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nope"
    out = [str(tmp_path / "out")] * (action == "pull")
    assert main(["weights", action, str(missing), *out]) == 2
    assert f"{str(missing)!r} is neither a run folder nor a weight store" in capsys.readouterr().err
    assert main(["weights", action, missing.as_uri(), *out]) == 2
    assert list(tmp_path.iterdir()) == []


def test_unsigned_records_are_damage_to_who_has_a_key(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret of sixteen bytes or more")
    assert main(["weights", "verify", store]) == 2
    assert "not signed" in capsys.readouterr().out
