"""Facts read from a project's files, in the many formats of projects."""

import pytest

from etude.taskgen.failures import InstallError, NoTestsError, SourceError
from etude.taskgen.installs import attempts, missing_modules
from etude.taskgen.projects import read_project

TEST = "def test_a(): pass\n"


def test_a_src_layout_with_pyproject() -> None:
    project = read_project(
        {
            "pyproject.toml": """
[project]
name = "my-pkg"
version = "1.2"
dependencies = ["six>=1"]
optional-dependencies.tests = ["pytest>=7", "freezegun", "pytest-cov"]
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["--cov=my_pkg", "--import-mode=importlib", "-n auto"]
""",
            "src/my_pkg/__init__.py": "",
            "src/my_pkg/a.py": "",
            "src/other/__init__.py": "",
            "tests/test_a.py": TEST,
        }
    )
    assert (project.name, project.version, project.root, project.sources) == ("my-pkg", "1.2", "src", ("src/my_pkg",))
    assert (project.tests, project.requirements) == (("tests",), ("six>=1",))
    assert project.test_requirements == ("pytest>=7", "freezegun")
    assert project.options == ("--rootdir=.", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
    assert project.module("src/my_pkg/a.py") == "my_pkg.a"
    assert project.module("src/my_pkg/__init__.py") == "my_pkg"
    assert project.is_source("src/my_pkg/a.py")
    assert not project.is_source("src/my_pkg/tests/test_x.py")
    assert not project.is_source("tests/test_a.py")


def test_a_flat_layout_with_setup_py_and_a_source_distribution_s_record() -> None:
    project = read_project(
        {
            "PKG-INFO": "Metadata-Version: 2.1\nName: thing\nVersion: 2.0\nRequires-Dist: attrs\n"
            "Requires-Dist: mock; extra == 'test'\nRequires-Dist: sphinx; extra == 'docs'\n",
            "setup.py": "from setuptools import setup\nsetup(name='x', install_requires=['nope'])\n",
            "thing.py": "",
            "conftest.py": "",
            "docs/conf.py": "",
            "test_thing.py": TEST,
        }
    )
    assert (project.name, project.version, project.sources) == ("thing", "2.0", ("thing.py",))
    assert (project.requirements, project.test_requirements) == (("attrs",), ("mock",))
    assert project.tests == ("test_thing.py",)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"setup.py": "setup(install_requires=['a'], tests_require=['b'])"}, (("a",), ("b",))),
        (
            {"setup.cfg": "[options]\ninstall_requires =\n  a>1\n[options.extras_require]\ntest =\n  b\n  tox\n"},
            (("a>1",), ("b",)),
        ),
        ({"tox.ini": "[testenv]\ndeps =\n  pytest\n  py311: c\n  b  # why\n  -r x.txt\n"}, ((), ("pytest", "b"))),
        (
            {"requirements/tests.txt": "b==1 --hash=sha256:0\n# no\n-e .\npytest ; python_version > '3'\n"},
            ((), ("b==1", "pytest ; python_version > '3'")),
        ),
        ({"pyproject.toml": "[dependency-groups]\ntest = ['b', {include-group = 'x'}]\n"}, ((), ("b",))),
    ],
)
def test_where_requirements_are_found(files: dict[str, str], expected: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    project = read_project({**files, "pkg/__init__.py": "", "tests/test_a.py": TEST})
    assert (project.requirements, project.test_requirements) == expected


def test_tests_inside_of_the_package_are_no_sources() -> None:
    project = read_project({"pkg/__init__.py": "", "pkg/a.py": "", "pkg/tests/test_a.py": TEST})
    assert project.tests == ("pkg/tests",)
    assert project.is_source("pkg/a.py")
    assert not project.is_source("pkg/tests/test_a.py")


@pytest.mark.parametrize(
    ("path", "tests"),
    [("test.py", ("test.py",)), ("pkg/tests/tests.py", ("pkg/tests", "pkg/tests/tests.py")), ("pkg/tests.py", ())],
)
def test_all_tests_in_one_module_are_run_by_its_name_where_it_can_be_nothing_else(
    path: str, tests: tuple[str, ...]
) -> None:
    files = {"pkg/__init__.py": "", path: TEST, **({} if tests else {"test_pkg.py": TEST})}
    project = read_project(files)
    assert project.tests == (tests or ("test_pkg.py",))
    assert project.is_source(path) is not bool(tests)
    assert project.sources == ("pkg",)


def test_what_is_no_project_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match="no Python package among 2 files"):
        read_project({"main.go": "package main", "README.md": ""})
    with pytest.raises(NoTestsError, match="no file is called test_"):
        read_project({"pkg/__init__.py": "", "pkg/a.py": ""})
    with pytest.raises(SourceError, match=r"pyproject\.toml is not TOML"):
        read_project({"pyproject.toml": "[project", "pkg/__init__.py": ""})


