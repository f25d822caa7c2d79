"""What earlier runs left is not copied; a history is one commit and always the same bytes."""

from pathlib import Path

import pytest

from etude.environments.repositories.failures import SourceError
from etude.environments.repositories.scrubbing import clean_files, commit_all, copy_clean, git, is_leftover
from etude.sandboxes.layers import digest_tree

LEFT = (
    *("a.pyc", "pkg/__pycache__/a.cpython-311.pyc", ".pytest_cache/v/cache/lastfailed", ".mypy_cache/3.11/a.json"),
    *(".ruff_cache/0.1/x", "build/lib/pkg/a.py", "dist/p-1.tar.gz", "p.egg-info/SOURCES.txt", ".git/config"),
    *("pkg/a.py.orig", "pkg/a.py.rej", ".coverage", ".coverage.host.123", "coverage.xml", "htmlcov/index.html"),
    *("venv/lib/python3/site-packages/pkg/a.py", "x/site-packages/pkg/a.py", "a.py~", ".a.py.swp", "PKG-INFO"),
    *("fix.patch", "p-1-py3-none-any.whl", ".hypothesis/examples/x", ".tox/py/x", "p-1.dist-info/METADATA"),
)
KEPT = (
    "pkg/a.py",
    "pkg/build/tool.py",
    "README.md",
    "tests/data.json",
    "distribution.txt",
    "pkg/coverage.py",
    ".gitignore",
)


def plant(tree: Path) -> None:
    for path in (*LEFT, *KEPT):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(f"{path}\n")


def test_leftovers_are_left(tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    (tmp_path / "tree" / "link").symlink_to("/etc/passwd")
    assert sorted(clean_files(tmp_path / "tree")) == sorted(KEPT)


@pytest.mark.parametrize("name", ["build", "dist"])
def test_folders_of_copies_count_only_at_the_top(name: str) -> None:
    assert is_leftover(name, is_folder=True)
    assert not is_leftover(f"pkg/{name}", is_folder=True)


def test_a_copy_has_the_changes(tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    (tmp_path / "tree" / "pkg" / "a.py").chmod(0o755)
    copy_clean(tmp_path / "tree", tmp_path / "copy", {"README.md": None, "new/b.py": "b = 1\n"})
    assert sorted(clean_files(tmp_path / "copy")) == sorted({*KEPT, "new/b.py"} - {"README.md"})
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
        git(tmp_path, "clone", "--quiet", "--", str(tmp_path / "nothing"), "x")


def _planted(tree: Path) -> Path:
    plant(tree)
    return tree
