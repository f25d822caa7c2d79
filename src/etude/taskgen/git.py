"""Runs git on trees and repositories of strangers, so that none of their settings, hooks or programs takes part.

Files that a stranger packed may name a repository, and its settings may name programs. So git is told which repository
and which work tree to use, both ours, and reads no settings but those it is given.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.taskgen.failures import SourceError

GIT = ".git"
IDENTITY = {
    "GIT_AUTHOR_NAME": "maintainer",
    "GIT_AUTHOR_EMAIL": "maintainer@localhost",
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "maintainer",
    "GIT_COMMITTER_EMAIL": "maintainer@localhost",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Author and settings of every commit, so that equal files make equal layers on any machine."""
SAFE_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never"),
    *("-c", "core.attributesFile=/dev/null", "-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false"),
)
"""Options with which git runs no other program."""
GIT_TIMEOUT_S = 120.0


def commit_all(tree: Path) -> None:
    """Make ``tree`` a git repository with one commit, nothing packed.

    The same files always make the same bytes: the index holds no times. Raises
    :class:`~etude.taskgen.failures.SourceError` when git is missing or fails, or when anything in
    ``tree`` names a repository already.
    """
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            if name.casefold() == GIT:
                raise SourceError(f"{Path(folder) / name} names a repository of its own: remove it")
    run_git(tree, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    run_git(tree, "-c", "core.autocrlf=false", "add", "--all", "--force")
    run_git(tree, "-c", "gc.auto=0", "commit", "--quiet", "--message", "Import", "--no-verify", "--allow-empty")
    for name in ("index", "COMMIT_EDITMSG", "logs/HEAD", "logs/refs/heads/main"):
        (tree / GIT / name).unlink(missing_ok=True)
    run_git(tree, "read-tree", "HEAD")


def run_git(tree: Path, *arguments: str) -> str:
    """Run git on the repository that :func:`commit_all` made of ``tree``, and return its output.

    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    place = tree.absolute()
    return _git(tree, arguments, {"GIT_DIR": str(place / GIT), "GIT_WORK_TREE": str(place)}, GIT_TIMEOUT_S)


def read_repository(repository: Path, *arguments: str) -> str:
    """Run a read-only git command on a stranger's repository, bare or not, and return its output.

    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    place = repository.absolute()
    return _git(place, arguments, {"GIT_DIR": str(place / GIT if (place / GIT).exists() else place)}, GIT_TIMEOUT_S)


def clone(url: str, target: Path, *, timeout_s: float) -> None:
    """Clone the newest commit at ``url`` into the new folder ``target``, without hooks and this machine's settings.

    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    around = target.absolute().parent
    arguments = ("clone", "--quiet", "--depth=1", "--no-tags", "--template=", "--", url, target.name)
    _git(around, arguments, {"GIT_CEILING_DIRECTORIES": str(around.parent)}, timeout_s)


def _git(folder: Path, arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str:
    machine = {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")}
    try:
        done = subprocess.run(
            ["git", *SAFE_OPTIONS, *arguments],
            cwd=folder,
            env={**machine, **IDENTITY, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise SourceError("'git' is not installed: on Debian or Ubuntu, apt-get install git") from None
    except subprocess.TimeoutExpired:
        raise SourceError(f"git {arguments[0]} did not end within {timeout_s:g} s") from None
    output = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        raise SourceError(f"git {' '.join(arguments)[:80]} failed: {output[-400:]}", log=output)
    return done.stdout.decode(errors="replace")
