"""A fleet whose numbers follow the trainer: decisions from events, and others' changes meanwhile."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from etude.config.fleet import FleetConfig, FleetScaling, RegionConfig, RegionScaling, ReplicaBounds
from etude.dashboard.run_metrics import RunMetrics
from etude.fleet.scaling import WAITS, ScalingLimits
from etude.run.fleet_scaler import FleetScaler
from etude.run.process_name import ProcessName
from etude.telemetry.events import EngineStats, Event, GatewayStats, Logged, PhaseStarted, RolloutsStats
from steps import step_done

SETTLE = ScalingLimits().settle
BOUNDS = ReplicaBounds(most=8, cost_per_hour=2.5)
SCALING = RegionScaling(engines=BOUNDS)


def fleet(engines: int, cost_per_hour: float = 0.0) -> FleetConfig:
    region = RegionConfig(name="eu", engines=engines, scaling=SCALING)
    return FleetConfig(home="eu", regions=(region,), scaling=FleetScaling(cost_per_hour=cost_per_hour))


class Played:
    """A run that takes steps, and the fleets that it was changed to."""

    def __init__(self, of: FleetConfig) -> None:
        self.metrics = RunMetrics()
        self.metrics.add(Logged(at_s=0.0, process="supervisor", event=PhaseStarted(phase="rl")))
        self.followed = of
        self.fleets, self.messages = list[FleetConfig](), list[str]()
        self.scaler = FleetScaler(of, self.fleets.append, self.messages.append)
        self.scaler.look(self.metrics, of)
        self._steps = 0

    def step(
        self, wait_share: float, busy_share: float, engines: int, others: Sequence[tuple[str, Event]] = ()
    ) -> None:
        """A step of one second; ``others`` are reports of other processes."""
        self._steps += 1
        at_s = 1.0 * self._steps
        for replica in range(engines):
            stats = EngineStats(busy_s=busy_share, window_s=1.0, generated_tokens=1, prefill_tokens=1,
                                reused_tokens=0, running=1, waiting=0)  # fmt: skip
            self.metrics.add(Logged(at_s=at_s, process=f"serve-{replica}", event=stats))
        for process, event in others:
            self.metrics.add(Logged(at_s=at_s, process=process, event=event))
        done = step_done(self._steps, busy_s=1.0 - wait_share, wait_s=wait_share)
        self.metrics.add(Logged(at_s=at_s, process="train", event=done))
        self.scaler.look(self.metrics, self.followed)


def test_engines_are_added_while_the_trainer_waits_and_people_are_told() -> None:
    run = Played(fleet(2))
    for _ in range(2 * SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=2)
    assert run.fleets == [fleet(4), fleet(8)], "as if written by hand"
    assert run.messages == ["engines of eu: 2 → 4, 10 an hour", "engines of eu: 4 → 8, 20 an hour"]


def test_engines_that_have_nothing_to_do_go() -> None:
    run = Played(fleet(4))
    for _ in range(ScalingLimits().calm):
        run.step(wait_share=0.0, busy_share=0.0, engines=4)
    assert run.fleets == [fleet(1)]


@pytest.mark.parametrize("lag", range(SETTLE))
def test_it_goes_on_at_the_same_pace_whenever_its_changes_arrive(lag: int) -> None:
    run = Played(fleet(1))
    declared = [fleet(1)] * (lag + 1)
    for _ in range(3 * SETTLE):
        run.followed = declared[-lag - 1]
        run.step(wait_share=0.5, busy_share=1.0, engines=1)
        declared.append(run.fleets[-1] if run.fleets else fleet(1))
    assert run.fleets == [fleet(2), fleet(4), fleet(8)]


def test_steps_before_a_supervisor_was_started_again_say_nothing_about_its_fleet() -> None:
    run = Played(fleet(2))
    for _ in range(SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=2)
    restarted, fleets = FleetScaler(fleet(4), run.fleets.append, run.messages.append), [*run.fleets]
    restarted.look(run.metrics, fleet(4))
    assert run.fleets == fleets


def test_a_budget_bounds_them() -> None:
    run = Played(fleet(2, cost_per_hour=7.5))
    for _ in range(2 * SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=2)
    assert run.fleets == [fleet(3, cost_per_hour=7.5)]


def test_a_budget_is_for_processes_of_all_kinds() -> None:
    hosts = ReplicaBounds(most=8, cost_per_hour=1.0)
    region = RegionConfig(name="eu", engines=2, sandbox_hosts=1,
                          scaling=RegionScaling(engines=BOUNDS, sandbox_hosts=hosts))  # fmt: skip
    run = Played(FleetConfig(home="eu", regions=(region,), scaling=FleetScaling(cost_per_hour=9.5)))
    for _ in range(SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=2)
    assert run.messages == ["engines of eu: 2 → 3, 8.5 an hour"], "4 would cost 10 and the host of sandboxes 1"


def test_numbers_of_one_region_may_be_fixed_or_all() -> None:
    fixed = RegionConfig(name="eu", store="s3://eu", engines=2)
    scaled = RegionConfig(name="us", store="s3://us", engines=2, scaling=SCALING)
    for regions, messages in (([fixed], []), ([fixed, scaled], ["engines of us: 2 → 6, 15 an hour"])):
        run = Played(FleetConfig(home="eu", regions=tuple(regions)))
        for _ in range(SETTLE):
            run.step(wait_share=0.5, busy_share=1.0, engines=4)
        assert run.messages == messages


def calls(cpu_s: float) -> GatewayStats:
    return GatewayStats(window_s=1.0, calls=1, failed=0, call_s=1.0, waited_s=0.0, cpu_s=cpu_s)


def test_each_regions_gateways_are_counted_alone_and_lent_engines_stay() -> None:
    scaling = RegionScaling(gateways=ReplicaBounds(most=4))
    regions = tuple(
        RegionConfig(name=name, store=f"s3://{name}", engines=2, lent_engines=1, scaling=scaling)
        for name in ("eu", "us")
    )
    run = Played(FleetConfig(home="eu", regions=regions))
    for _ in range(SETTLE):
        reports = [("gateway", calls(0.1)), ("product", calls(1.0)), ("gateway@us", calls(1.0))]
        run.step(wait_share=0.5, busy_share=1.0, engines=0, others=reports)
    assert run.messages == ["gateways of us: 1 → 2"]
    assert [region.engines for region in run.fleets[0].regions] == [2, 2]


def in_use(running: int, sandboxes: int, sandbox_room: int) -> tuple[str, RolloutsStats]:
    return "rollouts", RolloutsStats(running=running, capacity=8, sandboxes=sandboxes, sandbox_room=sandbox_room)


def test_places_for_rollouts_and_sandboxes_count_at_the_moment_when_most_are_in_use() -> None:
    bounds = ReplicaBounds(most=4)
    region = RegionConfig(name="eu", engines=1, sandbox_hosts=1, scaling=RegionScaling(sandbox_hosts=bounds))
    scaling = FleetScaling(rollouts=bounds)
    for most, message in (
        (in_use(running=8, sandboxes=2, sandbox_room=6), "rollouts processes: 1 → 2"),
        (in_use(running=2, sandboxes=8, sandbox_room=0), "sandbox hosts of eu: 1 → 2"),
        (in_use(running=8, sandboxes=8, sandbox_room=0), "sandbox hosts of eu: 1 → 2"),
    ):
        run = Played(FleetConfig(home="eu", regions=(region,), scaling=scaling))
        for _ in range(SETTLE):
            few = in_use(running=0, sandboxes=0, sandbox_room=8)
            run.step(wait_share=0.5, busy_share=0.0, engines=0, others=[few, most, few])
        assert run.messages == [message], "rollouts wait for the sandboxes that they use"


def test_a_change_by_hand_is_gone_on_from_and_ones_own_is_not_taken_for_one() -> None:
    run = Played(fleet(2))
    for _ in range(SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=2)
    run.followed = run.fleets[0]
    for _ in range(SETTLE - 1):
        run.step(wait_share=0.5, busy_share=1.0, engines=4)
    run.followed = fleet(1)
    for _ in range(SETTLE):
        run.step(wait_share=0.5, busy_share=1.0, engines=1)
    assert run.fleets == [fleet(4), fleet(2)]


@pytest.mark.parametrize("wait_share", [0.5, 0.0])
def test_steps_of_which_no_process_has_told_change_nothing(wait_share: float) -> None:
    scaling = RegionScaling(engines=BOUNDS, gateways=BOUNDS, sandbox_hosts=BOUNDS)
    region = RegionConfig(name="eu", engines=2, gateways=2, sandbox_hosts=2, scaling=scaling)
    more = FleetScaling(rollouts=ReplicaBounds(most=4))
    run = Played(FleetConfig(home="eu", regions=(region,), rollouts=2, scaling=more))
    for _ in range(3 * SETTLE):
        run.step(wait_share=wait_share, busy_share=1.0, engines=0)
    assert run.fleets == []


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"engines": 9, "scaling": SCALING}, r"engines = 9 is not within its bounds in \[scaling\], 1 to 8"),
        ({"engines": 2, "lent_engines": 1, "scaling": SCALING}, "whose machines are not the run's to give up"),
        (
            {"engines": 2, "scaling": {"gateways": {"fewest": 0, "most": 2}}},
            r"scaling\.gateways\.fewest = 0 would leave its engines without a gateway",
        ),
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
    more = FleetScaling(rollouts=ReplicaBounds(most=2))
    with pytest.raises(ValueError, match=r"scaling\.rollouts has no effect"):
        FleetConfig(home="eu", regions=(RegionConfig(name="eu", engines=1),), launcher=launcher, scaling=more)
    with pytest.raises(ValueError, match=r"regions\.scaling has no effect"):
        fleet(1).check_automatic(launcher)


def test_bounds_without_a_most_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scaling\.fewest would have no effect with most = 0"):
        ReplicaBounds(fewest=2)
    with pytest.raises(ValueError, match=r"fewest = 3 is more than most = 2"):
        ReplicaBounds(fewest=3, most=2)


@dataclass
class Modelled:
    """A run whose rollouts need engines, gateways, hosts of sandboxes and places, as many as a step has to do."""

    rollouts_per_step: int
    fleet: FleetConfig
    work_s: float = 10.0
    rollout_s: float = 20.0
    """Time of a rollout, as long as nothing is full."""
    engine_per_s: float = 2.0
    """Rollouts that an engine samples in a second."""
    gateway_per_s: float = 8.0
    """Rollouts whose calls take all the processor time of a gateway."""
    host_sandboxes: int = 64
    places: int = 48
    """``rollouts.concurrency``."""

    def per_s(self) -> float:
        """Rollouts in a second, with all processes of the fleet."""
        region = self.fleet.home_region
        in_flight = min(self.fleet.rollouts * self.places, region.sandbox_hosts * self.host_sandboxes)
        limits = (region.engines * self.engine_per_s, region.gateways * self.gateway_per_s, in_flight / self.rollout_s)
        return min(*limits, self.rollouts_per_step / self.work_s)

    def events(self, step_s: float) -> Iterator[tuple[str, Event]]:
        """Reports of a step."""
        region, places = self.fleet.home_region, self.fleet.rollouts * self.places
        sandboxes = region.sandbox_hosts * self.host_sandboxes
        per_s = self.rollouts_per_step / step_s
        useful = math.ceil(self.rollouts_per_step / self.work_s * self.rollout_s)
        for replica in range(region.engines):
            share = per_s / region.engines / self.engine_per_s
            stats = EngineStats(busy_s=share * step_s, window_s=step_s, generated_tokens=1, prefill_tokens=1,
                                reused_tokens=0, running=1, waiting=0)  # fmt: skip
            yield str(ProcessName(command="serve", replica=replica)), stats
        for replica in range(region.gateways):
            cpu_s = per_s / region.gateways / self.gateway_per_s * step_s
            calls = GatewayStats(window_s=step_s, calls=1, failed=0, call_s=1.0, waited_s=0.0, cpu_s=cpu_s)
            yield str(ProcessName(command="gateway", replica=replica)), calls
        running = min(places, useful)
        for replica in range(self.fleet.rollouts):
            each, room = math.ceil(running / self.fleet.rollouts), max(0, sandboxes - running)
            in_use = RolloutsStats(running=each, capacity=self.places, sandboxes=each, sandbox_room=room)
            yield str(ProcessName(command="rollouts", replica=replica)), in_use


def test_all_numbers_follow_a_load_that_doubles_and_halves_without_swinging() -> None:
    bounds = ReplicaBounds(most=64)
    region = RegionConfig(name="eu", engines=1, sandbox_hosts=1,
                          scaling=RegionScaling(engines=bounds, gateways=bounds, sandbox_hosts=bounds))  # fmt: skip
    model = Modelled(160, FleetConfig(home="eu", regions=(region,), scaling=FleetScaling(rollouts=bounds)))
    metrics, fleets, now_s = RunMetrics(), list[FleetConfig](), 0.0
    scaler = FleetScaler(model.fleet, fleets.append, lambda _: None)
    scaler.look(metrics, model.fleet)
    numbers, waits = list[tuple[int, ...]](), list[float]()
    for step in range(1, 241):
        model.rollouts_per_step = 320 if 80 < step <= 160 else 160
        step_s = max(model.work_s, model.rollouts_per_step / model.per_s())
        now_s += step_s
        for process, event in model.events(step_s):
            metrics.add(Logged(at_s=now_s, process=process, event=event))
        done = step_done(step, busy_s=model.work_s, wait_s=step_s - model.work_s)
        metrics.add(Logged(at_s=now_s, process="train", event=done))
        scaler.look(metrics, fleets[-1] if fleets else model.fleet)
        model.fleet = fleets[-1] if fleets else model.fleet
        home = model.fleet.home_region
        numbers.append((home.engines, home.gateways, home.sandbox_hosts, model.fleet.rollouts))
        waits.append((step_s - model.work_s) / step_s)
    for rest in (79, 159, 239):
        assert numbers[rest - 20] == numbers[rest], "at rest"
        assert max(waits[rest - 20 : rest]) <= WAITS
    at_rest, doubled, halved = numbers[79], numbers[159], numbers[239]
    assert halved == at_rest == (9, 4, 6, 8)
    assert all(2 * few - 2 <= many <= 2 * few + 1 for few, many in zip(at_rest, doubled, strict=True))
    for kind in zip(*numbers, strict=True):
        rises = [after > before for before, after in pairwise(kind) if after != before]
        assert rises == sorted(rises, reverse=True), "up while there is more to do, then down, never to and fro"
