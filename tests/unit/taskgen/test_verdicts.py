"""Rejected candidates and the reasons."""

from etude.taskgen.survey import Survey
from etude.taskgen.testruns import RunObservation, RunOutcome
from etude.taskgen.verdicts import Rejection, choose_tests, judge_quick, probe_cases, prove, refuse_unrun
from etude.types import Case, Json

TESTS = {f"t.py::test_{number}": 0.1 for number in range(40)}
SURVEY = Survey(stable=TESTS, flaky=(), failing=(), skipped=0, unfit=(), broken=(), reached={}, calls={})


def seen(*failing: str, ended: str = "", results: tuple[tuple[bool, Json], ...] = ()) -> RunObservation:
    tests = {
        test: RunOutcome(status="failed" if test in failing else "passed", seconds=0, message="") for test in TESTS
    }
    return RunObservation(
        tests=tests, errors=(), reached={}, calls={}, results=results, ended=ended, seconds=1.0, output=""
    )


def ids(*numbers: int) -> list[str]:
    return [f"t.py::test_{number}" for number in numbers]


def test_what_no_test_reaches_and_what_is_slow_is_not_run() -> None:
    slow = Survey(stable={"a": 40.0}, flaky=(), failing=(), skipped=0, unfit=(), broken=(), reached={}, calls={})
    assert refuse_unrun(SURVEY, ()) is Rejection.UNREACHED
    assert refuse_unrun(slow, ("a",)) is Rejection.SLOW
    assert refuse_unrun(SURVEY, ids(1)) is None


def test_a_quick_run_tells_survivors_hangs_and_the_unfocused() -> None:
    assert judge_quick(SURVEY, ids(1, 2), seen()) == (frozenset(), Rejection.SURVIVED)
    assert judge_quick(SURVEY, ids(1, 2), seen(ended="timeout"))[1] is Rejection.HANGS
    assert judge_quick(SURVEY, ids(1, 2), seen(*ids(1))) == (frozenset(ids(1)), None)
    assert judge_quick(SURVEY, list(TESTS), seen(*ids(*range(11))))[1] is Rejection.UNFOCUSED
    assert judge_quick(SURVEY, ids(1), seen(*ids(2)))[1] is Rejection.SURVIVED


def test_named_tests_are_hidden_ones_then_the_nearest_that_pass() -> None:
    about, others = choose_tests(SURVEY, ids(1, 2, 3), ids(1, 2), ids(1), "seed")
    assert about == tuple(ids(1))
    assert others[0] == "t.py::test_3"
    assert len(others) == 6
    assert not set(others) & set(ids(1, 2))


def test_a_proof_takes_every_run() -> None:
    about, others = ids(1, 2), ids(3, 4)
    proof = prove(about, others, [seen(*ids(1, 2)), seen(*ids(1, 2))], [seen(), seen()])
    assert (proof.about, proof.others, proof.rejection) == (tuple(about), tuple(others), None)
    sometimes = prove(about, others, [seen(*ids(1, 2)), seen(*ids(1))], [seen(), seen(*ids(4))])
    assert (sometimes.about, sometimes.others) == (("t.py::test_1",), ("t.py::test_3",))
    assert prove(about, others, [seen(), seen(*about)], [seen(), seen()]).rejection is Rejection.FLAKY
    assert prove(about, others, [seen(*about)] * 2, [seen(*about), seen()]).rejection is Rejection.UNSOLVED
    assert prove(about, others, [seen(*about)] * 2, [seen(ended="crash"), seen()]).rejection is Rejection.UNSOLVED
    assert prove(about, others, [seen(*about)] * 2, [seen(), seen(ended="timeout")]).rejection is Rejection.FAILED
    assert prove(about, others, [seen(ended="timeout")] * 2, [seen(), seen()]).rejection is Rejection.HANGS


def test_probes_are_calls_that_tell_and_are_always_the_same() -> None:
    calls: list[list[Json]] = [[1], [2], [3], [4]]
    right = seen(results=((True, 1), (True, 2), (False, "ValueError"), (True, 4)))
    other = seen(results=((True, 1), (True, 2), (False, "ValueError"), (True, 5)))
    broken = seen(results=((True, True), (True, 2), (True, 3), (True, 0)))
    assert probe_cases(calls, [right, other], [broken]) == (
        Case(arguments=(1,), expected=1),
        Case(arguments=(2,), expected=2),
    )
    assert probe_cases(calls, [right, right], [right]) == ()
    crashed = seen(ended="crash")
    assert len(probe_cases(calls, [right, right], [crashed])) == 3
