"""Clean copies of a package for agents: no leftovers of earlier runs, and a history of one commit.

Owns what counts as a leftover. That nothing got through is proved by searching the result
(:mod:`~etude.taskgen.leaks`), not by trusting this list.

Owns how git is run, too. Files that a stranger packed may name a repository, and its settings may name programs; so
git is told which repository and which work tree it works on, both ours, and reads no settings but those it is given.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from etude.taskgen.failures import SourceError

GIT = ".git"
LEFT_FOLDERS = frozenset(
    {
        *(GIT, ".hg", ".svn", ".bzr", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
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
"""Names of folders with history, caches or copies, wherever they are, in lower case. A file of such a name is
left as well: a file ``.git`` says where a repository is, with settings that name programs to run."""
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
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}
"""Author of commits, the same for all, so that equal files make equal layers; settings of this machine play no part."""
SAFE_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never"),
    *("-c", "core.attributesFile=/dev/null", "-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false"),
)
"""Settings by which git runs no other program."""
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
CONFIG = {
    40: "[core]\n\trepositoryformatversion = 0\n\tbare = true\n",
    64: "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[extensions]\n\tobjectFormat = sha256\n",
}
"""Settings of a repository by the length of its commits' names: of SHA-1, of SHA-256."""
GIT_TIMEOUT_S = 120.0


def is_leftover(path: str, *, is_folder: bool) -> bool:
    """Return true if a file or folder of a project, by its path in it, is something that a run or an author left
    behind.
    """
    place = PurePosixPath(path)
    if place.name.endswith(LEFT_SUFFIXES) or place.name.casefold() in LEFT_FOLDERS:
        return True
    if is_folder:
        return len(place.parts) == 1 and place.name in LEFT_TOP_FOLDERS
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
    """Copy the clean files of ``source`` into the new folder ``target``, with some replaced or left out.

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
    """Make ``tree`` a git repository with one commit, nothing packed.

    The same files always make the same bytes: the index holds no times. Raises
    :class:`~etude.taskgen.failures.SourceError` when git is missing or fails, or when anything in
    ``tree`` names a repository already.
    """
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            if name.casefold() == GIT:
                raise SourceError(f"{Path(folder) / name} names a repository of its own: remove it")
    git(tree, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    git(tree, "-c", "core.autocrlf=false", "add", "--all", "--force")
    git(tree, "-c", "gc.auto=0", "commit", "--quiet", "--message", "Import", "--no-verify", "--allow-empty")
    for name in ("index", "COMMIT_EDITMSG", "logs/HEAD", "logs/refs/heads/main"):
        (tree / GIT / name).unlink(missing_ok=True)
    git(tree, "read-tree", "HEAD")


def git(tree: Path, *arguments: str) -> str:
    """Run git on the repository that :func:`commit_all` made of ``tree``, and return what it printed.

    It looks for no other one, runs no hooks, and knows no settings of this machine. Raises
    :class:`~etude.taskgen.failures.SourceError`.
    """
    place = tree.absolute()
    return _git(tree, arguments, {"GIT_DIR": str(place / GIT), "GIT_WORK_TREE": str(place)}, GIT_TIMEOUT_S)


def read_repository(repository: Path, *arguments: str) -> str:
    """Run a reading command of git on the head and the objects of somebody's repository, bare or not, and return what
    it printed.

    Its own settings are not read: they can name programs for filters of files, signatures, or objects that are missing.
    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    with tempfile.TemporaryDirectory(prefix="etude-git-") as name:
        try:
            _view(repository.absolute(), own := Path(name))
        except (OSError, ValueError) as error:
            raise SourceError(f"{repository} is no git repository that can be read: {error}") from error
        return _git(own, arguments, {"GIT_DIR": str(own)}, GIT_TIMEOUT_S)


def _view(repository: Path, folder: Path) -> None:
    """Make a repository in an empty folder that has the objects of another one and its head, detached."""
    place = repository / GIT if (repository / GIT).exists() else repository
    if place.is_file():  # a work tree of another repository
        place = repository / place.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    shared = place / "commondir"
    shared = place / shared.read_text(encoding="utf-8").strip() if shared.is_file() else place
    commit = _head(place, shared)
    if not COMMIT.fullmatch(commit):
        raise ValueError(f"its HEAD is {commit!r}")
    objects = str((shared / "objects").resolve(strict=True))
    if "\n" in objects:
        raise ValueError("its path has more than one line")
    (folder / "objects" / "info").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "objects" / "info" / "alternates").write_text(objects + "\n", encoding="utf-8")
    (folder / "HEAD").write_text(commit + "\n", encoding="ascii")
    (folder / "config").write_text(CONFIG[len(commit)], encoding="ascii")
    if (shared / "shallow").is_file():
        shutil.copyfile(shared / "shallow", folder / "shallow")


def _head(place: Path, shared: Path) -> str:
    """The commit that a repository's head is at; its branches are in the folder ``shared``."""
    head = (place / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    branch = head.removeprefix("ref:").strip()
    if ".." not in PurePosixPath(branch).parts and (shared / branch).is_file():
        return (shared / branch).read_text(encoding="utf-8").strip()
    packed = shared / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line.split(" ", 1)[0] for line in lines if line.endswith(f" {branch}")), f"{branch}, which is empty")


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
