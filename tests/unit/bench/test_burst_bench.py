"""`bench burst`: no request is lost where hosts go down, bursts of one seed are the same, goals follow the figures."""

from dataclasses import replace

import pytest

from bench.burst.bench import (
    QUICK,
    TROUBLE,
    WELL,
    BurstFigures,
    BurstOptions,
    bench_burst,
    judged,
    plans,
    rows_of,
    table,
)
from bench.burst.burst import BurstPlan, BurstResult, play_burst
from bench.burst.choices import measure_choices
from bench.burst.model import MachineModel
from etude.errors import UserError
from etude.sandboxes.remote.hosts import USUAL_TIMES

MACHINE = MachineModel(places=40, cores=2, starts_s=(0.03, 0.05), memory_bytes=40 * (80 << 20))
PLAN = BurstPlan(requests=240, machines=12, machine=MACHINE, request_s=0.001, images=12, use_s=30.0)


def test_all_run_at_once_where_nothing_goes_wrong() -> None:
    result = play_burst(PLAN)
    assert (result.served, result.lost, result.failed, result.most_running) == (240, 0, 0, 240)
    assert len(result.queue_times_s) == 240
    assert min(result.queue_times_s) >= PLAN.read_s, "no sandbox starts before its image was read"
    assert result.fewest_reads <= result.reads < 4 * result.fewest_reads, "images stay on few hosts"


def test_what_was_on_a_host_that_goes_down_is_served_elsewhere() -> None:
    plan = replace(PLAN, failing=0.25, read_s=4.0, streams=4)
    result = play_burst(plan)
    assert result.failed > 0
    assert (result.served, result.lost) == (240, 0)
    assert max(result.queue_times_s) > max(play_burst(PLAN).queue_times_s)


def test_two_bursts_of_a_seed_are_the_same() -> None:
    plan = replace(PLAN, failing=0.25)
    first, second, other = play_burst(plan), play_burst(plan), play_burst(replace(plan, seed=1))
    assert first.queue_times_s == second.queue_times_s != other.queue_times_s


def test_a_machine_that_has_no_time_to_serve_all_makes_them_wait() -> None:
    short = play_burst(replace(PLAN, machines=4, use_s=10.0))  # 160 places
    assert (short.served, short.most_running <= 4 * MACHINE.places) == (240, True)
    assert max(short.queue_times_s) > 10.0 / 2


def test_what_a_busy_client_takes_for_its_requests_is_no_waiting_for_room() -> None:
    """Some clients with equal choices are refused and retry; their clients' own time does not count as queue time."""
    plan = replace(PLAN, requests=400, clients=4, request_s=0.8, images=3, use_s=60.0)
    result = play_burst(plan)
    assert max(result.queue_times_s) > USUAL_TIMES.room_s
    assert (result.served, result.failed) == (400, 0)


def test_goals_follow_the_figures() -> None:
    figures = BurstFigures(
        choices={"engine": 4.0, "host": 21.0},
        bursts={WELL: BurstResult(served=10), TROUBLE: BurstResult(served=9, lost=1)},
    )
    goals = judged(figures, 10)
    assert {name: (goal["value"], goal["met"]) for name, goal in goals.items() if isinstance(goal, dict)} == {
        "served": (9.0, False),
        "lost_requests": (1.0, False),
        "decision_us": (21.0, False),
    }
    sound = BurstFigures(choices={"host": 19.0}, bursts={WELL: BurstResult(served=10)})
    assert all(goal["met"] for goal in judged(sound, 10).values() if isinstance(goal, dict))


def test_what_cannot_be_measured_is_a_row_and_no_goal() -> None:
    figures = BurstFigures(choices={"host": 1.0}, missing={WELL: "no root"})
    assert {"contestant": "virtual burst", "case": WELL, "missing": "no root"} in list(rows_of(figures))
    served = judged(figures, 10)["served"]
    assert isinstance(served, dict)
    assert (served["met"], served["reason"]) == (False, "no root")


def test_the_second_burst_differs_by_what_goes_wrong() -> None:
    both = plans(QUICK, BurstFigures(starts_s=(0.1,), request_s=0.001))
    assert both[TROUBLE].failing > both[WELL].failing == 0
    assert both[TROUBLE].read_s > both[WELL].read_s


def test_choices_of_every_table_are_timed() -> None:
    choices = measure_choices(rounds=1, scale=0.005)
    assert len(choices) == 12
    assert all(us > 0 for us in choices.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [({"requests": 0}, "requests is 0"), ({"requests": 1_000, "hosts": 3}, "--hosts 20")],
)
def test_options_name_what_is_wrong(given: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BurstOptions(**given)


def test_the_bench_runs_whole() -> None:
    result = bench_burst(replace(QUICK, requests=80, alive=2))
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert set(goals) == {"served", "lost_requests", "decision_us"}
    drawn = table(result)
    assert "bursts in virtual time" in drawn