@pytest.mark.parametrize(("stated", "message"), [('"2.0"', "2.0"), ("2.0", "2.0"), ('"../2"', "0"), ("[1]", "0")])
def test_a_version_is_a_text_that_can_name_a_folder(stated: str, message: str) -> None:
    settings = f'[project]\nname = "pkg"\nversion = {stated}\n'
    files = {"pyproject.toml": settings, "pkg/__init__.py": "", "tests/test_a.py": TEST}
    assert read_project(files).version == message


def test_attempts_let_go_of_versions_first_then_of_what_tests_want() -> None:
    project = read_project(
        {"setup.py": "setup(tests_require=['b==1'])", "pkg/__init__.py": "", "tests/test_a.py": TEST}
    )
    assert attempts(project) == (("b==1", "pytest"), ("b", "pytest"), ("pytest",))


def test_what_is_missing_is_read_off_the_errors() -> None:
    output = "ModuleNotFoundError: No module named 'yaml'\nNo module named 'six.moves'\nfixture 'mocker' not found"
    assert missing_modules(output, ["six>=1"]) == ("PyYAML", "pytest-mock")


@pytest.mark.parametrize(
    "files",
    [
        {"setup.py": "setup(install_requires=['evil @ https://x.example/evil.tar.gz'])"},
        {"setup.py": "setup(tests_require=['git+https://x.example/evil.git'])"},
        {"setup.cfg": "[options.extras_require]\ntest =\n  evil@git+https://x.example/evil.git\n"},
        {"requirements/tests.txt": "https://x.example/evil-1-py3-none-any.whl\n"},
        {"pyproject.toml": "[project]\nname = 'pkg'\ndependencies = ['./evil']\n"},
        {"pyproject.toml": "[dependency-groups]\ntest = ['evil @ file:///evil']\n"},
        {"PKG-INFO": "Name: pkg\nRequires-Dist: evil @ https://x.example/evil.zip ; extra == 'test'\n"},
    ],
)
def test_requirements_that_are_no_names_with_versions_are_not_tried(files: dict[str, str]) -> None:
    """Nor is another thing tried that has the name in an index."""
    project = read_project({**files, "pkg/__init__.py": "", "tests/test_a.py": TEST})
    with pytest.raises(InstallError, match=r"requirement '.*evil.*' cannot be installed here: .*; write NAME"):
        attempts(project)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "..", "a/b", "-a", "a-", "über", "a b"])
@pytest.mark.parametrize("place", ["PKG-INFO", "pyproject.toml", "setup.cfg", "setup.py"])
def test_a_name_that_would_choose_a_path_is_refused(name: str, place: str) -> None:
    """The folder that a build writes is called by it."""
    output = {
        "PKG-INFO": f"Name: {name}\n",
        "pyproject.toml": f'[project]\nname = "{name}"\n',
        "setup.cfg": f"[metadata]\nname = {name}\n",
        "setup.py": f"setup(name='{name}')",
    }
    with pytest.raises(SourceError, match="is not a valid project name: write letters"):
        read_project({place: output[place], "pkg/__init__.py": "", "tests/test_a.py": TEST})


@pytest.mark.parametrize("name", ["a", "A-b_c.d", "zope.interface", "7zip"])
def test_a_name_of_an_index_is_taken(name: str) -> None:
    files = {"setup.py": f"setup(name='{name}')", "pkg/__init__.py": "", "tests/test_a.py": TEST}
    assert read_project(files).name == name


def test_a_package_that_has_no_name_gives_its_own() -> None:
    assert read_project({"_pkg/__init__.py": "", "tests/test_a.py": TEST}).name == "pkg"
    with pytest.raises(SourceError, match="'größe' is not a valid project name"):
        read_project({"größe/__init__.py": "", "tests/test_a.py": TEST})
    with pytest.raises(SourceError, match="5 is not a valid project name"):
        read_project({"pyproject.toml": "[project]\nname = 5\n", "pkg/__init__.py": "", "tests/test_a.py": TEST})
