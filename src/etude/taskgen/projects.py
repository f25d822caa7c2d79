"""A Python project's packages, requirements and tests, read from its files.

Pure: texts in, a :class:`Project` out. No code of the project runs, so facts that need a run (requirements that
``setup.py`` computes) are missing here; the installer may find them (:mod:`~etude.taskgen.installer`).
"""

import ast
import configparser
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Any

from etude.taskgen.failures import NoTestsError, SourceError

NOT_PACKAGES = frozenset(
    {
        *("tests", "test", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench"),
        *("scripts", "tools", "dev", "ci", "requirements", "build", "dist", "bin", "perf", "changelog.d"),
    }
)
"""Folders beside a package that do not belong to it."""
NOT_MODULES = frozenset(
    {"setup.py", "conftest.py", "noxfile.py", "versioneer.py", "tasks.py", "fabfile.py", "prebuild.py"}
)
ONE_MODULE = frozenset({"test.py", "tests.py"})
"""Names of a module with all tests, beside a package or in a folder of tests; elsewhere the names are ambiguous."""
TEST_EXTRAS = ("test", "tests", "testing", "dev", "develop")
"""Names of extras and dependency groups for tests, the most likely first."""
REQUIREMENT_FILES = (
    *("requirements/tests.txt", "requirements/test.txt", "tests/requirements.txt", "requirements-test.txt"),
    *("requirements-tests.txt", "test-requirements.txt", "test_requirements.txt", "requirements_test.txt"),
    *("dev.requirements.txt", "requirements-dev.txt", "requirements/dev.txt"),
)
NOT_NEEDED = frozenset(
    {
        *("tox", "mypy", "ruff", "black", "flake8", "pylint", "pre-commit", "twine", "build", "wheel", "setuptools"),
        *("coverage", "pytest-cov", "codecov", "coveralls", "sphinx", "pyright", "isort", "nox", "bumpversion", "flit"),
        *(
            "pytest-xdist",
            "pytest-sugar",
            "pip-tools",
            "uv",
            "hatch",
            "poetry",
            "codacy-coverage",
            "detect-test-pollution",
        ),
        *(
            "pytest-benchmark",
            "pytest-codspeed",
            "pytest-randomly",
            "pytest-memray",
            "bump-my-version",
            "zest-releaser",
        ),
    }
)
"""Developer tools that tests do not need."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PROJECT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""Pattern of a project's name, which is also a folder's name, so it must not be a path."""
LICENCE_CHARACTERS = 80
"""Maximum characters of a licence's name; a longer text is the licence itself."""
KEPT_OPTIONS = ("--import-mode", "--asyncio-mode")
"""The project's own pytest options that determine if a test runs at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A Python project as described by its files."""

    name: str
    version: str
    root: str
    """Folder to add to Python's path, relative to the project: ``src``, ``lib`` or ``.``."""
    sources: tuple[str, ...]
    """Its packages and modules: folders and files, relative to the project."""
    tests: tuple[str, ...]
    """Files and folders with tests."""
    requirements: tuple[str, ...]
    """Its requirements, in pip's format."""
    test_requirements: tuple[str, ...]
    """Additional requirements of its tests."""
    options: tuple[str, ...]
    """Options of pytest."""
    licence: str = ""
    """Stated licence: an SPDX expression or a name."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Importable top-level names."""
        return tuple(PurePosixPath(path).stem for path in self.sources)

    def module(self, path: str) -> str:
        """The dotted name to import a file of the project."""
        inner = PurePosixPath(path).relative_to(self.root).with_suffix("")
        parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
        return ".".join(parts)

    def is_test(self, path: str) -> bool:
        """Return true if a file belongs to the tests."""
        place = PurePosixPath(path)
        inside = any(place == PurePosixPath(root) or PurePosixPath(root) in place.parents for root in self.tests)
        return (
            inside or is_test_file(path) or place.name == "conftest.py" or not {"test", "tests"}.isdisjoint(place.parts)
        )

    def is_source(self, path: str) -> bool:
        """Return true if a file belongs to the packages, but not to tests in them."""
        place = PurePosixPath(path)
        roots = [PurePosixPath(root) for root in self.sources]
        return any(place == root or root in place.parents for root in roots) and not self.is_test(path)


def read_project(files: Mapping[str, str]) -> Project:
    """Read a project from its texts, by path.

    Raises :class:`~etude.taskgen.failures.SourceError` if there is no package or its name is not valid on an index,
    and :class:`~etude.taskgen.failures.NoTestsError` if there is no test.
    """
    pyproject = _toml(files.get("pyproject.toml", ""))
    settings = _ini(files.get("setup.cfg", ""))
    info = HeaderParser().parsestr(files.get("PKG-INFO", ""))
    table = _table(pyproject, "project")
    stated = info.get("Name") or table.get("name") or settings.get("metadata", {}).get("name") or _setup_name(files)
    version = info.get("Version") or table.get("version") or settings.get("metadata", {}).get("version") or "0"
    name = _project_name(stated) if stated else ""
    root, sources = _sources(files, name)
    tests = _tests(files, pyproject, settings)
    return Project(
        name=name or _project_name(PurePosixPath(sources[0]).stem.strip("_")),
        version=str(version) if re.fullmatch(r"[A-Za-z0-9.+!_-]+", str(version)) else "0",
        root=root,
        sources=sources,
        tests=tests,
        requirements=tuple(_requirements(files, info.get_all("Requires-Dist") or [], table, settings)),
        test_requirements=tuple(_test_requirements(files, info.get_all("Requires-Dist") or [], pyproject, settings)),
        options=_options(pyproject, settings, files),
        licence=_licence(info, table),
    )


def is_test_file(path: str) -> bool:
    """Return true if pytest collects tests from a file of this name, perhaps only if the file itself is a target."""
    place = PurePosixPath(path)
    if place.name in ONE_MODULE:
        return place.parent.name in ("", "test", "tests")
    return place.name.endswith(".py") and (place.name.startswith("test_") or place.name.endswith("_test.py"))


def bare_name(requirement: str) -> str:
    """The normalised package name in a requirement."""
    match = NAME.match(requirement.strip())
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def _project_name(name: object) -> str:
    """The name of a project, stripped; an invalid one raises an error, since folders of tasks have this name."""
    if not isinstance(name, str) or not PROJECT_NAME.fullmatch(name.strip()):
        raise SourceError(
            f"{name!r} is not a valid project name: write letters, digits, '.', '-' and '_', the first and the last a "
            "letter or digit, as name in [project] of pyproject.toml (in PKG-INFO, where there is one)"
        )
    return name.strip()


def _licence(info: Message, table: Mapping[str, Any]) -> str:
    """The SPDX expression, else the classifier's name, else a short text."""
    classifiers = [line.rpartition(" :: ")[2] for line in info.get_all("Classifier") or () if "License ::" in line]
    stated = [info.get("License-Expression"), *classifiers, table.get("license"), info.get("License")]
    texts = (text.strip() for text in stated if isinstance(text, str))
    return next((text for text in texts if 0 < len(text) <= LICENCE_CHARACTERS and text != "UNKNOWN"), "")


def _sources(files: Mapping[str, str], name: str) -> tuple[str, tuple[str, ...]]:
    for root in ("src", "lib", "."):
        packages = sorted(_packages(files, root))
        if packages:
            module = name.replace("-", "_").replace(".", "_").lower()
            stems = {path: PurePosixPath(path).stem.lower() for path in packages}
            own = [path for path, stem in stems.items() if module and stem in (module, f"py{module}")]
            without = [path for path, stem in stems.items() if stem == module.removeprefix("python_")]
            return root, tuple(own or without or packages)
    raise SourceError(f"no Python package among {len(files)} files: expected a folder with __init__.py, or a module")


def _packages(files: Mapping[str, str], root: str) -> Iterator[str]:
    """Packages and modules directly below ``root``."""
    depth = 0 if root == "." else 1
    prefix = "" if root == "." else f"{root}/"
    for path in files:
        parts = path.split("/")
        if not path.startswith(prefix) or not path.endswith(".py"):
            continue
        if len(parts) == depth + 2 and parts[-1] == "__init__.py" and parts[depth] not in NOT_PACKAGES:
            yield "/".join(parts[:-1])
        elif (
            len(parts) == depth + 1
            and parts[-1] not in NOT_MODULES
            and not is_test_file(path)
            and depth + 1 == len(parts)
        ):
            yield path


def _tests(
    files: Mapping[str, str], pyproject: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Folders and files in which pytest collects tests."""
    named = _pytest_table(pyproject).get("testpaths") or settings.get("tool:pytest", {}).get("testpaths") or ""
    requested = _texts(named) if isinstance(named, list) else str(named).split()
    test_files = [path for path in files if is_test_file(path)]
    test_paths = [
        path
        for path in requested
        if any(file == path or file.startswith(f"{path.rstrip('/')}/") for file in test_files)
    ]
    if test_paths:
        return tuple(path.rstrip("/") for path in test_paths)
    if not test_files:
        raise NoTestsError(
            "no file is called test_*.py or *_test.py, nor tests.py beside the package or in a folder of tests: tasks "
            "need tests that pytest can run"
        )
    folders = {str(PurePosixPath(path).parent) for path in test_files}
    tops = {
        folder
        for folder in folders
        if not any(PurePosixPath(other) in PurePosixPath(folder).parents for other in folders)
    }
    unusual = {path for path in test_files if PurePosixPath(path).name in ONE_MODULE}
    if "." in folders:
        unusual.update(path for path in test_files if "/" not in path)
        return (*sorted(unusual), *sorted(folders - {"."}))
    return (*sorted(tops), *sorted(unusual))


def _requirements(
    files: Mapping[str, str], stated: Sequence[str], table: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    if stated:
        yield from (line for line in stated if "extra ==" not in line)
    elif "dependencies" in table:
        yield from _texts(table["dependencies"])
    elif "install_requires" in settings.get("options", {}):
        yield from _lines(settings["options"]["install_requires"])
    else:
        yield from _setup_list(files.get("setup.py", ""), "install_requires")


def _test_requirements(
    files: Mapping[str, str],
    stated: Sequence[str],
    pyproject: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """The requirements in the first place that lists any for tests, without tools that tests do not need."""
    extras = _table(_table(pyproject, "project"), "optional-dependencies")
    groups = _table(pyproject, "dependency-groups")
    places: list[list[str]] = []
    for extra in TEST_EXTRAS:
        required = re.compile(rf";?\s*(and\s+)?extra == ['\"]{extra}['\"]")
        places.append([required.sub("", line).rstrip("; ") for line in stated if required.search(line)])
        places += [_texts(extras.get(extra, [])), _texts(groups.get(extra, []))]
        places.append(_lines(settings.get("options.extras_require", {}).get(extra, "")))
    places += [_lines(files.get(path, "")) for path in REQUIREMENT_FILES]
    places += [_lines(_ini(files.get("tox.ini", "")).get("testenv", {}).get("deps", ""))]
    places += [_setup_list(files.get("setup.py", ""), "tests_require")]
    chosen = next((place for place in places if place), [])
    yield from (line for line in chosen if bare_name(line) and bare_name(line) not in NOT_NEEDED)


def _options(
    pyproject: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]], files: Mapping[str, str]
) -> tuple[str, ...]:
    """Options of pytest with few of the project's own: most need plug-ins or reports that no grader needs."""
    ini = _ini(files.get("pytest.ini", "")).get("pytest", {}) or _ini(files.get("tox.ini", "")).get("pytest", {})
    own = (
        _pytest_table(pyproject).get("addopts")
        or settings.get("tool:pytest", {}).get("addopts")
        or ini.get("addopts", "")
    )
    words = own if isinstance(own, list) else str(own).split()
    selected = [str(word) for word in words if str(word).startswith(KEPT_OPTIONS) and "=" in str(word)]
    return ("--rootdir=.", "-o", f"addopts={' '.join(selected)}", "-p", "no:cacheprovider")


def _pytest_table(pyproject: Mapping[str, Any]) -> Mapping[str, Any]:
    table = _table(_table(pyproject, "tool"), "pytest")
    return _table(table, "ini_options") if "ini_options" in table else table


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table of a name; empty if there is none or the value is not a table."""
    table = tree.get(name)
    return table if isinstance(table, dict) else {}


def _texts(lines: object) -> list[str]:
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []


def _lines(text: str) -> list[str]:
    """The requirements in a text, one per line, without options, comments, hashes and conditions of tox."""
    stripped = (re.split(r"\s#|\s--hash|\s\\", line.strip())[0].strip() for line in text.splitlines())
    return [line for line in stripped if NAME.match(line) and not re.match(r"[\w,{}!-]+:\s", line)]


def _toml(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SourceError(f"pyproject.toml is not TOML: {error}") from error


def _ini(text: str) -> Mapping[str, Mapping[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}  # tox.ini may have syntax that only tox understands
    return {section: {key: value or "" for key, value in parser.items(section)} for section in parser.sections()}


def _setup_call(text: str) -> Mapping[str, ast.expr]:
    """The keyword arguments with which ``setup.py`` calls ``setup``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "setup":
            return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return {}


def _setup_list(text: str, key: str) -> list[str]:
    value = _setup_call(text).get(key)
    items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _setup_name(files: Mapping[str, str]) -> str:
    name = _setup_call(files.get("setup.py", "")).get("name")
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
