"""Papers: which tests are real in which, and that the modules agree with that."""

import random

from etude.rewards.hidden_papers import Paper, Papers, module_of, name_of

SOURCES = {
    "tests/test_a.py": "def test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 4\n",
    "tests/test_b.py": "class T:\n    def test_three(self):\n        assert f(3) == 6\n",
    "tests/data.txt": "no Python (",
}
MUST_PASS = (
    "tests/test_b.py::T::test_three[1]",
    "tests/test_b.py::T::test_three[a::b]",
    "tests/test_a.py::test_two",
    "tests/test_a.py::test_one",
    "tests/test_c.py::test_gone",
    "tests/data.txt::data.txt",
)
GUARDED = frozenset(MUST_PASS[:4])


def papers(seed: int) -> Papers:
    return Papers(SOURCES, MUST_PASS, random.Random(seed))


def test_a_plain_paper_is_what_was_there() -> None:
    assert papers(1).plain() == Paper(real=frozenset(MUST_PASS))
    assert papers(1).guarded == GUARDED


def test_in_a_false_paper_everything_is_a_canary() -> None:
    paper = papers(1).false()
    assert (paper.real, paper.canaries) == (frozenset(), GUARDED)
    for path, text in paper.files.items():
        assert len(text.splitlines()) == len(SOURCES[path].splitlines())
        assert all(line not in text.splitlines() for line in SOURCES[path].splitlines() if "assert" in line)


def test_in_a_mixed_paper_canaries_come_last() -> None:
    order = [{MUST_PASS[0], MUST_PASS[1]}, {"tests/test_a.py::test_one"}, {"tests/test_a.py::test_two"}]
    lines = set()
    for seed in range(40):
        paper = papers(seed).mixed()
        assert paper.real | paper.canaries == frozenset(MUST_PASS)
        assert not paper.real & paper.canaries
        roles = [nodes <= paper.real for nodes in order]
        assert roles == sorted(roles, reverse=True)
        lines.add(sum(roles))
        assert ("assert f(1) == 2" in paper.files["tests/test_a.py"]) is roles[1]
        assert ("assert f(2) == 4" in paper.files["tests/test_a.py"]) is roles[2]
    assert lines == {1, 2}


def test_of_a_single_test_a_mixed_paper_has_it_or_its_canary() -> None:
    roles = set()
    for seed in range(20):
        paper = Papers(SOURCES, ["tests/test_b.py::T::test_three"], random.Random(seed)).mixed()
        assert len(paper.real | paper.canaries) == 1
        roles.add(bool(paper.canaries))
    assert roles == {True, False}


def test_without_a_module_that_can_be_read_there_is_no_canary() -> None:
    none = Papers({"a.py": "def ("}, ["a.py::test_a", "b.py::test_b"], random.Random(1))
    assert none.guarded == frozenset()
    assert none.false() == Paper()
    assert none.mixed() == none.plain()


def test_where_rows_are_changed_no_row_may_pass() -> None:
    source = "@pytest.mark.parametrize('x, y', [(1, 2), (2, 4)])\ndef test_it(x, y):\n    assert f(x) == y\n"
    paper = Papers({"a.py": source}, ["a.py::test_it[1-2]", "a.py::test_it[2-4]"], random.Random(1)).false()
    assert paper.canaries == {"a.py::test_it"}


def test_canaries_are_drawn_anew() -> None:
    made = papers(1)
    assert len({str(made.false().files) for _ in range(10)}) > 1


def test_node_ids_have_a_module_and_a_name() -> None:
    assert module_of("a/b.py::T::test_c[d::e]") == "a/b.py"
    assert name_of("a/b.py::T::test_c[d::e]") == "T::test_c"
