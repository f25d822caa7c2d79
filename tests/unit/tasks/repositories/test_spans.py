"""Edits are made exactly where the syntax tree says, for all characters and line ends before them."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.repositories.spans import Edit, SourceText, apply

LETTERS = st.text(alphabet="añ→𝕏\u2028\x0c b", max_size=12)


@given(LETTERS, st.sampled_from(["\n", "\r\n"]), LETTERS)
def test_a_node_s_segment_is_its_own_text(comment: str, end: str, text: str) -> None:
    literal = repr(text)
    source = SourceText("m.py", f"# {comment.replace(chr(12), '')}{end}x = ({literal}, {literal}); y = 1{end}")
    parts = [node for node in ast.walk(source.tree) if isinstance(node, ast.Constant) and node.value == text]
    assert [source.segment(part) for part in parts] == [literal, literal]


@given(st.text(min_size=4, max_size=30), st.data())
def test_edits_replace_their_stretch_and_nothing_else(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), min_size=4, max_size=4)))
    edits = [Edit(start=cuts[2], end=cuts[3], text="B"), Edit(start=cuts[0], end=cuts[1], text="A")]
    assert apply(text, edits) == f"{text[: cuts[0]]}A{text[cuts[1] : cuts[2]]}B{text[cuts[3] :]}"


def test_overlapping_edits_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        apply("abcdef", [Edit(start=0, end=3, text=""), Edit(start=2, end=4, text="")])
    with pytest.raises(ValueError, match="not a stretch"):
        Edit(start=3, end=2, text="")


def test_functions_are_found_in_classes_and_branches_but_not_in_functions() -> None:
    source = SourceText(
        "m.py",
        "@wrap\ndef a():\n    def inner(): pass\n"
        "class C:\n    def m(self): pass\n    class D:\n        async def n(self): pass\n"
        "if True:\n    def b(): pass\nelse:\n    def b(): pass\n"
        "try:\n    def c(): pass\nexcept ImportError:\n    def c(): return 1\n",
    )
    lines = [(function.qualname, function.line) for function in source.functions()]
    assert lines == [("a", 1), ("C.m", 5), ("C.D.n", 7), ("b", 9), ("b", 11), ("c", 13), ("c", 15)]
