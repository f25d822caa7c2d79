"""``etude weights``: what people see of a store, and what they can take out of it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from etude.cli.commands import weights
from etude.cli.main import main
from etude.config.loading import parse_config
from etude.errors import DamagedError, RunFolderError, UserError
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
    return weights.log_of(store)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def packs(store: str) -> list[Path]:
    return sorted((Path(store) / "packs").iterdir(), key=lambda pack: pack.stat().st_size)


def test_versions_are_listed_with_their_lineage_and_links(log: WeightLog, console: Console) -> None:
    weights.show_versions(log, console)
    text = shown(console)
    assert text.count("études") == VERSIONS
    assert "0 → 4" in text
    console.width = 60
    weights.show_versions(log, console)
    text = shown(console)[len(text) :]
    assert all(record.digest[:12] in text for version in range(VERSIONS) if (record := log.read(version)))


def test_a_sound_store_is_proven_and_needs_no_repair(log: WeightLog, console: Console) -> None:
    weights.verify_store(log, console)
    weights.repair_store(log, None, console)
    assert shown(console).count("sound") == VERSIONS + 1
    assert "nothing is broken" in shown(console)


def test_damage_is_named_fixed_from_a_mirror_and_gone(store: str, tmp_path: Path, console: Console) -> None:
    mirror = str(tmp_path / "mirror")
    weights.run_relay(weights.log_of(store), open_store(mirror), once=True, console=console)
    victim = packs(store)[-1]
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(DamagedError, match="weights repair"):
        weights.verify_store(weights.log_of(store), console)
    assert victim.name in shown(console)
    weights.repair_store(weights.log_of(store), mirror, console)
    weights.verify_store(weights.log_of(store), console)
    assert pull(weights.log_of(store)).digest == state_digest(synthetic_version(VERSIONS - 1))


def test_a_version_becomes_safetensors(log: WeightLog, tmp_path: Path, console: Console) -> None:
    weights.pull_store(log, tmp_path / "out", 3, console)
    assert state_digest(read_checkpoint(tmp_path / "out")) == state_digest(synthetic_version(3))
    with pytest.raises(RunFolderError, match="not empty"):
        weights.pull_store(log, tmp_path / "out", 3, console)


def test_a_folder_of_versions_is_begun_and_extended(log: WeightLog, tmp_path: Path, console: Console) -> None:
    root = tmp_path / "versions"
    root.mkdir()
    weights.extend_folder(log, root, 2, console)
    weights.extend_folder(log, root, None, console)
    base = read_checkpoint(root / "weight_v000002")
    assert state_digest(base) == state_digest(synthetic_version(2))
    newest = read_version(root, VERSIONS - 1, base=base, at=2)
    assert state_digest(newest) == state_digest(synthetic_version(VERSIONS - 1))


def test_two_versions_are_compared(log: WeightLog, console: Console) -> None:
    weights.compare_versions(log, 1, 1, console)
    assert "0 of" in shown(console)
    weights.compare_versions(log, 1, 4, console, most=1)
    assert f"and {len(synthetic_version(1)) - 1} more tensors" in shown(console)
    first, last = pull(log, 1).state, pull(log, 4).state
    changed = sum(int((first[name].numbers != last[name].numbers).sum()) for name in first)
    assert f"{changed:,} of" in shown(console)


def test_a_way_back_is_made_once(log: WeightLog, console: Console) -> None:
    weights.invert_link(log, 5, 4, console)
    assert any((link.source, link.target) == (5, 4) for link in log.links())
    with pytest.raises(UserError, match="one already"):
        weights.invert_link(log, 5, 4, console)
    with pytest.raises(UserError, match="does not lead back"):
        weights.invert_link(log, 4, 5, console)


def test_collecting_says_what_it_would_do(log: WeightLog, console: Console) -> None:
    weights.collect_store(log, keep=0, needed=(), grace_s=0.0, dry_run=True, console=console)
    assert "would remove" in shown(console)
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


def test_the_command_line_reaches_all_of_it(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["ls"], ["verify"], ["gc", "--dry-run"], ["diff", "1", "2"], ["invert", "3", "2"], ["repair"]):
        action, *rest = arguments
        assert main(["weights", action, store, *rest]) == 0, capsys.readouterr().err
    assert main(["weights", "pull", store, str(tmp_path / "out"), "--version", "2"]) == 0
    assert main(["weights", "relay", store, str(tmp_path / "region"), "--once"]) == 0
    assert main(["weights", "pull", store, str(tmp_path / "other"), "--version", "99"]) == 2
    assert "the newest is 5" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["ls", "verify", "gc", "pull"])
def test_what_is_no_store_is_refused_and_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nope"
    out = [str(tmp_path / "out")] * (action == "pull")
    assert main(["weights", action, str(missing), *out]) == 2
    assert f"{str(missing)!r} is no run folder and no weight store" in capsys.readouterr().err
    assert main(["weights", action, missing.as_uri(), *out]) == 2
    assert list(tmp_path.iterdir()) == []


def test_unsigned_records_are_damage_to_who_has_a_key(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret of sixteen bytes or more")
    assert main(["weights", "verify", store]) == 2
    assert "not signed" in capsys.readouterr().out
