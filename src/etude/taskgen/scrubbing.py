"""Clean copies of a package for agents: no leftovers of earlier runs, and a history of one commit.

Owns the definition of a leftover. A search of the result (:mod:`~etude.taskgen.leaks`) verifies that none remains; this
list alone is not trusted.

Also owns how git runs. Files from a third party may name a repository, and its settings may name programs. Therefore
git receives our own repository and work tree explicitly and reads only the settings given here.
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
"""Names, in lower case, of folders with history, caches or copies, at any depth. Files of these names are
left out as well: a file ``.git`` points to a repository, whose settings may name programs to run."""
LEFT_TOP_FOLDERS = frozenset({"build", "dist", "_build", "sdist", "wheelhouse"})
"""Folders that contain copies if they are at the top level."""
LEFT_FILES = re.compile(
    r".*\.(pyc|pyo|pyd|orig|rej|bak|swp|swo|whl|egg|cover|prof|gcov|gcda|gcno|patch|diff)"
    r"|.*~|PKG-INFO|SOURCES\.txt|\.coverage(\..*)?|coverage\.(xml|json)|\.DS_Store|\.#.*|#.*#|lastfailed|nodeids"
    r"|\.dmypy\.json"
)
LEFT_SUFFIXES = (".egg-info", ".dist-info", ".egg-link")
"""Suffixes of an installation's records."""
FILE_BYTES = 16 << 20
"""Maximum file size; a larger file is left out, since no package needs one and it would have to be searched."""
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
"""Fixed author of commits, so that equal files make equal layers, and no settings of this machine."""
SAFE_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never"),
    *("-c", "core.attributesFile=/dev/null", "-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false"),
)
"""Settings that prevent git from running other programs."""
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
CONFIG = {
    40: "[core]\n\trepositoryformatversion = 0\n\tbare = true\n",
    64: "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[extensions]\n\tobjectFormat = sha256\n",
}
"""Length of a commit's name (SHA-1, SHA-256) → settings of a repository."""
GIT_TIMEOUT_S = 120.0


def is_leftover(path: str, *, is_folder: bool) -> bool:
    """Return true if a run or an author left a file or folder behind; ``path`` is relative to the project."""
    place = PurePosixPath(path)
    if place.name.endswith(LEFT_SUFFIXES) or place.name.casefold() in LEFT_FOLDERS:
        return True
    if is_folder:
        return len(place.parts) == 1 and place.name in LEFT_TOP_FOLDERS
    return bool(LEFT_FILES.fullmatch(place.name))


def clean_files(source: Path) -> Iterator[str]:
    """The sorted paths of the plain files below ``source`` that are not leftovers; links are neither followed nor
    included.
    """
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

    Files are copied without their times, which could reveal information.
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
    """Make ``tree`` a git repository with one commit and no packed objects.

    The same files always give the same bytes: the index has no times. Raises
    :class:`~etude.taskgen.failures.SourceError` if git is missing or fails, or if ``tree`` already contains a
    repository or a reference to one.
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
    """Run git on the repository that :func:`commit_all` created in ``tree``, and return its output.

    Git searches for no other repository, runs no hooks, and reads no settings of this machine. Raises
    :class:`~etude.taskgen.failures.SourceError`.
    """
    place = tree.absolute()
    return _git(tree, arguments, {"GIT_DIR": str(place / GIT), "GIT_WORK_TREE": str(place)}, GIT_TIMEOUT_S)


def read_repository(repository: Path, *arguments: str) -> str:
    """Run a read-only git command on the head and objects of an untrusted repository, bare or not; return its output.

    The repository's own settings are not read: they can name programs for file filters, signatures or missing objects.
    Raises :class:`~etude.taskgen.failures.SourceError`.
    """
    with tempfile.TemporaryDirectory(prefix="etude-git-") as name:
        try:
            _view(repository.absolute(), own := Path(name))
        except (OSError, ValueError) as error:
            raise SourceError(f"{repository} is no git repository that can be read: {error}") from error
        return _git(own, arguments, {"GIT_DIR": str(own)}, GIT_TIMEOUT_S)


def _view(repository: Path, folder: Path) -> None:
    """Create a repository in an empty folder with the objects and the detached head of another one."""
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
    """The commit of a repository's head; its branches are in the folder ``shared``."""
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
    """Clone the newest commit at ``url`` into the new folder ``target``, without hooks or this machine's settings.

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
