"""The count of lines of code, without blank lines, comments and docstrings."""

from pathlib import Path

import sizes

MODULE = '''"""What the module is."""

import os  # why

LIMIT = 3
"""What the limit is."""


def f(
    x: int,
) -> str:
    """Says

    much.
    """
    # and more
    return """two
lines"""
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert sizes.code_lines(MODULE) == 2 + 3 + 2
    assert sizes.code_lines('"""A docstring alone."""\n') == 0


def test_rooms_are_listed_by_size_and_empty_files_are_no_files(tmp_path: Path) -> None:
    for name, text in (
        ("small/a.py", "x = 1\n"),
        ("large/b.py", "x = 1\ny = 2\n"),
        ("large/__init__.py", ""),
        ("c.py", "z = 3\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sizes.rooms_of(tmp_path) == [("large", 1, 2), ("small", 1, 1), ("no folder", 1, 1)]
