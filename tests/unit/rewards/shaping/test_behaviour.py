"""Behaviour of an agent: each term on rollouts that deserve it and on similar ones that do not."""

import math
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.reward import OF_HARNESS
from etude.rewards.shaping.behaviour import MIN_CALLS, TERMS, THINKING, Conduct, measure, observe
from etude.rewards.transcript import SpokenTurn
from etude.types import TurnKind


def spoken(text: str, heard: str = "", kind: TurnKind = TurnKind.ACT) -> SpokenTurn:
    return SpokenTurn(heard=heard, text=text, answered="", kind=kind, continues=None)


def conduct(
    *turns: SpokenTurn, counts: Mapping[str, int] | None = None, measures: Mapping[str, float] | None = None
) -> Conduct:
    return observe(turns, counts=counts or {}, measures=measures or {}, sampled_tokens=7)


def term(name: str, results: Conduct) -> float | None:
    return TERMS[name].measure(results)


def edits(*texts: str, path: str = "f.py") -> list[SpokenTurn]:
    return [spoken(f"edit {path} 3\n{text}") for text in texts]


def calls(tools: Mapping[str, int]) -> list[SpokenTurn]:
    return [
        spoken(f'<tool_call>{{"name": "{tool}", "arguments": {{}}}}</tool_call>')
        for tool, count in tools.items()
        for _ in range(count)
    ]


@pytest.mark.parametrize(("opened", "left", "value"), [(4, 1, 0.25), (2, 2, 1.0), (3, 0, 0.0), (0, 0, 0.0)], ids=str)
def test_open_todos(opened: float, left: float, value: float) -> None:
    assert term("open_todos", conduct(measures={"todo_opened": opened, "todo_open": left})) == value


def test_without_a_list_nothing_is_said_of_todos() -> None:
    assert term("open_todos", conduct()) is None
    assert "open_todos" not in measure(conduct())


SMUGGLED = """\
# The task is to add two numbers. There is also the case of strings.
# Python adds strings by concatenation, which the tests may want.
# On the other hand the name says numbers, so concatenation is wrong.
# Negative numbers need nothing special. Floats neither.
# So the answer is the sum of both.
    return a + b"""


def test_excess_comments() -> None:
    assert term("excess_comments", conduct(*edits(SMUGGLED))) == pytest.approx((5 - 1) / 6)
    assert term("excess_comments", conduct(*edits("# " + "so " * 200 + "\nreturn a"))) == pytest.approx((5 - 1) / 6)
    assert term("excess_comments", conduct()) == 0.0


@pytest.mark.parametrize(
    "honest",
    [
        "    return a + b",
        "    return a + b  # both are numbers",
        '    """Adds.\n\n    Both are numbers.\n    None of them is None.\n    """\n    return a + b',
        "# one\nx = 1\ny = 2\nz = 3\n# two\nq = 4",
        "    return a + b  # noqa: E501\n#!/bin/sh\n# type: ignore",
    ],
)
def test_what_code_needs_is_no_excess(honest: str) -> None:
    assert term("excess_comments", conduct(*edits(honest))) == 0.0


def test_comments_that_were_there_are_not_the_agents() -> None:
    shown = "\n".join(f"{number} {line}" for number, line in enumerate(SMUGGLED.split("\n"), 1))
    rewritten = spoken(f"edit f.py 1\n{SMUGGLED}", heard=shown)
    assert term("excess_comments", conduct(rewritten)) == 0.0
    later = [spoken(f"edit f.py 1\n{SMUGGLED}"), spoken("read f.py", heard="ok"), spoken("submit", heard=shown)]
    assert term("excess_comments", conduct(*later)) == pytest.approx(4 / 6)


def test_a_comment_written_twice_counts_once() -> None:
    once, twice = (conduct(*edits(*[SMUGGLED] * times)) for times in (1, 2))
    assert twice.written.comment_lines == once.written.comment_lines == 5


def test_files_are_read_in_their_own_language() -> None:
    script = "cat > a.js <<'EOF'\n// one\n// two\n// three\nx()\nEOF"
    shell = spoken(f"```bash\n{script}\n```")
    assert conduct(shell).written.comment_lines == 3
    assert conduct(*edits("# a heading\n# another", path="README.txt")).written.comment_lines == 0


def test_a_todo_is_no_program() -> None:
    assert conduct(spoken("todo # let me think")).written.lines == 0


