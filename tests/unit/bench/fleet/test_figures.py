"""``bench fleet``: the end of a fault, and figures computed from events."""

from dataclasses import replace

from bench.fleet.bench import summary, table
from bench.fleet.demo import RECIPE, DemoLog, fleet_toml, run_keys
from bench.fleet.figures import (
    FaultRecord,
    around_cut,
    busy_shares,
    recovery,
    served_lags,
    steps_beyond,
)
from bench.fleet.page import render_page
from bench.fleet.plan import EAST, EU, FaultKind, PlannedFault, short_plan, whole_plan
from bench.fleet.prediction import prediction
from etude.config.loading import load_recipe
from etude.simulation.calibration import RunCalibration, TrainerTimes
from etude.simulation.engine import EngineRates
from etude.simulation.run import RegionModel, simulate, skipped_steps
from etude.simulation.workload import RolloutWork, Workload
from etude.telemetry.events import EngineStats, Event, Logged, StepDone, WeightsPublished, WeightsSwapped

PLAN = short_plan()


def at(seconds: float, process: str, event: Event) -> Logged:
    return Logged(at_s=seconds, process=process, event=event)


def stats(seconds: float, process: str, tokens: int, busy_s: float = 0.5) -> Logged:
    return at(seconds, process, EngineStats(busy_s=busy_s, window_s=1.0, generated_tokens=tokens, prefill_tokens=0,
                                            reused_tokens=0, running=1, waiting=0))  # fmt: skip


def step(seconds: float, number: int, **metrics: float) -> Logged:
    return at(seconds, "train", StepDone(step=number, metrics=metrics))


def published(seconds: float, version: int, size_bytes: int = 1000) -> Logged:
    event = WeightsPublished(
        version=version, kind="delta", size_bytes=size_bytes, state_bytes=0, seconds=0.0, blocked_s=0.0
    )
    return at(seconds, "train", event)


def swapped(seconds: float, process: str, version: int) -> Logged:
    return at(seconds, process, WeightsSwapped(version=version, stage_ms=1.0, pause_ms=1.0))


def test_a_cut_is_over_when_the_region_samples_again_and_not_before_it_is_healed() -> None:
    cut = FaultRecord(fault=PlannedFault(kind=FaultKind.REGION_CUT, region="east", lasts_s=10.0), struck_s=100.0)
    events = [stats(102.0, "serve@east", 5), stats(110.5, "serve@east", 5), stats(112.0, "serve@eu", 5),
              stats(113.5, "serve@east", 5)]  # fmt: skip
    assert recovery(cut, events) is None  # it still lasts
    cut.healed_s = 110.0
    assert recovery(cut, events) == 113.5  # what was sampled partly before it was healed does not count
    cut.recovered_s = 113.5
    assert cut.over_s == 3.5


def test_each_fault_has_a_sign_that_it_is_over() -> None:
    events = [swapped(101.0, "serve@eu", 4), step(102.0, 5), stats(103.5, "serve@eu", 7)]
    expected = {
        FaultKind.RELAY_KILLED: 101.0,
        FaultKind.SUPERVISOR_KILLED: 102.0,
        FaultKind.TRAINER_NODE_LOST: 102.0,
        FaultKind.ENGINE_KILLED: 103.5,
        FaultKind.MACHINE_KILLED: 103.5,
    }
    for kind, over_s in expected.items():
        assert recovery(FaultRecord(fault=PlannedFault(kind=kind, region="eu"), struck_s=100.0), events) == over_s


def test_a_version_is_late_by_what_distance_and_size_do_not_explain() -> None:
    events = [stats(99.0, "serve@east", 1), stats(99.0, "serve@eu", 1)]
    events += [published(100.0, 1, 12_500_000), swapped(104.0, "serve@east", 1), swapped(105.0, "serve@eu", 2),
              published(110.0, 2), swapped(111.0, "serve@east", 2)]  # fmt: skip
    lags = served_lags(events, [], PLAN)
    assert lags["east"] == [4.0 - (2 * 0.02 + 1.0 + 2.0), 1.0 - (2 * 0.02 + 8e3 / 100e6 + 2.0)]
    assert lags["eu"] == [5.0 - (2 * 0.08 + 1.0 + 2.0)]  # a later version serves an earlier one, too
    fault = FaultRecord(
        fault=PlannedFault(kind=FaultKind.ENGINE_KILLED, region="east"), struck_s=103.0, recovered_s=106.0
    )
    assert len(served_lags(events, [fault], PLAN)["east"]) == 1


