"""Unpacking a package: what is installed, and what is left out; no code of it runs."""

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.taskgen.failures import InstallError
from etude.taskgen.indexes import pip_environment
from etude.taskgen.installs import DATED_SINCE, SITE, Requirements, environment, install, record_project, without_copies
from etude.taskgen.projects import read_project

TEXTS = {
    "src/my_pkg/__init__.py": "",
    "tests/test_a.py": "def test_a(): pass\n",
    "pyproject.toml": '[project]\nname = "My-Pkg"\nversion = "1.0"\n',
    "my_pkg.egg-info/entry_points.txt": "[console_scripts]\nmine = my_pkg:main\n",
}


def test_copies_of_the_project_are_taken_out_and_a_record_is_put_in(tmp_path: Path) -> None:
    site = tmp_path / SITE.strip("/")
    for path in ("my_pkg/a.py", "my_pkg-0.9.dist-info/METADATA", "my_pkg_extras/a.py", "six.py", "my_pkg.py"):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text("")
    project = read_project(TEXTS)
    without_copies(tmp_path, project)
    assert sorted(entry.name for entry in site.iterdir()) == ["my_pkg_extras", "six.py"]
    record_project(tmp_path, project, TEXTS)
    record = site / "My_Pkg-1.0.dist-info"
    assert "Name: My-Pkg\nVersion: 1.0\n" in (record / "METADATA").read_text()
    assert "mine = my_pkg:main" in (record / "entry_points.txt").read_text()


def test_the_project_is_found_before_its_dependencies() -> None:
    assert environment(read_project(TEXTS))["PYTHONPATH"] == f"/work/src:{SITE}"


def test_what_cannot_be_had_is_named_with_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InstallError, match=r"pip cannot install \['nothing-like-it'\] from wheels") as caught:
        install(Requirements(requirements=("nothing-like-it",), python="3.11"), tmp_path / "tree")
    assert "nothing-like-it" in caught.value.log


BACKEND = """
import pathlib
pathlib.Path({mark!r}).write_text("was run")
def get_requires_for_build_wheel(config_settings=None): return []
def prepare_metadata_for_build_wheel(folder, config_settings=None): raise SystemExit("no metadata")
def build_wheel(folder, config_settings=None, metadata_directory=None): raise SystemExit("no wheel")
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def wheel(folder: Path, name: str, needs: str = "") -> Path:
    """A wheel of one module."""
    record = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{record}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{record}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = io.StringIO()
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        csv.writer(rows).writerow([path, f"sha256={digest}", len(text)])
    csv.writer(rows).writerow([f"{record}/RECORD", "", ""])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as packed:
        for path, text in {**files, f"{record}/RECORD": rows.getvalue()}.items():
            packed.writestr(path, text)
    return folder / f"{name}-1.0-py3-none-any.whl"


def evil_sources(folder: Path, mark: Path) -> tuple[Path, Path]:
    """A source distribution whose build program leaves a mark, packed in two ways."""
    texts = {"pyproject.toml": BUILD, "backend.py": BACKEND.format(mark=str(mark)), "PKG-INFO": "Name: evil\n"}
    folder.mkdir(parents=True)
    with (
        tarfile.open(folder / "evil-1.0.tar.gz", "w:gz") as packed,
        zipfile.ZipFile(folder / "evil.zip", "w") as zipped,
    ):
        for path, text in texts.items():
            member = tarfile.TarInfo(f"evil-1.0/{path}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
            zipped.writestr(f"evil-1.0/{path}", text)
    return folder / "evil-1.0.tar.gz", folder / "evil.zip"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip looks for wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    return wheels


def test_wheels_of_an_index_and_what_they_need_are_unpacked(tmp_path: Path, offline: Path) -> None:
    wheel(offline, "one", needs="two>=1")
    wheel(offline, "two")
    pins = install(Requirements(requirements=("One >=1, <2 ; python_version > '3'",), python="3.11"), tmp_path / "tree")
    assert pins == ("one==1.0", "two==1.0")


@pytest.mark.parametrize(
    "line",
    [
        *("evil @ file://{tar}", "{tar}", "file://{tar}", "git+file://{folder}", "evil===/../../../../../../..{zip}"),
        *("{folder}", "-e {folder}", "evil @ git+file://{folder}", "--requirement={folder}/x.txt"),
    ],
)
def test_what_is_no_name_with_versions_is_refused_and_nothing_of_it_run(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    mark = tmp_path / "was-run"
    tar, zipped = evil_sources(tmp_path / "evil", mark)
    (tmp_path / "evil" / "pyproject.toml").write_text(BUILD)
    (tmp_path / "evil" / "backend.py").write_text(BACKEND.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    required = line.format(tar=tar, zip=zipped, folder=tmp_path / "evil")
    with pytest.raises(InstallError) as caught:
        install(Requirements(requirements=(required,), python="3.11"), tmp_path / "tree")
    assert not mark.exists()
    assert repr(required) in str(caught.value)
    assert "write NAME or NAME==VERSION" in str(caught.value)


def test_a_file_beside_us_is_no_requirement(tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pip, a name such as `evil.zip` is a file of the folder that it runs in, if there is one."""
    evil_sources(tmp_path / "evil", tmp_path / "was-run")
    monkeypatch.chdir(tmp_path / "evil")
    for number, line in enumerate(("evil.zip", "evil.zip[x]")):
        with pytest.raises(InstallError):
            install(Requirements(requirements=(line,), python="3.11"), tmp_path / f"tree{number}")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("reference", ["file://{tar}", "git+https://127.0.0.1:1/evil.git", "file://{zip}"])
def test_a_wheel_cannot_have_sources_built(tmp_path: Path, offline: Path, reference: str) -> None:
    mark = tmp_path / "was-run"
    tar, zipped = evil_sources(tmp_path / "evil", mark)
    wheel(offline, "nice", needs=f"evil @ {reference.format(tar=tar, zip=zipped)}")
    with pytest.raises(InstallError, match=r"wheels: .*evil.*from nice.* is not a wheel of an index .*: write NAME"):
        install(Requirements(requirements=("nice",), python="3.11"), tmp_path / "tree")
    assert not mark.exists()


def test_a_wheel_cannot_name_a_wheel_that_is_not_of_an_index(tmp_path: Path, offline: Path) -> None:
    other = wheel(tmp_path / "elsewhere", "other")
    wheel(offline, "nice", needs=f"other @ file://{other}")
    with pytest.raises(InstallError, match=r"'other' comes from file://.*other-1\.0-py3-none-any\.whl, no index"):
        install(Requirements(requirements=("nice",), python="3.11"), tmp_path / "tree")
    assert not (tmp_path / "tree" / SITE.strip("/")).exists()


def test_pip_gets_where_to_look_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"PIP_INDEX_URL": "https://x", "HTTPS_PROXY": "p", "no_proxy": "q", "SSL_CERT_FILE": "c", "TMPDIR": "/t"}
    for name, value in {**message, "JUDGE_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k", "PYTHONPATH": "/evil"}.items():
        monkeypatch.setenv(name, value)
    seen = pip_environment()
    assert message.items() <= seen.items()
    assert not {"JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH"} & set(seen)


@pytest.mark.skipif(int(version("pip").partition(".")[0]) >= DATED_SINCE, reason="this pip can keep to a date")
def test_a_date_that_pip_cannot_keep_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="upgrade pip"):
        install(Requirements(requirements=("six",), python="3.11", before="2024-01-01"), tmp_path / "tree")
