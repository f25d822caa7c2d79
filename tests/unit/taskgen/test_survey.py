"""The flake gate, and which tests a change can reach."""

import pytest

from etude.taskgen.failures import NoTestsError, TestsFailError
from etude.taskgen.survey import Survey, survey_of
from etude.taskgen.testruns import RunObservation, RunOutcome


def seen(tests: dict[str, str], *, ended: str = "", seconds: float = 0.1, **more: object) -> RunObservation:
    outcomes = {test: RunOutcome(status=status, seconds=seconds, message="") for test, status in tests.items()}
    fields = {"errors": (), "reached": {}, "calls": {}, "results": (), "seconds": 1.0, "output": "said", **more}
    return RunObservation(tests=outcomes, ended=ended, **fields)  # type: ignore[arg-type]  # as a test says it


GOOD = {f"t.py::test_{number}": "passed" for number in range(6)}


def test_only_tests_that_always_pass_count() -> None:
    first = seen({**GOOD, "t.py::flaky": "passed", "t.py::bad": "failed", "t.py::skip": "skipped", "t.py::n": "passed"})
    second = seen({**GOOD, "t.py::flaky": "failed", "t.py::bad": "error", "t.py::skip": "skipped"})
    survey = survey_of([first, second], seen({}))
    assert survey.stable.keys() == GOOD.keys()
    assert survey.flaky == ("t.py::flaky", "t.py::n")
    assert (survey.failing, survey.skipped) == (("t.py::bad",), 1)


def test_slow_tests_and_ids_that_no_command_carries_are_left_out() -> None:
    odd = {"t.py::test[→]": "passed", "t.py::" + "x" * 300: "passed", "t.py::test[\\x00]": "passed"}
    survey = survey_of([seen({**GOOD, **odd})], seen({}))
    assert survey.stable.keys() == GOOD.keys()
    assert len(survey.unfit) == 3
    with_slow = survey_of([seen(GOOD), seen(GOOD, seconds=30.0)], seen({}))
    assert not with_slow.stable


def test_too_little_that_passes_is_an_error_with_its_log() -> None:
    with pytest.raises(NoTestsError, match="pytest found no test; 1 files") as none:
        survey_of([seen({}, errors=(("t.py", "ImportError: gone"),))], seen({}))
    assert "ImportError: gone" in none.value.log
    with pytest.raises(TestsFailError, match="0 of 6 tests pass every time"):
        survey_of([seen(dict.fromkeys(GOOD, "failed"))], seen({}))
    with pytest.raises(TestsFailError, match="ended with timeout"):
        survey_of([seen(GOOD), seen({}, ended="timeout")], seen({}))


def test_shared_fixtures_and_imports_widen_what_is_reached() -> None:
    tests = {"a.py::x": 0.1, "a.py::y": 0.2, "b.py::z": 0.4}
    reached = {"m.py:1": ("a.py::x",), "m.py:5": ("a.py",), "m.py:9": ("", "b.py::z")}
    survey = Survey(
        stable=tests, flaky=(), failing=(), skipped=0, unfit=(), broken=(), reached=reached, calls={"m.py:1": ("[1]",)}
    )
    assert survey.affected(["m.py:1"]) == {"a.py::x"}
    assert survey.affected(["m.py:5"]) == {"a.py::x", "a.py::y"}
    assert survey.affected(["m.py:9"]) == tests.keys()
    assert survey.affected(["m.py:2"]) == frozenset()
    assert survey.seconds(["a.py::x", "a.py::y"]) == pytest.approx(0.3)
    assert Survey.decode(survey.encode()) == survey
