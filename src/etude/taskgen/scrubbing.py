"""Clean copies of a package for agents, without leftovers of earlier runs.

Owns what counts as a leftover. That nothing got through is proved by searching the result
(:mod:`~etude.taskgen.leaks`), not by trusting this list.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from etude.taskgen.git import GIT

LEFT_FOLDERS = frozenset(
    {
        *(GIT, ".hg", ".svn", ".bzr", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
        *(".tox", ".nox", ".venv", "venv", "node_modules", ".eggs", "htmlcov", ".cache", ".idea", ".vscode", ".pytype"),
        *("site-packages", "__pypackages__", ".coverage_html", ".ipynb_checkpoints", ".pyre", ".nyc_output"),
        ".dmypy.json",
    }
)
"""Names, in lower case, of folders with history, caches or copies, at any depth. Files with such names are left out as
well: a file ``.git`` points to a repository, whose settings may name programs to run.
"""
LEFT_TOP_FOLDERS = frozenset({"build", "dist", "_build", "sdist", "wheelhouse"})
"""Names of folders that hold copies if they are at the top."""
LEFT_FILES = re.compile(
    r".*\.(pyc|pyo|pyd|orig|rej|bak|swp|swo|whl|egg|cover|prof|gcov|gcda|gcno|patch|diff)"
    r"|.*~|PKG-INFO|SOURCES\.txt|\.coverage(\..*)?|coverage\.(xml|json)|\.DS_Store|\.#.*|#.*#|lastfailed|nodeids"
    r"|\.dmypy\.json"
)
LEFT_SUFFIXES = (".egg-info", ".dist-info", ".egg-link")
"""Endings of names of installation records."""
FILE_BYTES = 16 << 20
"""Largest file that is copied: no package needs a larger one, and it would have to be searched."""


def is_leftover(path: str, *, is_folder: bool) -> bool:
    """True if a file or folder, by its path in a project, was left behind by a run or an author."""
    place = PurePosixPath(path)
    if place.name.endswith(LEFT_SUFFIXES) or place.name.casefold() in LEFT_FOLDERS:
        return True
    if is_folder:
        return len(place.parts) == 1 and place.name in LEFT_TOP_FOLDERS
    return bool(LEFT_FILES.fullmatch(place.name))


def clean_files(source: Path) -> Iterator[str]:
    """The sorted paths of the plain files below ``source`` that are no leftovers; symbolic links are left out."""
    for folder, folders, files in os.walk(source):
        inner = Path(folder).relative_to(source)
        folders[:] = sorted(
            name
            for name in folders
            if not is_leftover(str(inner / name), is_folder=True) and not (Path(folder) / name).is_symlink()
        )
        for name in sorted(files):
            file = Path(folder) / name
            is_plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= FILE_BYTES
            if is_plain and not is_leftover(str(inner / name), is_folder=False):
                yield str(inner / name)


def copy_clean(source: Path, target: Path, changed: Mapping[str, str | None]) -> None:
    """Copy the clean files of ``source`` into the new folder ``target``, with ``changed`` ones replaced, or left out
    for ``None``.

    Files are copied without their times, which would give something away.
    """
    target.mkdir(parents=True)
    for path in clean_files(source):
        if path not in changed:
            copy = target / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, copy)
            copy.chmod(0o755 if os.access(source / path, os.X_OK) and (source / path).stat().st_mode & 0o100 else 0o644)
    for path, text in changed.items():
        if text is not None:
            copy = target / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text.encode())
