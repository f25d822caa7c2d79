"""Repositories from folders, archives and git; nothing leaves the folder, and other inputs are named in the error."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from etude.taskgen.failures import SourceError
from etude.taskgen.scrubbing import commit_all
from etude.taskgen.sources import TEXT_BYTES, fetch, read_texts


def project(folder: Path) -> Path:
    (folder / "pkg" / "__pycache__").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("x = 'ä'\n")
    (folder / "pkg" / "data.bin").write_bytes(b"\xff\xfe")
    (folder / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"x")
    (folder / "PKG-INFO").write_text("Name: pkg\n")
    return folder


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".zip"])
def test_an_archive_with_one_folder_at_its_top(tmp_path: Path, suffix: str) -> None:
    source, archive = project(tmp_path / "pkg-1"), tmp_path / f"pkg-1{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for file in source.rglob("*"):
                zipped.write(file, file.relative_to(tmp_path))
    else:
        with tarfile.open(archive, "w:gz" if suffix == ".tar.gz" else "w:xz") as packed:
            packed.add(source, "pkg-1")
    texts = read_texts(fetch(str(archive), tmp_path / "out"))
    assert texts == {"pkg/__init__.py": "x = 'ä'\n", "PKG-INFO": "Name: pkg\n"}


def test_a_folder_is_copied_without_leftovers_and_a_repository_is_cloned(tmp_path: Path) -> None:
    source = project(tmp_path / "pkg")
    assert "pkg/__init__.py" in read_texts(fetch(str(source), tmp_path / "copy"))
    commit_all(source)
    tree = fetch(f"file://{source}", tmp_path / "clone")
    assert "pkg/__init__.py" in read_texts(tree)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_record_is_read_only_if_it_is_a_file_of_a_source_s_size(tmp_path: Path, is_large: bool) -> None:
    """A repository may hold a link to a file of this machine, whose first lines would be in a log or a task."""
    (tmp_path / "secret").write_text("Name: secret\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").write_text("a = 1\n")
    if is_large:
        (tmp_path / "tree" / "PKG-INFO").write_bytes(b"Name: a\n" + b" " * TEXT_BYTES)
    else:
        (tmp_path / "tree" / "PKG-INFO").symlink_to(tmp_path / "secret")
    assert read_texts(tmp_path / "tree") == {"a.py": "a = 1\n"}


def test_a_link_of_a_cloned_repository_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("Name: secret\n")
    source = project(tmp_path / "pkg")
    (source / "PKG-INFO").unlink()
    (source / "PKG-INFO").symlink_to(tmp_path / "secret")
    commit_all(source)
    tree = fetch(f"file://{source}", tmp_path / "clone")
    assert (tree / "PKG-INFO").is_symlink()
    assert "PKG-INFO" not in read_texts(tree)


def test_an_archive_cannot_leave_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo("../outside.py")
        member.size = 1
        packed.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(SourceError, match=r"bad\.tar\.gz cannot be unpacked"):
        fetch(str(archive), tmp_path / "out")
    assert not (tmp_path / "outside.py").exists()


@pytest.mark.parametrize(
    ("reference", "output"),
    [
        ("no/such/thing", "is not a folder, git URL or archive"),
        ("pypi:toolz", "is not pinned"),
        ("pypi:toolz==1; rm -rf /", "is not pinned"),
        ("file:///no/such/repository", "git clone"),
    ],
)
def test_what_is_no_repository_is_named(tmp_path: Path, reference: str, output: str) -> None:
    with pytest.raises(SourceError, match=output):
        fetch(reference, tmp_path / "out")
