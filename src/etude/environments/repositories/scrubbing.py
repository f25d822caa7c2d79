"""A package's files as an agent may have them: without what earlier runs left behind, and with a history of one commit.

Owns what counts as a leftover. That nothing got through is proved by searching the result
(:mod:`~etude.environments.repositories.leaks`), not by trusting this list.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from etude.environments.repositories.failures import SourceError

LEFT_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn", ".bzr", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
        *(".tox", ".nox", ".venv", "venv", "node_modules", ".eggs", "htmlcov", ".cache", ".idea", ".vscode", ".pytype"),
        *(
            "site-packages",
            "__pypackages__",
            ".coverage_html",
            ".ipynb_checkpoints",
            ".pyre",
            ".dmypy.json",
            ".nyc_output",
        ),
    }
)
"""Folders that hold history, caches or copies, wherever they are."""
LEFT_TOP_FOLDERS = frozenset({"build", "dist", "_build", "sdist", "wheelhouse"})
"""Folders that hold copies when they lie at the top."""
LEFT_FILES = re.compile(
    r".*\.(pyc|pyo|pyd|orig|rej|bak|swp|swo|whl|egg|cover|prof|gcov|gcda|gcno|patch|diff)"
    r"|.*~|PKG-INFO|SOURCES\.txt|\.coverage(\..*)?|coverage\.(xml|json)|\.DS_Store|\.#.*|#.*#|lastfailed|nodeids"
    r"|\.dmypy\.json"
)
LEFT_SUFFIXES = (".egg-info", ".dist-info", ".egg-link")
"""Names that end so are records of an installation."""
FILE_BYTES = 16 << 20
"""A larger file is left out: no package of programs needs one, and it would have to be searched."""
IDENTITY = {
    "GIT_AUTHOR_NAME": "maintainer",
    "GIT_AUTHOR_EMAIL": "maintainer@localhost",
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "maintainer",
    "GIT_COMMITTER_EMAIL": "maintainer@localhost",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Who committed, the same for all, so that equal files make equal layers; settings of this machine play no part."""
GIT_TIMEOUT_S = 120.0


def is_leftover(path: str, *, is_folder: bool) -> bool:
    """Whether a file or folder of a project, by its path in it, is something that a run or an author left behind."""
    place = PurePosixPath(path)
    if place.name.endswith(LEFT_SUFFIXES):
        return True
    if is_folder:
        return place.name in LEFT_FOLDERS or (len(place.parts) == 1 and place.name in LEFT_TOP_FOLDERS)
    return bool(LEFT_FILES.fullmatch(place.name))


def clean_files(source: Path) -> Iterator[str]:
    """The paths of the plain files below ``source`` that are no leftovers, sorted; links are not followed nor kept."""
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
    """Copy what is clean of ``source`` into the new folder ``target``, some files being others there, or missing.

    Files are copied without times, so that these tell nothing.
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


def commit_all(tree: Path) -> None:
    """Make a repository of ``tree`` whose history is one commit of all there is, with nothing packed.

    The same files always make the same bytes: the index holds no times. Raises
    :class:`~etude.environments.repositories.failures.SourceError` when git is missing or fails.
    """
    git(tree, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    git(tree, "-c", "core.autocrlf=false", "add", "--all", "--force")
    git(tree, "-c", "gc.auto=0", "commit", "--quiet", "--message", "Import", "--no-verify", "--allow-empty")
    for name in ("index", "COMMIT_EDITMSG", "logs/HEAD", "logs/refs/heads/main"):
        (tree / ".git" / name).unlink(missing_ok=True)
    git(tree, "read-tree", "HEAD")


def git(folder: Path, *arguments: str, timeout_s: float = GIT_TIMEOUT_S) -> str:
    """Run git without hooks and without this machine's settings, and return what it printed.

    Raises :class:`~etude.environments.repositories.failures.SourceError`.
    """
    safe = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never")
    try:
        done = subprocess.run(
            ["git", *safe, *arguments],
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/"), **IDENTITY},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise SourceError("'git' is not installed: on Debian or Ubuntu, apt-get install git") from None
    except subprocess.TimeoutExpired:
        raise SourceError(f"git {arguments[0]} did not end within {timeout_s:g} s") from None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        raise SourceError(f"git {' '.join(arguments)[:80]} failed: {said[-400:]}", log=said)
    return done.stdout.decode(errors="replace")
