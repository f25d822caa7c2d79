"""Sets of files in storage: read back whole and by digest, and stored names are not trusted."""

import json
import os
from pathlib import Path

import pytest

from etude.errors import DamagedError, RunFolderError
from etude.objects import Objects, ObjectStore
from etude.run import stored_files
from etude.run.stored_files import FileSet, StoredFile, StoredFiles, stored_file

FILES = {"run.toml": b"name = 'x'\n", "model/model.safetensors": bytes(range(256)) * 10, "model/empty": b""}


def send(stored: StoredFiles, number: int, folder: Path) -> FileSet:
    files = {path: stored_file(folder / path) for path in FILES}
    for path, file in files.items():
        descriptor = os.open(folder / path, os.O_RDONLY)
        stored.send(descriptor, file)
        os.close(descriptor)
    assert stored.put(number, files)
    return files


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored_files, "PART_BYTES", 1000)
    for path, data in FILES.items():
        file = tmp_path / "source" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "source"


def fetch(stored: StoredFiles, number: int, folder: Path) -> None:
    for path, file in stored.read(number).items():
        stored.fetch(path, file, folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_set_comes_back_in_parts_and_goes_with_what_no_other_has(source: Path, tmp_path: Path) -> None:
    store = ObjectStore("memory://")
    stored = StoredFiles(store, "files")
    send(stored, 1, source)
    fetch(stored, 1, tmp_path / "target")
    assert contents(tmp_path / "target") == FILES
    (source / "run.toml").write_bytes(b"name = 'y'\n")
    files = send(stored, 2, source)
    assert stored.put(2, files)  # an answer that was lost
    assert not stored.put(2, {})
    stored.remove([1])
    assert stored.numbers() == [2]
    assert len(store.list("parts")) == 1 + 3
    fetch(stored, 2, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_a_missing_or_damaged_object_is_named_and_leaves_no_file(source: Path, tmp_path: Path, damage: str) -> None:
    store = ObjectStore("memory://")
    stored = StoredFiles(store, "files")
    file = send(stored, 1, source)["model/model.safetensors"]
    data = store.get(file.key(1))
    assert data is not None
    store.delete(file.key(1))
    if damage != "missing":
        store.put_if_absent(file.key(1), data[:-1] + (b"\0" if damage == "flipped" else b""))
    with pytest.raises(DamagedError, match=rf"{file.sha256}.*model/model.safetensors.*restore it from a copy"):
        fetch(stored, 1, tmp_path / "target")
    assert "model/model.safetensors" not in contents(tmp_path / "target")
    assert not any("model.safetensors" in path for path in contents(tmp_path / "target"))


def put_manifest(store: Objects, files: object) -> None:
    store.put_if_absent("manifests/00000001.json", json.dumps({"files": files}).encode())


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", ".", "", "a\\..\\x", "./x", "a/", "a\0b"])
def test_a_path_out_of_the_folder_is_refused(path: str) -> None:
    store = ObjectStore("memory://")
    put_manifest(store, {path: {"sha256": "0" * 64, "size_bytes": 1}})
    with pytest.raises(DamagedError, match=r"manifests/00000001.json cannot be read: the path .* the folder"):
        StoredFiles(store, "files").read(1)


@pytest.mark.parametrize(
    "file",
    [
        {"sha256": "../../x", "size_bytes": 1},
        {"sha256": "0" * 64, "size_bytes": -1},
        {"sha256": "0" * 64, "size_bytes": True},
        {"sha256": "0" * 64, "size_bytes": 1 << 60},
        {"sha256": "0" * 64},
        {"sha256": 3, "size_bytes": 1},
        [],
        "x",
    ],
)
def test_what_is_no_file_is_refused(file: object) -> None:
    store = ObjectStore("memory://")
    put_manifest(store, {"x": file})
    with pytest.raises(DamagedError, match=r"manifests/00000001.json cannot be read"):
        StoredFiles(store, "files").read(1)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"files": 3}', b"[" * 5000])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    store = ObjectStore("memory://")
    store.put_if_absent("manifests/00000001.json", data)
    with pytest.raises(DamagedError, match=r"manifests/00000001.json cannot be read"):
        StoredFiles(store, "files").read(1)


def test_a_size_that_no_disk_has_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="make room"):
        StoredFiles(ObjectStore("memory://"), "files").fetch(
            "x", StoredFile(sha256="0" * 64, size_bytes=1 << 50), tmp_path
        )
    assert not list(tmp_path.iterdir())


def test_with_a_key_only_what_was_signed_with_it_for_this_place_and_number_is_read(source: Path) -> None:
    store = ObjectStore("memory://")
    signed = StoredFiles(store, "files", b"secret")
    files = send(signed, 1, source)
    assert signed.read(1) == files
    manifest = store.get("manifests/00000001.json")
    assert manifest is not None
    store.put_if_absent("manifests/00000002.json", manifest)
    StoredFiles(store, "files").put(3, files)
    for reader, number in (
        (signed, 2),
        (signed, 3),
        (StoredFiles(store, "checkpoints", b"secret"), 1),
        (StoredFiles(store, "files", b"other"), 1),
    ):
        with pytest.raises(DamagedError, match="is not signed with this key"):
            reader.read(number)
