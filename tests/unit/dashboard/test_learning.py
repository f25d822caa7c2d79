"""The report distinguishes a run that does not learn from one that does, and names the likely cause."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import pytest

from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.dashboard.learning import declined, failing_alike, nothing_learnt, warnings, without_signal
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.text import render_line
from etude.telemetry.events import Logged, PhaseStarted, RolloutClosed, StepDone, WeightsPublished
from steps import changed, step_done

VAIN = step_done(
    1, busy_s=3.0, wait_s=1.0, reward_mean=0.0, reward_low=0.0, reward_high=0.0, groups=4, groups_without_signal=4,
    loss_tokens=0, trained_tokens=0, staleness_sum=0, staleness_tokens=100, staleness_max=1, mismatch_tokens=0,
    ended={"submit": 16},
)  # fmt: skip
LEARNT = changed(VAIN, groups_without_signal=3, reward_high=1.0, loss_tokens=9, entropy=0.5, grad_norm=0.25)


def run_of(*steps: StepDone, digests: str = "") -> RunMetrics:
    """Steps numbered from 1, and versions from 0 with these digests, a letter each."""
    run = RunMetrics()
    run.add(Logged(at_s=0.0, process="run", event=PhaseStarted(phase="rl")))
    for number, step in enumerate(steps, 1):
        run.add(Logged(at_s=float(number), process="trainer", event=replace(step, step=number)))
    for version, digest in enumerate(digests):
        published = WeightsPublished(
            version=version, kind="delta", size_bytes=0, state_bytes=9, seconds=0.1, blocked_s=0.0, digest=digest
        )
        run.add(Logged(at_s=100.0 + version, process="trainer", event=published))
    return run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "every reward is 0: the tasks are too hard, or the harness does not fit"),
        ({"reward_low": 1.0, "reward_high": 1.0}, "every reward is 1: the tasks are too easy"),
        ({"reward_low": None, "reward_high": None}, "masked or quarantined"),
        ({"reward_high": 1.0}, "never within a group: raise rollouts.group_size"),
    ],
)
def test_three_steps_without_a_signal_are_said_with_the_likely_cause(
    changes: dict[str, float | None], words: str
) -> None:
    vain = changed(VAIN, number=None, **changes)
    steps = [replace(step, step=number) for number, step in enumerate([LEARNT, vain, vain, vain, vain], 1)]
    assert without_signal(steps[:3]) is None
    text = without_signal(steps[:4])
    assert text is not None
    assert text.startswith("no group has had a signal since step 2: ")
    assert words in text
    assert without_signal(steps) == text  # one warning, however long it goes on
    assert without_signal([*steps, LEARNT]) is None


def test_rollouts_that_run_out_of_tokens_are_the_likely_cause() -> None:
    cut = [replace(VAIN, ended={"length": 15, "submit": 1})] * 3
    assert "94% of rollouts were cut off by length: raise harness.options.max_tokens" in (without_signal(cut) or "")


def test_hints_teach_without_a_signal() -> None:
    distilled = changed(VAIN, hinted_tokens=5)
    assert without_signal([distilled] * 5) is None
    assert nothing_learnt(run_of(distilled)) is None


def test_a_run_has_learnt_nothing_without_a_signal_or_without_a_change_of_its_weights() -> None:
    assert nothing_learnt(run_of()) is None
    assert nothing_learnt(run_of(VAIN, LEARNT, digests="abc")) is None
    assert "none of 8 groups had a signal; every reward is 0" in (nothing_learnt(run_of(VAIN, VAIN)) or "")
    assert "no step changed the published weights" in (nothing_learnt(run_of(LEARNT, LEARNT, digests="aaa")) or "")
    assert nothing_learnt(run_of(LEARNT, LEARNT, digests="aab")) is None


def rewarded(*rewards: float, cut: Sequence[int] = ()) -> list[StepDone]:
    """Steps with these mean rewards and this number of 16 rollouts that were ended by length."""
    return [
        replace(changed(LEARNT, number=number, reward_mean=reward), ended={"submit": 16 - of_16, "length": of_16})
        for number, (reward, of_16) in enumerate(zip_longest(rewards, cut, fillvalue=0), 1)
    ]


COLLAPSED = (0.42, 0.5, 0.62, 0.74, 0.82, 0.84, 0.86, 0.85, 0.87, 0.86, 0.88, 0.86, 0.87, 0.88, 0.87,
             0.78, 0.7, 0.72, 0.75, 0.66, 0.71, 0.74, 0.69, 0.63, 0.66)  # fmt: skip
"""Mean rewards of a run whose policy collapsed after fifteen steps."""


def test_a_reward_that_falls_is_told_once_with_its_steps_and_what_helps() -> None:
    steps = rewarded(*COLLAPSED, cut=[0] * 15 + [4] * 10)
    assert declined(steps[:23]) is None
    text = declined(steps)
    assert text is not None
    assert text.startswith(
        "the mean reward fell from 0.86 in steps 5–14 to 0.72 in steps 15–24, more than chance explains; "
    )
    assert "; limits ended 0% of rollouts, now 22%. Lower " in text
    assert "`etude weights export RUN OUT --version 14` saves the weights of step 14" in text
    assert warnings(run_of(*steps)) == [text]
    assert declined([*steps, *rewarded(*[0.68] * 7)][:32]) == declined(steps), "it stays the same"
    assert declined([*steps, *rewarded(*[0.9] * 10)]) is None, "it recovered"


def test_a_report_says_that_the_reward_fell(config: RunConfig) -> None:
    report = build_report(run_of(*rewarded(*COLLAPSED)), config, machine={}, date="today", commit="")
    learning = report["learning"]
    assert isinstance(learning, dict)
    assert learning["warning"] == declined(rewarded(*COLLAPSED))


def test_steps_without_a_graded_rollout_are_no_decline() -> None:
    masked = changed(VAIN, reward_low=None, reward_high=None)
    assert declined([*rewarded(*[0.9] * 10), *[masked] * 10]) is None


def test_a_report_has_what_there_was_to_learn_from(config: RunConfig) -> None:
    cut = replace(VAIN, ended={"length": 12, "turns": 4})
    run = run_of(LEARNT, cut, digests="abb")
    report = build_report(run, config, machine={}, date="today", commit="")
    assert report["learning"] == {
        "groups": 8,
        "groups_without_signal": 7,
        "groups_resampled": 0,
        "ended": {"submit": 16, "length": 12, "turns": 4},
        "cut_short": 0.5,
        "versions_unchanged": 1,
        "warning": None,
        "nothing_learnt": None,
    }
    curve = report["curve"]
    assert isinstance(curve, list)
    first, second = (row for row in curve if isinstance(row, dict))
    assert (first["grad_norm"], first["weights_changed"], first["groups_without_signal"]) == (0.25, True, 3)
    assert (second["grad_norm"], second["weights_changed"]) == (None, False)
    assert number_at(second, "groups") == 4


def test_a_line_has_no_entropy_of_nothing(config: RunConfig) -> None:
    vain, learnt = (render_line(run_of(step), config, 2.0) for step in (VAIN, changed(LEARNT, reward_std=0.25)))
    assert "signal in 0 of 4 groups, ended submit 100%, spread –, grad norm –, entropy –," in vain
    assert "signal in 1 of 4 groups, ended submit 100%, spread 0.250, grad norm 0.25, entropy 0.500," in learnt


def failing(*reasons: str, status: str = "failed_infra") -> RunMetrics:
    run = RunMetrics()
    for at_s, reason in enumerate(reasons):
        closed = RolloutClosed(
            rollout_id="r", purpose="train", group_index=0, status="graded" if reason == "submit" else status,
            reason=reason, reward=None, turns=0, sampled_tokens=0, seconds=1.0,
        )  # fmt: skip
        run.add(Logged(at_s=float(at_s), process="rollouts", event=closed))
    return run


def test_a_harness_that_dies_alike_three_times_is_named_with_its_last_words() -> None:
    dies = [
        f"InfrastructureError: no turn (exit 1); it printed: port {port} ImportError: nowhere" for port in (1, 2, 3)
    ]
    assert failing_alike(failing(*dies[:2])) is None
    text = failing_alike(failing(*dies))
    assert text is not None
    assert text.startswith("3 rollouts in a row failed alike")
    assert text.endswith("ImportError: nowhere")
    assert warnings(failing(*dies)) == [text]
    assert failing_alike(failing(*dies, "submit")) is None, "one was graded since"
    assert failing_alike(failing(*dies[:2], "SandboxError: gone")) is None
    assert failing_alike(failing(*["EngineUnavailable: no answer"] * 3)) is None, "that is an outage"
