"""A fleet whose number of engines follows the trainer: decisions from events, and others' changes meanwhile."""

import pytest

from etude.config.fleet import FleetConfig, RegionConfig, ScalingConfig
from etude.dashboard.run_metrics import RunMetrics
from etude.fleet.scaling import ScalingLimits
from etude.run.fleet_changes import EngineScaler
from etude.telemetry.events import EngineStats, Logged, PhaseStarted
from steps import step_done

SETTLE = ScalingLimits().settle
SCALING = ScalingConfig(most=8, cost_per_hour=2.5)


def fleet(engines: int, cost_per_hour: float = 0.0) -> FleetConfig:
    region = RegionConfig(name="eu", engines=engines, scaling=SCALING)
    return FleetConfig(home="eu", regions=(region,), cost_per_hour=cost_per_hour)


class Played:
    """A run that takes steps, and the fleets that it was changed to."""

    def __init__(self, of: FleetConfig) -> None:
        self.metrics = RunMetrics()
        self.metrics.add(Logged(at_s=0.0, process="supervisor", event=PhaseStarted(phase="rl")))
        self.followed = of
        self.fleets, self.messages = list[FleetConfig](), list[str]()
        self.scaler = EngineScaler(of, self.fleets.append, self.messages.append)
        self._steps = 0

    def step(self, wait_s: float, busy_share: float, engines: int) -> None:
        self._steps += 1
        at_s = 10.0 * self._steps
        for replica in range(engines):
            stats = EngineStats(busy_s=10 * busy_share, window_s=10.0, generated_tokens=1, prefill_tokens=1,
                                reused_tokens=0, running=1, waiting=0)  # fmt: skip
            self.metrics.add(Logged(at_s=at_s, process=f"serve-{replica}", event=stats))
        done = step_done(self._steps, busy_s=10.0 - wait_s, wait_s=wait_s)
        self.metrics.add(Logged(at_s=at_s, process="train", event=done))
        self.scaler.look(self.metrics, self.followed)


def engines_of(fleets: list[FleetConfig]) -> list[int]:
    return [each.regions[0].engines for each in fleets]


def test_engines_are_added_while_the_trainer_waits_and_people_are_told() -> None:
    run = Played(fleet(2))
    for _ in range(2 * SETTLE):
        run.step(wait_s=5.0, busy_share=1.0, engines=2)
    assert engines_of(run.fleets) == [4, 8]
    assert run.messages == ["engines: eu 2 → 4, 10 an hour", "engines: eu 4 → 8, 20 an hour"]
    assert run.fleets[0].regions[0].scaling == SCALING


def test_a_budget_bounds_them() -> None:
    run = Played(fleet(2, cost_per_hour=7.5))
    for _ in range(2 * SETTLE):
        run.step(wait_s=5.0, busy_share=1.0, engines=2)
    assert engines_of(run.fleets) == [3]


def test_a_change_by_hand_is_gone_on_from_and_ones_own_is_not_taken_for_one() -> None:
    run = Played(fleet(2))
    for _ in range(SETTLE):
        run.step(wait_s=5.0, busy_share=1.0, engines=2)
    run.followed = run.fleets[0]
    for _ in range(SETTLE - 1):
        run.step(wait_s=5.0, busy_share=1.0, engines=4)
    run.followed = fleet(1)
    for _ in range(SETTLE):
        run.step(wait_s=5.0, busy_share=1.0, engines=1)
    assert engines_of(run.fleets) == [4, 2]


def test_steps_of_which_no_engine_has_told_change_nothing() -> None:
    run = Played(fleet(2))
    for _ in range(3 * SETTLE):
        run.step(wait_s=5.0, busy_share=1.0, engines=0)
    assert run.fleets == []


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"engines": 9, "scaling": SCALING}, r"engines = 9 is not within its \[regions\.scaling\], 1 to 8"),
        ({"engines": 2, "lent_engines": 1, "scaling": SCALING}, "whose machines are not the run's to give up"),
    ],
)
def test_a_region_that_cannot_scale_is_refused(keys: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        RegionConfig.model_validate({"name": "eu"} | keys)


@pytest.mark.parametrize("launcher", ["kubernetes", "slurm"])
def test_where_files_say_what_runs_nothing_scales_by_itself(launcher: str) -> None:
    region = RegionConfig(name="eu", engines=1, scaling=SCALING)
    with pytest.raises(ValueError, match=rf"regions\.scaling has no effect with launcher = '{launcher}'"):
        FleetConfig(home="eu", regions=(region,), launcher=launcher)
    with pytest.raises(ValueError, match=r"regions\.scaling has no effect"):
        fleet(1).check_automatic(launcher)


def test_bounds_without_a_most_are_refused() -> None:
    with pytest.raises(ValueError, match=r"regions\.scaling\.fewest would have no effect with most = 0"):
        ScalingConfig(fewest=2)
    with pytest.raises(ValueError, match=r"fewest = 3 is more than most = 2"):
        ScalingConfig(fewest=3, most=2)
