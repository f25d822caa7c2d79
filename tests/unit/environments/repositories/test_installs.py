"""What is unpacked for a package, and what of it must not stay."""

from importlib.metadata import version
from pathlib import Path

import pytest

from etude.environments.repositories.failures import InstallError
from etude.environments.repositories.installs import (
    DATED_SINCE,
    SITE,
    Wants,
    environment,
    install,
    record_project,
    without_copies,
)
from etude.environments.repositories.projects import read_project
from etude.errors import ConfigError

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
        install(Wants(requirements=("nothing-like-it",), python="3.11"), tmp_path / "tree")
    assert "nothing-like-it" in caught.value.log


@pytest.mark.skipif(int(version("pip").partition(".")[0]) >= DATED_SINCE, reason="this pip can keep to a date")
def test_a_date_that_pip_cannot_keep_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="upgrade pip"):
        install(Wants(requirements=("six",), python="3.11", before="2024-01-01"), tmp_path / "tree")
