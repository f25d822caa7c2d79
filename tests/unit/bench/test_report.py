"""Every bench prints where it was measured, and judges its goals in the same way."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bench.report import Goal, envelope, heading


def test_an_envelope_says_what_was_measured_where_and_when() -> None:
    result = json.loads(json.dumps(envelope("toy", 1.26, {"results": [], "goals": {}})))
    assert result["bench"] == "toy" and result["seconds"] == 1.3
    assert {"machine", "commit", "date", "results", "goals"} <= result.keys()
    assert heading(result, "small") == f"bench toy · small · {result['date']} · {result['commit']}"


def test_a_goal_is_met_from_its_own_value_on() -> None:
    least, most = Goal("least", "at least", 2.0, "Speed."), Goal("most", "at most", 1.5, "Seconds.")
    assert least.judge(2.0) == {"meaning": "Speed.", "value": 2.0, "goal": 2.0, "sense": "at least", "met": True}
    assert least.judge(1.9999)["met"] is False, "what is printed is rounded, what is judged is not"
    assert most.judge(1.5)["met"] is True and most.judge(1.6)["met"] is False


def test_a_goal_without_a_value_says_why_it_is_not_met() -> None:
    judged = Goal("most", "at most", 1.5, "Seconds.").judge_worst({}, "nobody came")
    assert (judged["value"], judged["met"], judged["reason"]) == (None, False, "nobody came")


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 9), min_size=1), st.floats(0, 9))
def test_the_worst_figure_decides(each: dict[str, float], bound: float) -> None:
    least, most = Goal("least", "at least", bound, "Speed."), Goal("most", "at most", bound, "Seconds.")
    assert least.judge_worst(each)["met"] is all(value >= bound for value in each.values())
    assert most.judge_worst(each)["met"] is all(value <= bound for value in each.values())
