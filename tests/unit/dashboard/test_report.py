"""The report's arithmetic; unknown values stay unknown."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from etude.config.recipe import EvalConfig, RunConfig
from etude.dashboard.formatting import number_at, percent
from etude.dashboard.heldout import about_errors, comparison, full_marks
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.text import summary
from etude.telemetry.events import EvalDone, Event, HeldoutLoss, JudgeAlarm, Logged, PhaseEnded
from etude.telemetry.metrics import METRICS
from etude.types import Json
from evaluations import evaluation
from steps import changed, step_done

STEP = step_done(
    1, busy_s=3.0, wait_s=1.0, reward_mean=0.5, groups_without_signal=0, loss_tokens=100, trained_tokens=300,
    grad_norm=1.0, entropy=0.3, truncated_share=0.0, masked_share=0.0, staleness_sum=50, staleness_tokens=100,
    staleness_max=1,
    mismatch_tokens=10, k1=0.0, k3=1e-6, mismatch_p99=0.001, mismatch_max=0.002,
    mismatch_equal=4, mismatch_pairs=60, mismatch_flips=3, replayed_pairs=500, replaced_pairs=1, groups=8,
)  # fmt: skip


def test_the_held_out_gain_has_the_error_of_a_difference(report: dict[str, Json]) -> None:
    assert (number_at(report, "heldout.pass_before"), number_at(report, "heldout.pass_after")) == (0.3125, 0.6719)
    gained = [*[2] * 1, *[3] * 7]  # tasks of each of the eight templates that fail before and pass afterwards
    deviations = [tasks - sum(gained) / 8 for tasks in gained]
    expected = math.sqrt(8 / 7 * sum(each**2 for each in deviations)) / 64
    assert number_at(report, "heldout.stderr") == pytest.approx(expected, abs=1e-4)
    assert (number_at(report, "heldout.n"), number_at(report, "heldout.templates")) == (64, 8)
    heldout = report["heldout"]
    assert isinstance(heldout, dict)
    low, high = (23 / 64 + side * 2.364624 * expected for side in (-1, 1))
    assert heldout["interval"] == pytest.approx([low, high], abs=1e-4)
    assert (heldout["pays_fractions"], heldout["passed_before"], heldout["passed_after"]) == (False, 20, 43)
    assert heldout["reward_before"] == heldout["pass_before"]
    assert heldout["greedy_passed_after"] == 46
    shown = comparison(report, "sampled")
    assert shown.interval is not None and [*shown.interval] == heldout["interval"]
    assert (shown.error(0.0412), shown.error(None)) == ("4.1", "–")
    assert "over 8 templates;" in about_errors(report)


def test_a_grader_of_fractions_has_mean_rewards_and_passes_beside(config: RunConfig) -> None:
    events = [evaluation(label, 0, passed, 8, paid=0.405) for label, passed in (("before", 8), ("after", 16))]
    unpaid = [replace(event, sampled_passed=[False] * 64, greedy_passed=[None] * 64) for event in events]
    report = _report_of(unpaid, config)
    assert number_at(report, "heldout.reward_after") == pytest.approx(0.405 / 4, abs=1e-4)
    assert number_at(report, "heldout.passed_after") == 0
    assert (number_at(report, "heldout.reward_stderr") or 0) > 0.1  # that all eight templates gain alike may be chance
    gained = comparison(report, "sampled")
    assert (gained.is_rate, gained.value(gained.after), gained.change(gained.gain)) == (False, "0.101", "+0.051")
    assert full_marks(report, "sampled") == "full marks: 0 → 0"
    half = _report_of(unpaid, config.model_copy(update={"eval": EvalConfig(pass_at=0.5)}))
    assert full_marks(half, "sampled") == "0.5 or better: 0 → 0"


def test_what_was_not_tried_twice_is_in_no_difference(config: RunConfig) -> None:
    before, after = evaluation("before", 0, 8, 8), evaluation("after", 0, 16, 8)
    lost = replace(before, sampled_passed=[*before.sampled_passed[:-1], None], tasks=63)
    section = _report_of([lost, after], config)["heldout"]
    assert isinstance(section, dict)
    assert section["stderr"] is not None
    assert section["greedy_stderr"] is not None
    alone = _report_of([before], config)["heldout"]
    assert isinstance(alone, dict)
    assert (alone["stderr"], alone["interval"], alone["pass_after"]) == (None, None, None)
    assert (alone["n"], alone["templates"], alone["pays_fractions"]) == (64, 8, False)
    assert (about_errors({"heldout": alone}), comparison({"heldout": alone}, "sampled").interval) == ("", None)


def test_a_gain_is_over_the_tasks_of_its_interval(config: RunConfig) -> None:
    """Seven of the eight tasks that passed before are missing afterwards: of the 57 others, 8 more pass."""
    before, after = evaluation("before", 0, 8, 8), evaluation("after", 0, 16, 8)
    lost = replace(after, sampled_passed=[*[None] * 7, *after.sampled_passed[7:]], sampled_pass=9 / 57)
    report = _report_of([before, lost], config)
    gained = comparison(report, "sampled")
    assert (gained.before, gained.after) == (0.125, 0.1579)
    assert gained.gain == pytest.approx(8 / 57, abs=1e-4)
    assert gained.interval is not None and sum(gained.interval) / 2 == pytest.approx(8 / 57, abs=1e-4)
    greedy = comparison(report, "greedy")
    assert greedy.gain == 0


def test_errors_are_over_tasks_where_each_has_a_template_of_its_own(config: RunConfig) -> None:
    own = [f"template-{task}" for task in range(64)]
    events = [
        replace(evaluation(label, 0, passed, 8), clusters=own) for label, passed in (("before", 8), ("after", 16))
    ]
    assert "over 64 tasks;" in about_errors(_report_of(events, config))


def test_calls_of_each_turn_are_rounded_shares(config: RunConfig) -> None:
    calls = [{"read": 0.512345, "submit": 0.25}, {"submit": 1.0}]
    section = _report_of([replace(evaluation("before", 0, 8, 8), sampled_calls=calls)], config)["heldout"]
    assert isinstance(section, dict)
    assert section["calls_before"] == [{"read": 0.5123, "submit": 0.25}, {"submit": 1.0}]
    assert (section["greedy_calls_before"], section["calls_after"]) == ([], None)


def test_evaluations_of_other_tasks_are_not_paired(config: RunConfig) -> None:
    before, after = evaluation("before", 0, 8, 8), evaluation("after", 0, 16, 8)
    strange = replace(after, clusters=after.clusters[::-1])
    section = _report_of([before, strange], config)["heldout"]
    assert isinstance(section, dict)
    assert (section["pass_before"], section["pass_after"], section["stderr"]) == (0.125, 0.25, None)


def test_each_kind_of_template_has_its_rates(config: RunConfig) -> None:
    before, after = evaluation("before", 0, 8, 0), evaluation("after", 0, 16, 64)
    names = [f"arith|{index}" for index in range(32)] + [f"comp|{index}" for index in range(32)]
    report = _report_of([replace(event, clusters=names) for event in (before, after)], config)
    section = report["heldout"]
    assert isinstance(section, dict)
    assert isinstance(section["kinds"], list)
    first, second = section["kinds"]
    rates = {"pass_before": 0.0, "pass_after": 0.0, "greedy_before": 0.0, "greedy_after": 1.0}
    assert first == {"kind": "arith", "n": 32} | rates | {"pass_before": 0.25, "pass_after": 0.5}
    assert second == {"kind": "comp", "n": 32} | rates
    assert dict(summary(report))["arith"] == "sampled 25.0% → 50.0%, greedy 0.0% → 100.0% of 32 tasks"
    of_one = _report_of([before, after], config)["heldout"]
    assert isinstance(of_one, dict) and of_one["kinds"] == []


def test_an_evaluation_of_an_older_log_has_its_rates(config: RunConfig) -> None:
    old = [
        EvalDone(
            label=label, version=0, tasks=4, sampled_pass=rate, sampled_stderr=0.1, greedy_pass=0.5, greedy_stderr=0.2
        )
        for label, rate in (("before", 0.25), ("after", 0.75))
    ]
    report = _report_of(old, config)
    assert (number_at(report, "heldout.pass_before"), number_at(report, "heldout.pass_after")) == (0.25, 0.75)
    assert number_at(report, "heldout.stderr") is None


def test_time_leaves_the_interruption_out(report: dict[str, Json]) -> None:
    parts = [number_at(report, f"seconds.{phase}") or 0 for phase in ("midtrain", "rl", "eval")]
    assert number_at(report, "seconds.total") == pytest.approx(sum(parts), abs=0.2)
    assert parts == pytest.approx([180, 500, 84], abs=1)
    assert (number_at(report, "interruptions"), number_at(report, "restarts")) == (1, 1)


def test_rollouts_of_evaluations_are_not_training(report: dict[str, Json]) -> None:
    assert report["rollouts"] == {"graded": 40 * 64 - 5, "failed_infra": 5, "dropped": 0}
    assert number_at(report, "tokens.kept") == 40 * 64 * 130
    assert (number_at(report, "tokens.generated") or 0) % 1900 == 0


def test_busy_shares_are_of_the_rl_phase(report: dict[str, Json]) -> None:
    trainer, engine = number_at(report, "busy.trainer"), number_at(report, "busy.engine")
    assert trainer == pytest.approx((9.4 + 0.5) / 12.5, abs=0.02)
    assert engine == pytest.approx(2.25 / 2.5, abs=0.02)
    ratio = number_at(report, "compute_ratio_inference_to_training")
    assert ratio == pytest.approx((engine or 0) / (trainer or 1), abs=0.01)


def test_every_held_out_measurement_is_in_one_curve(config: RunConfig) -> None:
    losses = [
        HeldoutLoss(phase="midtrain", step=step, tokens=step, loss=2.0 - step, action_loss=0.5, sources={"code": 1.0})
        for step in (1, 0)
    ]
    rates = [
        EvalDone(
            label=label, version=version, tasks=4, sampled_pass=0.5, sampled_stderr=0.25, greedy_pass=0.5,
            greedy_stderr=0.25,
        )
        for label, version in (("after", 40), ("before", 0), ("step-20", 21))
    ]  # fmt: skip
    ended = PhaseEnded(phase="midtrain", steps=1, tokens=1, loss=1.0, digest="b", parent="a")
    report = _report_of([*losses, *rates, ended], config)
    curve = report["heldout_curve"]
    assert isinstance(curve, list)
    assert [(row["phase"], row["step"]) for row in curve if isinstance(row, dict)] == [
        ("midtrain", 0), ("midtrain", 1), ("rl", 0), ("rl", 21), ("rl", 40),
    ]  # fmt: skip
    assert isinstance(report["lineage"], list)
    assert report["lineage"][0] == {
        "phase": "midtrain", "steps": 1, "tokens": 1, "loss": 1.0, "digest": "b", "parent": "a",
    }  # fmt: skip


def test_what_summaries_keep_stands_beside_the_pass_rates(config: RunConfig) -> None:
    rates = [
        EvalDone(
            label=label, version=version, tasks=4, sampled_pass=0.5, sampled_stderr=0.25, greedy_pass=0.5,
            greedy_stderr=0.25, sampled_parts={"facts_seen": 8.0, "facts_kept": remaining},
        )
        for label, version, remaining in (("before", 0, 4.0), ("after", 40, 7.0))
    ]  # fmt: skip
    alarm = JudgeAlarm(kind="model", aspect="", detail="another one")
    report = _report_of([*rates, alarm], config)
    assert (number_at(report, "heldout.recall_before"), number_at(report, "heldout.recall_after")) == (0.5, 0.875)
    assert dict(summary(report))["summaries"].startswith(f"keep {percent(0.5)} → {percent(0.875)} of")
    assert report["judge_alarms"] == [{"kind": "model", "aspect": "", "detail": "another one"}]
    without = _report_of([], config)
    assert number_at(without, "heldout.recall_after") is None
    assert "summaries" not in dict(summary(without))


def test_means_are_weighted_by_tokens(config: RunConfig) -> None:
    heavy = changed(
        STEP, number=2, staleness_sum=600, staleness_tokens=300, staleness_max=2, mismatch_tokens=30, k3=5e-6,
        mismatch_p99=0.005,
    )  # fmt: skip
    report = _report_of([STEP, heavy], config)
    assert number_at(report, "staleness.mean") == 650 / 400
    assert (number_at(report, "staleness.max"), number_at(report, "staleness.bound")) == (
        2,
        config.rollouts.max_staleness,
    )
    assert number_at(report, "mismatch.k3") == pytest.approx(4e-6)
    assert (number_at(report, "mismatch.p99"), number_at(report, "mismatch.p99_worst")) == (0.004, 0.005)
    assert number_at(report, "mismatch.coverage") == 40 / 400  # of all sampled tokens


def test_the_mismatch_tells_bits_flips_and_the_worst(config: RunConfig) -> None:
    heavy = changed(STEP, number=2, mismatch_tokens=30, mismatch_max=0.5, mismatch_equal=30, mismatch_pairs=180)
    report = _report_of([STEP, heavy], config)
    assert number_at(report, "mismatch.max") == 0.5
    assert number_at(report, "mismatch.equal") == 34 / 40
    assert number_at(report, "mismatch.flips") == pytest.approx(6 / 240)
    assert number_at(report, "mismatch.warnings") == 0


def test_nearly_all_is_never_rounded_to_all(config: RunConfig) -> None:
    nearly = changed(STEP, mismatch_tokens=1_000_000, mismatch_equal=999_999)
    assert number_at(_report_of([nearly], config), "mismatch.equal") == 0.9999


def test_the_breakdown_of_all_steps_is_one_table(report: dict[str, Json]) -> None:
    section = report["mismatch"]
    assert isinstance(section, dict)
    positions, versions = section["by_position"], section["by_version"]
    assert isinstance(positions, list)
    assert isinstance(versions, list)
    assert [(number_at(row, "first"), number_at(row, "last")) for row in positions if isinstance(row, dict)] == [
        (0, 0), (1, 7), (8, 31), (32, None)
    ]  # fmt: skip
    first, newest = positions[0], versions[-1]
    assert isinstance(first, dict)
    assert isinstance(newest, dict)
    assert (first["tokens"], first["flips"]) == (40 * 24, None)
    assert (newest["first"], newest["tokens"]) == (39, 832)
    assert newest["flips"] == pytest.approx(40 / (6 * 832), rel=1e-3)
    assert section["warnings"] == 1


def test_a_step_done_again_counts_its_mismatch_once(events: list[Logged], config: RunConfig) -> None:
    run = RunMetrics()
    for logged in [*events, *(one for one in events if type(one.event).__name__ == "MismatchMeasured")]:
        run.add(logged)
    section = build_report(run, config, machine={}, date="", commit="")["mismatch"]
    assert isinstance(section, dict)
    rows = section["by_position"]
    assert isinstance(rows, list)
    assert isinstance(rows[0], dict)
    assert rows[0]["tokens"] == 40 * 24


def test_a_step_without_comparison_has_no_mismatch(config: RunConfig) -> None:
    report = _report_of([changed(STEP, mismatch_tokens=0, k3=None)], config)
    assert number_at(report, "mismatch.k3") is None
    assert number_at(report, "mismatch.coverage") == 0
    curve = report["curve"]
    assert isinstance(curve, list)
    assert isinstance(curve[0], dict)
    assert curve[0]["k3"] is None


def test_nothing_known_is_null_not_zero(config: RunConfig) -> None:
    report = build_report(RunMetrics(), config, machine={}, date="today", commit="")
    for section in ("heldout", "seconds", "tokens", "busy", "mismatch", "weights", "rollouts"):
        values = report[section]
        assert isinstance(values, dict)
        assert set(values.values()) == {None}, section
    assert (report["curve"], number_at(report, "staleness.mean"), report["steps"]) == ([], None, 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.3, 0.5, 0.9])
def test_a_run_cut_short_anywhere_still_reports(share: float, events: list[Logged], config: RunConfig) -> None:
    run = RunMetrics()
    for event in events[: 1 + int(share * len(events))]:
        run.add(event)
    report = build_report(run, config, machine={}, date="today", commit="")
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["finished"] is False
    assert number_at(report, "heldout.stderr") is None


def test_the_curve_has_every_step_at_its_time_in_rl(report: dict[str, Json]) -> None:
    curve = report["curve"]
    assert isinstance(curve, list)
    seconds = [number_at(point, "seconds") or 0 for point in curve if isinstance(point, dict)]
    assert len(seconds) == 40
    assert seconds == sorted(seconds)
    assert seconds[0] == 11.5
    assert seconds[-1] <= (number_at(report, "seconds.rl") or 0)


def _report_of(events: Sequence[Event], config: RunConfig) -> dict[str, Json]:
    run = RunMetrics()
    for at_s, event in enumerate(events):
        run.add(Logged(at_s=float(at_s), process="trainer", event=event))
    return build_report(run, config, machine={}, date="today", commit="")


def test_every_metric_of_a_step_is_in_the_curve(config: RunConfig) -> None:
    curve = _report_of([changed(STEP, entropy=None)], config)["curve"]
    assert isinstance(curve, list)
    (row,) = curve
    assert isinstance(row, dict)
    assert row.keys() >= METRICS.keys()
    assert (row["entropy"], row["k3"], row["groups"]) == (None, 1e-6, 8)
