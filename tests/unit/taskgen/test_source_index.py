"""Source distributions of an index: listed and fetched as they are, checked, and nothing of them run."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from etude.taskgen.failures import SourceError
from etude.taskgen.history.sources import open_history
from etude.taskgen.sources import download, fetch, versions_of

BACKEND = """
import pathlib
pathlib.Path({mark!r}).write_text("was run")
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def release(index: Path, version: str, mark: Path) -> str:
    """Pack a release of ``tally``, whose build program leaves a mark, and have a page of an index name it."""
    page = index / "tally" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    archive = page.with_name(f"tally-{version}.tar.gz")
    texts = {"pyproject.toml": BUILD, "backend.py": BACKEND.format(mark=str(mark)), "PKG-INFO": "Name: tally\n"}
    with tarfile.open(archive, "w:gz") as packed:
        for path, text in {**texts, "tally.py": f"version = {version!r}\n"}.items():
            member = tarfile.TarInfo(f"tally-{version}/{path}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    line = f'<a href="{archive.name}#sha256={digest}" data-requires-python="&lt;3">{archive.name}</a>\n'
    page.write_text((page.read_text() if page.exists() else "<!DOCTYPE html>\n") + line)
    return digest


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with three releases of ``tally``, which were for a Python of another time."""
    folder = tmp_path / "index"
    for version in ("0.9", "1.10", "1.9"):
        release(folder, version, tmp_path / "mark")
    (folder / "tally" / "tally-2.0-py3-none-any.whl").write_bytes(b"a wheel is no source")
    for name, value in {"INDEX_URL": folder.as_uri(), "FIND_LINKS": "", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_releases_are_listed_and_fetched_and_their_build_program_is_not_run(index: Path, tmp_path: Path) -> None:
    assert versions_of("tally") == ["1.10", "1.9", "0.9"]
    history = open_history("pypi:tally", tmp_path / "archives")
    assert [change.candidate_id for change in history.changes(None)] == ["1.9..1.10", "0.9..1.9"]
    history.gather(["1.9", "1.10"])
    archives = {path.relative_to(tmp_path / "archives").as_posix() for path in (tmp_path / "archives").rglob("*.gz")}
    assert archives == {"tally/1.9/tally-1.9.tar.gz", "tally/1.10/tally-1.10.tar.gz"}
    assert (history.tree("1.9", tmp_path / "a") / "tally.py").read_text() == "version = '1.9'\n"
    assert (history.tree("0.9", tmp_path / "b") / "tally.py").read_text() == "version = '0.9'\n"  # fetched by itself
    assert (fetch("pypi:tally==1.10", tmp_path / "c") / "tally.py").exists()
    assert not (tmp_path / "mark").exists()


def test_a_release_that_is_not_there_is_named_and_the_others_are_fetched(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"source of tally 3\.0 could not be fetched: .*no index has its source"):
        download("tally", ["3.0", "1.9"], tmp_path / "archives")
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ["1.9"]
    with pytest.raises(SourceError, match="no index of pip's has a source distribution of 'nothing-like-it'"):
        versions_of("nothing-like-it")


def test_an_archive_that_is_another_one_than_the_index_says_is_refused(index: Path, tmp_path: Path) -> None:
    (index / "tally" / "tally-1.9.tar.gz").write_bytes(b"another one")
    with pytest.raises(SourceError, match=r"tally-1\.9\.tar\.gz has another sha256 than the index says"):
        download("tally", ["1.9"], tmp_path / "archives")
    assert not (tmp_path / "archives" / "1.9").exists()
