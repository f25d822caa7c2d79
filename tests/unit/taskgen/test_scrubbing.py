"""Leftovers of earlier runs are not copied; the history is one reproducible commit; git runs no other program."""

import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from etude.sandboxes.images.layers import digest_tree
from etude.taskgen.failures import SourceError
from etude.taskgen.scrubbing import clean_files, clone, commit_all, copy_clean, git, is_leftover
from etude.taskgen.sources import fetch

LEFT = (
    *("a.pyc", "pkg/__pycache__/a.cpython-311.pyc", ".pytest_cache/v/cache/lastfailed", ".mypy_cache/3.11/a.json"),
    *(".ruff_cache/0.1/x", "build/lib/pkg/a.py", "dist/p-1.tar.gz", "p.egg-info/SOURCES.txt", ".git/config"),
    *("pkg/a.py.orig", "pkg/a.py.rej", ".coverage", ".coverage.host.123", "coverage.xml", "htmlcov/index.html"),
    *("venv/lib/python3/site-packages/pkg/a.py", "x/site-packages/pkg/a.py", "a.py~", ".a.py.swp", "PKG-INFO"),
    *("fix.patch", "p-1-py3-none-any.whl", ".hypothesis/examples/x", ".tox/py/x", "p-1.dist-info/METADATA"),
)
ACCEPTED = (
    "pkg/a.py",
    "pkg/build/tool.py",
    "README.md",
    "tests/data.json",
    "distribution.txt",
    "pkg/coverage.py",
    ".gitignore",
)


def plant(tree: Path) -> None:
    for path in (*LEFT, *ACCEPTED):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(f"{path}\n")


def test_leftovers_are_left(tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    (tmp_path / "tree" / "link").symlink_to("/etc/passwd")
    assert sorted(clean_files(tmp_path / "tree")) == sorted(ACCEPTED)


@pytest.mark.parametrize("name", ["build", "dist"])
def test_folders_of_copies_count_only_at_the_top(name: str) -> None:
    assert is_leftover(name, is_folder=True)
    assert not is_leftover(f"pkg/{name}", is_folder=True)


def test_a_copy_has_the_changes(tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    (tmp_path / "tree" / "pkg" / "a.py").chmod(0o755)
    copy_clean(tmp_path / "tree", tmp_path / "copy", {"README.md": None, "new/b.py": "b = 1\n"})
    assert sorted(clean_files(tmp_path / "copy")) == sorted({*ACCEPTED, "new/b.py"} - {"README.md"})
    assert (tmp_path / "copy" / "pkg" / "a.py").stat().st_mode & 0o777 == 0o755


def test_a_history_is_one_commit_of_everything_and_always_the_same(tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        tree = tmp_path / f"tree{number}"
        copy_clean(
            _planted(tmp_path / f"source{number}"), tree, {".gitignore": "tests/\n", ".gitattributes": "* text=auto\n"}
        )
        commit_all(tree)
        digests.add(digest_tree(tree))
        assert git(tree, "rev-list", "--all", "--count").strip() == "1"
        assert git(tree, "status", "--short").strip() == ""
        assert "tests/data.json" in git(tree, "ls-files")
        assert not list(tree.glob(".git/**/*.pack"))
        assert not (tree / ".git" / "logs" / "HEAD").exists()
    assert len(digests) == 1


def test_git_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"git clone.* failed"):
        clone(str(tmp_path / "nothing"), tmp_path / "x", timeout_s=60.0)


@pytest.mark.parametrize("name", [".git", ".GIT", ".Git", ".hg", ".svn", ".bzr", "__pycache__", ".VENV"])
def test_what_a_history_or_cache_is_called_is_left_as_a_file_too_in_any_case(tmp_path: Path, name: str) -> None:
    (tmp_path / "pkg" / name).mkdir(parents=True)
    (tmp_path / "pkg" / name / "config").write_text("")
    (tmp_path / name).write_text("gitdir: meta\n")
    (tmp_path / "a.py").write_text("")
    assert list(clean_files(tmp_path)) == ["a.py"]


def archive_of(folder: Path, files: dict[str, str]) -> Path:
    """An archive with these files in one folder at its top."""
    for path, text in files.items():
        (folder / "p-1" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "p-1" / path).write_text(text)
    with tarfile.open(folder / "p-1.tar.gz", "w:gz") as packed:
        packed.add(folder / "p-1", "p-1")
    return folder / "p-1.tar.gz"


def build_tree(archive: Path, scratch: Path) -> Path:
    """The work tree that a build makes of an archive."""
    tree = fetch(str(archive), scratch / "source")
    copy_clean(tree, scratch / "work", {})
    commit_all(scratch / "work")
    return scratch / "work"


def test_an_archive_names_no_program_that_git_runs(tmp_path: Path) -> None:
    """A file `.git` points at settings beside it, of which some name programs."""
    mark = tmp_path / "was-run"
    touch = tmp_path / "touch.sh"
    touch.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(mark))}\ncat\n")
    touch.chmod(0o755)
    config = (
        "[core]\nrepositoryformatversion = 0\nbare = false\n"
        f'[filter "x"]\nclean = {touch}\nsmudge = {touch}\nrequired = true\n'
        f"[commit]\ngpgSign = true\n[gpg]\nprogram = {touch}\n"
    )
    meta = {"meta/HEAD": "ref: refs/heads/main\n", "meta/config": config, "meta/objects/x": "", "meta/refs/x": ""}
    files = {".git": "gitdir: meta\n", ".gitattributes": "* filter=x\n", "a.py": "a = 1\n", **meta}
    work = build_tree(archive_of(tmp_path / "made", files), tmp_path / "scratch")
    assert not mark.exists()
    assert "a.py" in git(work, "ls-files")
    assert (work / ".git" / "objects").is_dir()


def test_an_archive_does_not_choose_the_repository_that_is_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine.py").write_text("mine = 1\n")
    commit_all(victim)
    before = digest_tree(victim)
    files = {".git": f"gitdir: {victim / '.git'}\n", "a.py": "a = 1\n"}
    work = build_tree(archive_of(tmp_path / "made", files), tmp_path / "scratch")
    assert digest_tree(victim) == before
    assert "a.py" in git(work, "ls-files")


@pytest.mark.parametrize("place", [".git", "sub/.git", ".GIT"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_tree_that_names_a_repository_is_not_committed(tmp_path: Path, place: str, kind: str) -> None:
    there = tmp_path / "tree" / place
    there.parent.mkdir(parents=True)
    if kind == "file":
        there.write_text("gitdir: elsewhere\n")
    elif kind == "folder":
        there.mkdir()
    else:
        there.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"names a repository of its own: remove"):
        commit_all(tmp_path / "tree")
    assert not (tmp_path / "elsewhere").exists()


def test_settings_and_variables_of_this_machine_play_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, home = tmp_path / "was-run", tmp_path / "home"
    (home / ".config" / "git").mkdir(parents=True)
    settings = f'[filter "x"]\nclean = touch {shlex.quote(str(mark))}; cat\n[commit]\ngpgSign = true\n'
    (home / ".gitconfig").write_text(settings)
    (home / ".config" / "git" / "attributes").write_text("* filter=x\n")
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "init", "--quiet", str(elsewhere)], check=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(elsewhere / ".git"))
    copy_clean(_planted(tmp_path / "source"), tmp_path / "tree", {".gitattributes": "* filter=x\n"})
    commit_all(tmp_path / "tree")
    assert not mark.exists()
    assert git(tmp_path / "tree", "rev-list", "--all", "--count").strip() == "1"


def _planted(tree: Path) -> Path:
    plant(tree)
    return tree
