"""The text of a bench object: rows under their headings, goals in words, each reason once."""

from bench.report import Goal
from bench.tables import draw, page, results_of, results_page
from etude.types import Json

FASTER = Goal("faster", "at least", 2.0, "Speed over theirs.")


def result(**figures: Json) -> dict[str, Json]:
    rows: list[Json] = [
        {"case": "small", "contestant": "ours", "per_s": 9.5, "peak_bytes": 2_500_000, "range": [9, 10]},
        {"case": "large", "contestant": "ours", "per_s": 1.0, "peak_bytes": None, "range": None},
        {"case": "small", "contestant": "theirs", "per_s": 3.0, "peak_bytes": 4e9, "range": [3, 3]},
    ]
    goals: dict[str, Json] = {
        "faster": FASTER.judge_worst({"small": 3.1667, "large": 1.5}),
        "never": FASTER.judge(None),
    }
    return {"bench": "race", "date": "2026-01-01", "commit": "abc", "results": rows, "goals": goals, **figures}


def test_rows_stand_under_the_heading_that_they_share() -> None:
    lines = [line.strip(" │┃") for line in results_page(result(), ("contestant", "per_s"), under="case").splitlines()]
    order = [line.split()[0] for line in lines if line.startswith(("small", "large", "ours", "theirs"))]
    assert order == ["small", "ours", "theirs", "large", "ours"]


def test_values_are_shown_by_what_they_are() -> None:
    shown = results_page(result(), ("contestant", "peak_bytes", "range", "absent"), "quick")
    assert "bench race · quick · 2026-01-01 · abc" in shown
    assert "2.5 MB" in shown
    assert "4e+03 MB" in shown
    assert "9 … 10" in shown
    assert "bytes" not in shown
    assert "None" not in shown


def test_goals_say_what_was_reached_and_whether_that_is_enough() -> None:
    shown = page(result()).splitlines()
    assert shown[0] == "faster: 1.5, goal at least 2.0, NOT met, each small 3.167 · large 1.5"
    assert shown[1] == "never: not measured, goal at least 2.0, NOT met, reason nothing to compare was measured"


def test_who_is_missing_is_told_once_with_the_reason() -> None:
    absent: list[Json] = [{"contestant": "[theirs]", "missing": "not installed"}] * 2
    shown = page(result(results=absent), notes=["links: 3 [of 4]"]).splitlines()
    assert shown[2:] == ["links: 3 [of 4]", "[theirs]: not installed"]


def test_tables_of_other_rows_are_drawn_alike() -> None:
    drawing = draw("swaps", results_of({"swaps": [{"case": "a", "pause_s": 0.1}]}, "swaps"), ("case", "pause_s"))
    assert "0.1" in page(result(), drawing)


def test_bytes_of_several_places_are_shown_one_by_one() -> None:
    rows: list[Json] = [{"contestant": "ours", "region_bytes": [1_500_000, 2_000_000], "missing": None}]
    assert "1.5 MB … 2 MB" in results_page(result(results=rows), ("contestant", "region_bytes"))
