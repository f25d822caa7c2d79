"""Comments in program text: those for machines and those for people."""

import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.rewards.shaping.comments import SUFFIXES, ParsedSource, parse_source

MODULE = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""What this module is.

More of it.
"""
import os  # noqa: F401


def f(x):
    """Doubles."""
    # twice is enough
    y = x * 2  # not three times
    "a remark in a string"
    return (
        y
    )
'''


def test_a_python_module() -> None:
    assert parse_source(MODULE) == ParsedSource(
        code_lines=6,
        comments=("twice is enough", "not three times", "a remark in a string"),
        docstrings=("What this module is.", "More of it.", "Doubles."),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    return a + b  # why not", ParsedSource(code_lines=1, comments=("why not",))),
        ("    # only this", ParsedSource(comments=("only this",))),
        ("return f(a,  # open\n", ParsedSource(code_lines=1, comments=("open",))),
        ("  x = 1\n y = 2  # badly indented", ParsedSource(code_lines=2, comments=("badly indented",))),
        ('s = "# no comment"\n', ParsedSource(code_lines=1)),
        ('x = """\n# no comment\n"""', ParsedSource(code_lines=3)),
        ("'''doc'''\nx = 1", ParsedSource(code_lines=1, docstrings=("doc",))),
        ("x = 1\n'''not doc'''", ParsedSource(code_lines=1, comments=("not doc",))),
        ("f('a')\n", ParsedSource(code_lines=1)),
        ("", ParsedSource()),
        ("x = '''never closed\n# swallowed", ParsedSource(code_lines=1, comments=("swallowed",))),
        ("x = 1\0  # null", ParsedSource(code_lines=1, comments=("null",))),
        ("###  boxed ###", ParsedSource(comments=("boxed ###",))),
        ("#\n#   \nx = 1", ParsedSource(code_lines=1)),
    ],
)
def test_fragments_of_python(text: str, expected: ParsedSource) -> None:
    results = parse_source(text)
    assert results.comments == expected.comments
    assert (results.code_lines, results.docstrings) == (expected.code_lines, expected.docstrings)


@pytest.mark.parametrize(
    ("suffix", "text", "code", "comments"),
    [
        (".js", "let a = 1; // one\n/* two\n * three\n */ let b = 2;\n", 2, ("one", "two", "three")),
        (".ts", 'fetch("http://a.b/c"); // real', 1, ("real",)),
        (".go", "x := `// raw` // said\n//go:embed a", 1, ("said",)),
        (".c", "int a; /* one */ int b; /* two */", 1, ("one", "two")),
        (".sh", "echo '# no' # yes\n# all", 1, ("yes", "all")),
        (".yaml", "a: b#c\n", 1, ()),
        (".sql", "select 1 -- why\n", 1, ("why",)),
        (".html", "<p>a</p> <!-- b\nc -->\n<p>", 2, ("b", "c")),
        (".txt", "# a heading\ntext", 2, ()),
        ("", "# a heading", 1, ()),
        (".JS", "// capitals", 0, ("capitals",)),
        (".ts", "// eslint-disable-next-line\nx()", 1, ()),
    ],
)
def test_other_languages_by_their_marks(suffix: str, text: str, code: int, comments: tuple[str, ...]) -> None:
    assert parse_source(text, suffix) == ParsedSource(code_lines=code, comments=comments)


def test_the_standard_library_reads_as_people_wrote_it() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse", "dataclasses", "heapq"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")[:30_000]
        source = parse_source(text)
        lines = sum(bool(line.strip()) for line in text.split("\n"))
        counted = source.code_lines + len(source.comments) + len(source.docstrings)
        assert 0.85 * lines < counted < 1.1 * lines
        assert source.code_lines > 0.4 * lines


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab #\"'\\\n\t:(){}/*-<>!=0\0é`", max_size=60), st.sampled_from([".py", *sorted(SUFFIXES)]))
def test_no_text_is_too_odd(text: str, suffix: str) -> None:
    source = parse_source(text, suffix)
    assert all(line.strip() for line in source.comments)
    assert source.code_lines <= text.count("\n") + 1


def test_hostile_lines_take_no_time() -> None:
    """Quotes that are never closed would be looked at again from each of their letters."""
    started_s = time.process_time()
    for text in ('\\"' * 16_000, "'" * 16_001, "/*" * 16_000, "# " * 16_000, "(" * 16_000, "if 1:\n " * 90):
        for suffix in (".py", ".js"):
            parse_source(text, suffix)
    assert time.process_time() - started_s < 5.0