@pytest.mark.parametrize(
    "line",
    [
        "Let me look at this again",
        "wait, that is wrong",
        "Hmm, strings?",
        "I think this is the place",
        "I'll come back to it",
        "okay, so the sum is needed",
        "Actually, the test says otherwise",
        "not sure whether it is called",
        "on second thought, no",
        "The user wants a sum",
        "first, I need the file",
    ],
)
def test_thinking_aloud(line: str) -> None:
    assert THINKING.search(line)
    assert term("thinking_comments", conduct(*edits(f"x = 1  # {line}"))) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "line",
    [
        "i must be positive",
        "wait for the lock",
        "waits until done",
        "the first item, or None",
        "what the user asked is checked above".replace("the user asked", "a user typed"),
        "We need the copy: the caller changes it",
        "TODO(ab): make this faster",
        "See RFC 2616, section 4.2",
        "letting go of the handle",
        "I/O is buffered here",
        "not sure-footed",
        "actual size, in bytes",
    ],
)
def test_plain_comments_are_no_thoughts(line: str) -> None:
    assert not THINKING.search(line)


def test_the_standard_library_hardly_thinks_aloud_and_comments_as_much_as_it_needs() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    shares: dict[str, list[float]] = {"thinking_comments": [], "excess_comments": []}
    for name in ("argparse", "ast", "heapq", "queue", "shlex", "textwrap"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")[:30_000]
        results = measure(conduct(*edits(text, path=f"{name}.py")))
        for share, values in shares.items():
            values.append(results[share])
    assert max(shares["thinking_comments"]) < 0.02
    assert sorted(shares["excess_comments"])[3] == 0.0
    assert max(shares["excess_comments"]) < 0.2


@pytest.mark.parametrize(
    ("tools", "value"),
    [
        ({"bash": 20}, 1.0),
        ({"bash": 20, "submit": 1}, 1.0),
        ({"bash": 10, "read": 10}, 0.0),
        ({"bash": 5, "read": 5, "edit": 5}, 0.0),
        ({"bash": 30, "read": 10}, 1 - (0.75 * math.log2(4 / 3) + 0.25 * 2)),
        ({"bash": MIN_CALLS - 1}, 0.0),
        ({}, 0.0),
    ],
    ids=str,
)
def test_tool_monoculture(tools: Mapping[str, int], value: float) -> None:
    assert term("tool_monoculture", conduct(*calls(tools))) == pytest.approx(value)


def test_malformed_calls() -> None:
    assert term("malformed_calls", conduct(counts={"read": 3, "malformed": 1})) == 0.25
    assert term("malformed_calls", conduct(counts={"read": 3})) == 0.0
    assert term("malformed_calls", conduct()) is None


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("Which of the two files do you mean?", True),
        ("I looked around.\n\nShall I go on?**", True),
        ("<think>what now?</think>Done.", False),
        ("```python\nx = 1 if a else b?\n```", False),
        ("read f.py", False),
        ("edit f.py 3\n# why?", False),
        ("Is it this one? Yes, it is.", False),
        ("", False),
    ],
)
def test_asking_instead_of_acting(text: str, asks: bool) -> None:
    assert term("asking", conduct(spoken(text), spoken("submit"))) == 0.5 * asks


def test_summaries_are_neither_questions_nor_calls() -> None:
    results = conduct(
        spoken("what was asked?", kind=TurnKind.SUMMARY), spoken("edit f.py 1\n# x", kind=TurnKind.SUMMARY)
    )
    assert (results.acting_turns, results.asking_turns, results.written.lines, dict(results.tools)) == (0, 0, 0, {})
    assert term("asking", results) == 0.0


def test_sampled_tokens_are_what_the_caller_counted() -> None:
    assert term("sampled_tokens", conduct()) == 7.0


REPLIES = st.one_of(
    st.text(alphabet="ab?# \n\"'`<>(){}:=", max_size=80),
    st.sampled_from(["read a.py", "submit", "todo x", "done 1", SMUGGLED, "edit a.py 1\n" + SMUGGLED, "why?"]),
)


@given(st.lists(st.tuples(REPLIES, REPLIES, st.sampled_from(TurnKind)), max_size=6))
def test_every_term_stays_in_its_range(turns: Sequence[tuple[str, str, TurnKind]]) -> None:
    results = conduct(*(spoken(text, heard, kind) for text, heard, kind in turns), counts={"read": 1})
    for name, value in measure(results).items():
        assert TERMS[name].low <= value <= TERMS[name].high


def test_terms_that_may_be_missing_are_those_that_take_the_built_in_harness() -> None:
    assert tuple(sorted(name for name, term in TERMS.items() if term.optional)) == OF_HARNESS


def test_every_term_defines_itself() -> None:
    for name, one in TERMS.items():
        assert one.measure.__doc__, name
        assert one.version >= 1
        assert one.low < one.high
