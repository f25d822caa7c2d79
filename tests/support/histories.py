"""A git repository of a small package whose commits are of all sorts."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

START = {
    "pyproject.toml": '[project]\nname = "tally"\nversion = "1.0"\n',
    "tally/__init__.py": '"""Sums."""\n\n\ndef total(numbers):\n    result = 1\n    for each in numbers:\n'
    "        result += each\n    return result\n\n\ndef count(items):\n    return len(items)\n",
    "tests/test_count.py": "from tally import count\n\n\ndef test_count():\n    assert count([1, 2]) == 2\n",
}
FIXED = START["tally/__init__.py"].replace("result = 1", "result = 0")
WITH_MEAN = FIXED + "\n\ndef mean(numbers):\n    return total(numbers) / len(numbers)\n"
TEST_TOTAL = (
    "from tally import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\n"
    "def test_nothing():\n    assert total([]) == 0\n"
)
TEST_MEAN = TEST_TOTAL + "\n\ndef test_mean():\n    from tally import mean\n\n    assert mean([1, 3]) == 2\n"
FLAKY = TEST_MEAN + "\n\ndef test_luck():\n    import sys\n\n    assert not sys.flags.hash_randomization\n"
"""The last test passes with the hash seed 0 alone."""

COMMITS: list[tuple[str, Mapping[str, str]]] = [
    ("Start", START),
    (
        "fix(core): the total of no numbers is one too many (#12)",
        {"tally/__init__.py": FIXED, "tests/test_total.py": TEST_TOTAL},
    ),
    ("Bump version to 1.1", {"pyproject.toml": START["pyproject.toml"].replace("1.0", "1.1")}),
    ("Say more in the documentation", {"README.md": "Sums.\n"}),
    (
        "Rename a variable nobody sees",
        {
            "tally/__init__.py": FIXED.replace("each", "one"),
            "tests/test_count.py": START["tests/test_count.py"] + "\n",
        },
    ),
    ("Add mean of some numbers", {"tally/__init__.py": WITH_MEAN, "tests/test_total.py": TEST_MEAN}),
    (
        "Depend on luck in one of the tests",
        {"tally/__init__.py": WITH_MEAN + "\n", "tests/test_total.py": FLAKY},
    ),
]
"""Subject and files of each commit, in order; two of them are tasks."""

ENDLESS = START["tally/__init__.py"].replace("return len(items)", "return sum(1 for _ in iter(lambda: 0, 1))")
HANGING: list[tuple[str, Mapping[str, str]]] = [
    ("Start", {**START, "tally/__init__.py": ENDLESS}),
    (
        "Counting comes to an end at last",
        {
            "tally/__init__.py": START["tally/__init__.py"],
            "tests/test_count.py": START["tests/test_count.py"].replace("2", "3").replace("[1, ", "[0, 1, "),
        },
    ),
]
"""The same; without the last one its tests do not end."""


def make_history(
    folder: Path, commits: int | None = None, history: Sequence[tuple[str, Mapping[str, str]]] = COMMITS
) -> Path:
    """Create the repository, or continue it, up to a number of commits."""
    folder.mkdir(exist_ok=True)
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet", "-b", "main")
    done = git(folder, "rev-list", "--all").count("\n")
    for subject, files in history[done:commits]:
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "-m", subject)
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
