"""HiddenTestPlanner: which tests are real in which, and that the modules agree with that."""

import random
from collections import Counter

import pytest

from etude.rewards.graders.test_runs import HiddenTestPlan, HiddenTestPlanner, module_of, name_of

SOURCES = {
    "tests/test_a.py": "def test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 4\n\n"
    "def test_other():\n    assert g() == 0\n",
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
    "tests/test_a.py::test_other",
)
ABOUT = 6
GUARDED = frozenset(MUST_PASS[:4])


def planner(seed: int, **more: object) -> HiddenTestPlanner:
    return HiddenTestPlanner(SOURCES, MUST_PASS, ABOUT, random.Random(seed), **more)  # type: ignore[arg-type]  # as each test has it


def test_a_real_plan_is_what_was_there() -> None:
    assert planner(1).real() == HiddenTestPlan(real=frozenset(MUST_PASS))
    assert planner(1).guarded == GUARDED


def test_in_mixed_papers_every_guarded_test_is_a_canary_by_a_coin_of_its_own() -> None:
    drawn: Counter[tuple[bool, ...]] = Counter()
    for seed in range(400):
        plan = planner(seed).mixed()
        assert plan.real | plan.canaries == frozenset(MUST_PASS)
        assert not plan.real & plan.canaries
        assert plan.canaries <= GUARDED
        assert set(MUST_PASS[:2]) <= plan.canaries or not set(MUST_PASS[:2]) & plan.canaries
        assert ("assert f(1) == 2" in plan.files["tests/test_a.py"]) is (MUST_PASS[3] in plan.real)
        assert ("assert f(2) == 4" in plan.files["tests/test_a.py"]) is (MUST_PASS[2] in plan.real)
        assert "assert g() == 0" in plan.files["tests/test_a.py"]
        drawn[tuple(node in plan.canaries for node in MUST_PASS[1:4])] += 1
    assert len(drawn) == 8
    assert all(25 <= count <= 80 for count in drawn.values())  # 50 each


def test_what_passes_anyway_or_was_seen_has_no_canary() -> None:
    """A canary there would reveal itself by failing, and so would a row of the same test."""
    others = HiddenTestPlanner(SOURCES, [*MUST_PASS[:1], *MUST_PASS[2:4], MUST_PASS[1]], 3, random.Random(1))
    assert others.guarded == {*MUST_PASS[2:4]}
    assert planner(1, idle={"tests/test_b.py::T::test_three", "tests/test_a.py::test_one"}).guarded == {MUST_PASS[2]}
    shown = {"tests/test_a.py": "import pytest\n\ndef test_one():\n    assert f(1) == 2\n"}
    assert planner(1, seen=shown).guarded == GUARDED - {MUST_PASS[3]}


def test_a_function_that_an_other_test_runs_too_has_no_canary() -> None:
    """An example is an inherited test: a change for one class would also fail the other."""
    source = "class A:\n    def test_it(self):\n        assert f(self.x) == 1\n"
    source += "    def test_more(self):\n        assert g() == 2\n"
    nodes = ["a.py::B::test_it", "a.py::B::test_more", "a.py::A::test_it"]
    made = HiddenTestPlanner({"a.py": source + "class B(A):\n    x = 2\n"}, nodes, 2, random.Random(1))
    assert made.guarded == {"a.py::B::test_more"}
    assert all("f(self.x) == 1" in made.mixed().files["a.py"] for _ in range(20))


@pytest.mark.parametrize(("tests", "count"), [(1, 6), (2, 6), (3, 4), (4, 3), (12, 3), (60, 3)])
def test_the_fewer_tests_the_more_papers(tests: int, count: int) -> None:
    text = "".join(f"def test_{number}():\n    assert f() == {number}\n\n" for number in range(tests))
    nodes = [f"a.py::test_{number}" for number in range(tests)]
    assert HiddenTestPlanner({"a.py": text}, nodes, tests, random.Random(1)).mixed_plans == count


def test_without_a_module_that_can_be_read_there_is_no_canary() -> None:
    none = HiddenTestPlanner({"a.py": "def ("}, ["a.py::test_a", "b.py::test_b"], 2, random.Random(1))
    assert (none.guarded, none.mixed_plans) == (frozenset(), 0)
    assert none.mixed() == none.real()


def test_where_rows_are_changed_no_row_may_pass() -> None:
    source = "@pytest.mark.parametrize('x, y', [(1, 2), (2, 4)])\ndef test_it(x, y):\n    assert f(x) == y\n"
    made = HiddenTestPlanner({"a.py": source}, ["a.py::test_it[1-2]", "a.py::test_it[2-4]"], 2, random.Random(1))
    assert {"a.py::test_it"} in [made.mixed().canaries for _ in range(20)]


def test_canaries_are_drawn_anew() -> None:
    made = planner(1)
    assert len({str(made.mixed().files) for _ in range(20)}) > 8


def test_node_ids_have_a_module_and_a_name() -> None:
    assert module_of("a/b.py::T::test_c[d::e]") == "a/b.py"
    assert name_of("a/b.py::T::test_c[d::e]") == "T::test_c"