def test_shares_leave_out_the_time_of_faults() -> None:
    events = [step(0.0, 1), stats(1.0, "serve@east", 9, 0.8), stats(2.0, "serve@eu", 9, 0.4)]
    events += [stats(5.0, "serve@eu", 0, 0.0), step(9.0, 2, staleness_max=2.0), step(9.0, 3, staleness_max=1.0)]
    fault = FaultRecord(fault=PlannedFault(kind=FaultKind.MACHINE_KILLED, region="eu"), struck_s=4.0, recovered_s=6.0)
    assert busy_shares(events, [fault], PLAN) == {"east": 0.8, "eu": 0.4}
    assert steps_beyond(events, "staleness_max", 1.0) == 1


def test_the_others_are_compared_with_themselves_before_the_cut() -> None:
    cut = FaultRecord(
        fault=PlannedFault(kind=FaultKind.REGION_CUT, region="east", lasts_s=10.0), struck_s=100.0, healed_s=110.0
    )
    events = [stats(95.0, "serve@eu", 100), stats(96.0, "serve@east", 900), stats(105.0, "serve@eu", 95)]
    measured = around_cut(events, [cut], PLAN)
    assert measured is not None and (measured.before, measured.during, measured.share) == (10.0, 9.5, 0.95)
    late = PlannedFault(kind=FaultKind.MACHINE_KILLED, region="eu")
    assert around_cut(events, [FaultRecord(fault=late, struck_s=85.0, recovered_s=89.0), cut], PLAN) is not None
    assert around_cut(events, [FaultRecord(fault=late, struck_s=85.0, recovered_s=91.0), cut], PLAN) is None


def test_the_demo_has_a_link_for_each_pair_and_a_fleet_for_each_machine() -> None:
    plan = whole_plan()
    assert len(plan.shapes) == len(plan.sites) * (len(plan.sites) - 1) // 2
    assert plan.shapes["home", "eu"].rtt_s == EU.rtt_s
    assert plan.shapes["east", "eu"].rtt_s == EAST.rtt_s + EU.rtt_s
    assert plan.shapes["eu", "eu-2"].loss == 0
    assert fleet_toml(plan, "ray").count("[[regions]]") == 5


def test_what_was_not_measured_is_no_goal_met() -> None:
    result = summary(DemoLog(skipped=list(PLAN.faults), seconds=12.0), PLAN)
    goals = result["goals"]
    assert isinstance(goals, dict)
    missing = {name for name, goal in goals.items() if isinstance(goal, dict) and goal["value"] is None}
    assert missing >= {"wan_copies_per_region", "served_lag_s", "lost", "machine_lost_s", "back_after_cut_s"}
    assert not any(goal["met"] for name, goal in goals.items() if name in missing and isinstance(goal, dict))
    whole = result | {
        "launcher": "Ray",
        "bench": "fleet",
        "date": "2026-01-01",
        "commit": "abc",
        "machine": {},
        "page": "p.html",
    }
    assert "NOT met" in table(whole)
    assert "<h2>Regions</h2>" in render_page(whole)


def test_a_calm_demo_is_held_against_its_plan_and_one_with_faults_is_not() -> None:
    plan = replace(PLAN.calm, steps=10)
    config = load_recipe(RECIPE, run_keys(plan))
    rates = EngineRates(step_s=0.002, sequence_s=0.0001, prompt_s=0.00002, max_running=32)
    trainer = TrainerTimes(fixed_s=1.0, token_s=0.0, save_s=0.05, publish_s=0.1)
    work = RolloutWork(turns=2, sampled_tokens=30, prompt_tokens=100, sandbox_s=0.05, tools_s=0.2, grading_s=0.2)
    speeds = RunCalibration(engine=rates, trainer=trainer, swap_s=0.2, call_s=0.05, workload=Workload(((work, work),)))
    regions = [RegionModel(name=each.name, engines=1, rtt_s=each.rtt_s) for each in plan.regions]
    events = simulate(config, speeds, regions).all
    compared = prediction(DemoLog(events=events, status=0), plan)
    assert compared is not None and compared.measured.steps == plan.steps - 2 * skipped_steps(config)
    assert compared.step_time_error < 0.2
    assert prediction(DemoLog(events=events, status=0), PLAN) is None
    assert prediction(DemoLog(events=events), plan) is None
