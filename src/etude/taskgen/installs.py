"""Installation of a package's and its tests' requirements, as a layer of an image.

    requirements ──pip, wheels only──▶ /opt/site of a layer          the project itself stays in the working folder

A wheel is unpacked, never run: no program of a dependency starts on this machine, and a requirement without a wheel is
rejected (:mod:`~etude.taskgen.indexes` ensures both).
Python finds the project through ``PYTHONPATH``; it is not installed, so that no second copy exists. A record of its
name and version is written for programs that look it up. Owns the layer, not the store.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType

from etude.errors import ConfigError
from etude.sandbox_spec import WORKDIR
from etude.taskgen.failures import InstallError
from etude.taskgen.indexes import index_requirements, install_wheels
from etude.taskgen.projects import Project, bare_name

SITE = "/opt/site"
"""Folder of the dependencies in the image."""
RUNNER = "pytest"
DATED_SINCE = 26
"""First major version of pip that can exclude packages uploaded after a date."""
IMPORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "yaml": "PyYAML",
        "dateutil": "python-dateutil",
        "bs4": "beautifulsoup4",
        "attr": "attrs",
        "PIL": "pillow",
        "cv2": "opencv-python-headless",
        "sklearn": "scikit-learn",
        "pkg_resources": "setuptools<80",
        "OpenSSL": "pyOpenSSL",
        "jwt": "PyJWT",
        "git": "GitPython",
        "toml": "toml",
        "mock": "mock",
        "nose": "pynose",
    }
)
"""Imported name → the requirement that provides it."""
MISSING = re.compile(r"No module named '([A-Za-z0-9_]+)")
FIXTURES: Mapping[str, str] = MappingProxyType(
    {
        "mocker": "pytest-mock",
        "benchmark": "pytest-benchmark",
        "freezer": "pytest-freezer",
        "httpserver": "pytest-httpserver",
    }
)
NO_FIXTURE = re.compile(r"fixture '([A-Za-z0-9_]+)' not found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements to install."""

    requirements: tuple[str, ...]
    python: str
    """Python version of the image, such as ``3.11``."""
    before: str = ""
    """Date, such as ``2024-05-01``, that excludes later uploads; empty: no limit."""


def attempts(project: Project) -> Sequence[tuple[str, ...]]:
    """Lists of requirements to try, the exact one first; later lists drop test versions, then test requirements.

    Raises :class:`~etude.taskgen.failures.InstallError` for a requirement that is not from an index: another
    package may have its name there.
    """
    needed, tested = index_requirements(project.requirements), index_requirements(project.test_requirements)
    runner = () if any(bare_name(line) == RUNNER for line in tested) else (RUNNER,)
    loose = tuple(bare_name(line) for line in tested if bare_name(line) != RUNNER)
    tries = ((*needed, *tested, *runner), (*needed, *loose, RUNNER), (*needed, RUNNER))
    return tuple(dict.fromkeys(tries))


def missing_modules(output: str, index: Sequence[str]) -> tuple[str, ...]:
    """The missing requirements that the tests' output names; those in ``index`` were already installed or requested."""
    names = {IMPORT_NAMES.get(name, name) for name in MISSING.findall(output)}
    names |= {FIXTURES[name] for name in NO_FIXTURE.findall(output) if name in FIXTURES}
    return tuple(sorted(name for name in names if bare_name(name) not in {bare_name(line) for line in index}))


def install(requirements: Requirements, tree: Path) -> tuple[str, ...]:
    """Unpack wheels into ``SITE`` below ``tree``, a new folder, and return each package as ``NAME==VERSION``.

    Raises :class:`~etude.taskgen.failures.InstallError` with the end of pip's output, and
    :class:`~etude.errors.ConfigError` for a date if this pip does not support one.
    """
    site = tree / SITE.strip("/")
    site.mkdir(parents=True)
    options = ["--no-warn-conflicts", "--no-warn-script-location", "--target", str(site)]
    options += ["--python-version", requirements.python, "--implementation", "cp"]
    if requirements.before:
        if int(version("pip").partition(".")[0]) < DATED_SINCE:
            raise ConfigError(
                f"--before {requirements.before} needs pip {DATED_SINCE}, here is {version('pip')}: upgrade pip"
            )
        options += [
            "--uploaded-prior-to",
            requirements.before if "T" in requirements.before else f"{requirements.before}T00:00:00Z",
        ]
    try:
        install_wheels(requirements.requirements, options)
    except InstallError:
        rmtree(site)
        raise
    rmtree(site / "bin", ignore_errors=True)  # scripts that name this machine's Python
    for cache in sorted(site.rglob("__pycache__")):
        rmtree(cache)
    return tuple(
        sorted(folder.name.removesuffix(".dist-info").replace("-", "==", 1) for folder in site.glob("*.dist-info"))
    )


def without_copies(tree: Path, project: Project) -> None:
    """Remove copies of the project itself from a tree of installed dependencies."""
    site = tree / SITE.strip("/")
    names = {name.lower() for name in project.modules}
    for entry in sorted(site.iterdir()):
        is_record = entry.name.endswith((".dist-info", ".egg-info")) and bare_name(
            entry.name.partition("-")[0]
        ) == bare_name(project.name)
        if entry.name.lower() in names or (entry.suffix == ".py" and entry.stem.lower() in names) or is_record:
            rmtree(entry) if entry.is_dir() else entry.unlink()


def record_project(tree: Path, project: Project, texts: Mapping[str, str]) -> None:
    """Record the project as installed, with its version and entry points."""
    safe = re.sub(r"[^A-Za-z0-9.]+", "_", project.name)
    record = tree / SITE.strip("/") / f"{safe}-{project.version}.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    lines = f"Metadata-Version: 2.1\nName: {project.name}\nVersion: {project.version}\n"
    (record / "METADATA").write_text(lines, encoding="utf-8")
    (record / "INSTALLER").write_text("etude\n", encoding="utf-8")
    points = [text for path, text in texts.items() if path.endswith(".egg-info/entry_points.txt")]
    if points:
        (record / "entry_points.txt").write_text(points[0], encoding="utf-8")


def environment(project: Project) -> Mapping[str, str]:
    """Environment variables by which Python in the sandbox finds the project and its dependencies."""
    root = WORKDIR if project.root == "." else f"{WORKDIR}/{project.root}"
    return {"PYTHONPATH": f"{root}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}
