"""A run in virtual time: the same for the same seed, within the staleness bound, and as busy as its parts allow."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import EngineUnavailable, UserError
from etude.protocols import Completion, SamplingParams
from etude.rollouts.fake import run_virtually
from etude.simulation import run
from etude.simulation.calibration import RunCalibration, TrainerTimes, fit_engine, fit_non_negative
from etude.simulation.engine import EngineRates, ModelledEngine
from etude.simulation.figures import RunFigures, StepRecords, bottleneck
from etude.simulation.fit import calibrate
from etude.simulation.run import Lent, RegionModel, SimulatedEvents, Stop, simulate
from etude.simulation.workload import RolloutWork, Workload
from etude.telemetry.events import EngineStats, Logged, RolloutClosed, StepDone
from etude.types import RolloutStatus

RATES = EngineRates(step_s=0.002, sequence_s=0.0005, prompt_s=0.0001, max_running=64)
WORK = RolloutWork(turns=2, sampled_tokens=80, prompt_tokens=100, sandbox_s=0.05, tools_s=0.2, grading_s=0.3)
CALIBRATION = RunCalibration(
    engine=RATES,
    trainer=TrainerTimes(fixed_s=0.2, token_s=1e-4, save_s=0.1, publish_s=0.3),
    swap_s=0.2,
    call_s=0.05,
    workload=Workload(((WORK, WORK),)),
)
HERE = [RegionModel(name="here", engines=1, shares_cores=True)]
PROMPT = np.array([100], np.int32)


def recipe(*, staleness: int, steps: int = 8) -> RunConfig:
    rollouts = {"groups_per_step": 4, "group_size": 4, "max_staleness": staleness, "concurrency": 16}
    return parse_config({"rollouts": rollouts, "trainer": {"steps": steps}}, source="t")


async def sample(engine: ModelledEngine, tokens: int) -> Completion:
    return await engine.generate(PROMPT, SamplingParams(max_tokens=tokens), session="s")


def recorded(events: SimulatedEvents) -> list[Logged]:
    """The events as a real run would have written them: a simulated turn has a number, not tokens."""
    return [
        replace(each, event=replace(each.event, sampled_tokens=WORK.sampled_tokens))
        if isinstance(each.event, RolloutClosed)
        else each
        for each in events.all
    ]


def test_sequences_share_an_engine() -> None:
    async def main() -> tuple[float, float]:
        engine, loop = ModelledEngine(RATES), asyncio.get_running_loop()
        long = asyncio.create_task(sample(engine, 100))
        await sample(engine, 50)
        short_s = loop.time()
        await long
        return short_s, loop.time()

    short_s, long_s = run_virtually(main())
    reading_s = 2 * 100 * RATES.prompt_s
    assert short_s == pytest.approx(reading_s + 50 * RATES.decode_s(2), rel=0.01)
    assert long_s == pytest.approx(short_s + 50 * RATES.decode_s(1), rel=0.01)


def test_a_prompt_is_read_in_parts_beside_what_is_decoded() -> None:
    async def main() -> tuple[float, float]:
        engine = ModelledEngine(replace(RATES, step_tokens=10))
        loop, first = asyncio.get_running_loop(), asyncio.create_task(sample(engine, 100))
        await asyncio.sleep(0.05)
        began_s = loop.time()
        await sample(engine, 1)
        second_s = loop.time() - began_s
        await first
        return second_s, loop.time()

    second_s, first_s = run_virtually(main())
    steps = 100 / 10
    assert second_s == pytest.approx(steps * (RATES.decode_s(1) + 10 * RATES.prompt_s) + RATES.decode_s(2), rel=0.01)
    assert first_s == pytest.approx(2 * 100 * RATES.prompt_s + 100 * RATES.decode_s(1), rel=0.02)


def test_calls_beyond_its_places_wait() -> None:
    async def main() -> float:
        engine = ModelledEngine(EngineRates(step_s=0.0, sequence_s=0.01, prompt_s=0.0, max_running=1))
        await asyncio.gather(sample(engine, 10), sample(engine, 10))
        assert engine.measure() == pytest.approx(0.2)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(0.2)


def test_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    async def main() -> Completion:
        engine = ModelledEngine(EngineRates(step_s=0.01, sequence_s=0.0, prompt_s=0.0, max_running=4))
        call = asyncio.create_task(sample(engine, 100))
        await asyncio.sleep(0.3)
        engine.swap(1)
        return await call

    completion = run_virtually(main())
    assert completion.versions.tolist() == [0, 1]
    assert completion.token_ids.tolist() == [30, 70]


def test_an_engine_that_dies_loses_its_calls_and_is_empty_when_it_is_back() -> None:
    async def main() -> None:
        engine = ModelledEngine(RATES)
        call = asyncio.create_task(sample(engine, 100))
        await asyncio.sleep(0.01)
        engine.die()
        with pytest.raises(EngineUnavailable):
            await call
        with pytest.raises(EngineUnavailable):
            await sample(engine, 1)
        engine.restart(3)
        assert (await sample(engine, 1)).versions.tolist() == [3]
        assert engine.running == engine.waiting == 0

    run_virtually(main())


def test_a_call_whose_caller_has_gone_takes_no_time() -> None:
    async def main() -> float:
        engine = ModelledEngine(EngineRates(step_s=0.0, sequence_s=0.01, prompt_s=0.0, max_running=4))
        gone, stays = (asyncio.create_task(sample(engine, 100)) for _ in range(2))
        await asyncio.sleep(0.2)
        gone.cancel()
        await stays
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(0.2 + 90 * 0.01)


def test_one_seed_is_one_run() -> None:
    one, again = (simulate(recipe(staleness=1), CALIBRATION, HERE, seed=3) for _ in range(2))
    assert one.logged == again.logged
    assert one.sandboxes == again.sandboxes


def test_figures_of_any_steps_come_from_one_pass_over_events_that_arrive_bit_by_bit() -> None:
    logged = list(simulate(recipe(staleness=1, steps=12), CALIBRATION, HERE).logged)
    records = StepRecords()
    for count in range(0, len(logged) + 1, 7):
        records.follow(logged[:count])
    records.follow(logged)
    assert records.figures(3, 9) == RunFigures.of_events(logged, skipped=3)
    begin_s, end_s = records.ends_s[3], records.ends_s[9]
    stats = [each.event for each in logged if isinstance(each.event, EngineStats) and begin_s < each.at_s <= end_s]
    busy_s, window_s = sum(each.busy_s for each in stats), sum(each.window_s for each in stats)
    assert records.figures(3, 9).engine_busy == pytest.approx(busy_s / window_s)


def test_the_rollouts_of_a_seed_are_the_same_on_another_fleet() -> None:
    varied = replace(CALIBRATION, workload=Workload((tuple(replace(WORK, sampled_tokens=n) for n in (40, 80, 160)),)))
    slower = replace(varied, engine=replace(RATES, step_s=0.02), call_s=0.01)
    tokens = [
        [each.event.metrics["staleness_tokens"] for each in simulate(recipe(staleness=1), fleet, HERE, seed=seed).steps
         if isinstance(each.event, StepDone)]
        for fleet, seed in ((varied, 3), (slower, 3), (varied, 4))
    ]  # fmt: skip
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_token_is_staler_than_the_bound(staleness: int) -> None:
    config = recipe(staleness=staleness)
    events = simulate(config, CALIBRATION, HERE)
    steps = [each.event for each in events.steps if isinstance(each.event, StepDone)]
    assert [step.step for step in steps] == list(range(1, config.trainer.steps + 1))
    assert max(step.metrics["staleness_max"] for step in steps) <= staleness
    tokens = config.rollouts.rollouts_per_step * WORK.sampled_tokens
    assert all(step.metrics["staleness_tokens"] == tokens for step in steps)
    assert 0 < events.most_sandboxes <= config.rollouts.concurrency


def test_a_run_ends_once_its_events_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CHECK_S", 0.1)
    stop = Stop(is_enough=lambda logged: sum(isinstance(each.event, StepDone) for each in logged) >= 3)
    events = simulate(recipe(staleness=1), CALIBRATION, HERE, stop=stop)
    assert [each.event.step for each in events.steps if isinstance(each.event, StepDone)] == [1, 2, 3]


def test_rollouts_beside_the_trainer_make_steps_shorter() -> None:
    figures = {
        staleness: RunFigures.of_events(simulate(recipe(staleness=staleness), CALIBRATION, HERE).logged, skipped=2)
        for staleness in (0, 1)
    }
    assert figures[1].step_s < 0.9 * figures[0].step_s
    assert figures[1].engine_busy > figures[0].engine_busy


def test_engines_far_away_make_a_synchronous_step_longer() -> None:
    near, far = (
        RunFigures.of_events(
            simulate(
                recipe(staleness=0),
                CALIBRATION,
                [*HERE, RegionModel(name="far", engines=1, rtt_s=rtt_s, arrival_s=arrival_s)],
            ).logged,
            skipped=2,
        )
        for rtt_s, arrival_s in ((0.0, 0.0), (0.5, 3.0))
    )
    assert far.step_s > near.step_s + 0.5


@pytest.mark.parametrize(
    ("now_s", "expected"), [(0.0, (True, 20.0)), (20.0, (False, 60.0)), (79.0, (False, 1.0)), (80.0, (True, 40.0))]
)
def test_engines_are_lent_over_midnight(now_s: float, expected: tuple[bool, float]) -> None:
    lent = Lent(share=0.5, day_s=100.0, begin_s=80.0, end_s=20.0)
    assert lent.left_s(now_s) == lent.left_s(now_s + 300.0) == expected


def test_steps_are_shorter_while_engines_are_lent_and_no_call_is_lost() -> None:
    slow = replace(CALIBRATION, engine=CALIBRATION.engine.scaled(4.0))
    config = recipe(staleness=1, steps=60)
    day = Lent(share=0.75, day_s=120.0, begin_s=0.0, end_s=60.0)
    events = simulate(config, slow, [RegionModel(name="here", engines=2, lent=day)])
    assert len(events.steps) == config.trainer.steps
    closed = [each.event for each in events.rollouts if isinstance(each.event, RolloutClosed)]
    assert all(event.status == RolloutStatus.GRADED for event in closed)
    ends_s = [each.at_s for each in events.steps]
    lent = [end - begin for begin, end in pairwise(ends_s) if day.left_s(begin)[0] and day.left_s(end)[0]]
    alone = [end - begin for begin, end in pairwise(ends_s) if not day.left_s(begin)[0] and not day.left_s(end)[0]]
    assert len(lent) > 5 and len(alone) > 5
    assert fmean(lent) < 0.8 * fmean(alone)


def test_a_calibration_finds_the_parts_that_made_its_run() -> None:
    """A calibration that is fitted to a simulated run's events must return the run's own parameters."""
    config = recipe(staleness=1, steps=24)
    events = simulate(config, CALIBRATION, HERE)
    fitted = calibrate(config, recorded(events), HERE)
    assert fitted.trainer.step_s(1280) == pytest.approx(CALIBRATION.trainer.step_s(1280), rel=0.01)
    assert fitted.workload.groups[0][0].turns == WORK.turns
    again = RunFigures.of_events(simulate(config, fitted, HERE).logged, skipped=2)
    first = RunFigures.of_events(events.logged, skipped=2)
    assert again.engine_s == pytest.approx(first.engine_s, rel=0.1)


def test_an_engine_that_counts_its_steps_tells_their_cost_from_that_of_its_sequences() -> None:
    logged = list[Logged]()
    for second, (steps, running, read) in enumerate([(400, 3, 500), (150, 20, 900), (60, 50, 0), (30, 64, 3000)] * 3):
        busy_s = steps * RATES.decode_s(running) + read * RATES.prompt_s
        stats = EngineStats(busy_s=busy_s, window_s=2.0, generated_tokens=steps * running, prefill_tokens=read,
                            reused_tokens=0, running=0, waiting=0, steps=steps)  # fmt: skip
        logged.append(Logged(at_s=float(second), process="serve", event=stats))
    closed = recorded(simulate(recipe(staleness=1, steps=4), CALIBRATION, HERE))
    ends = [each.event for each in closed if isinstance(each.event, RolloutClosed)]
    logged += [Logged(at_s=at_s, process="rollouts", event=ends[0]) for at_s in (-1.0, 100.0)]
    fitted = fit_engine(sorted(logged, key=lambda each: each.at_s), recipe(staleness=1).engine)
    for name in ("step_s", "sequence_s", "prompt_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(RATES, name), rel=1e-6)


def test_a_calibration_tells_work_from_waiting_for_processors() -> None:
    """On one machine everything takes longer; the calibration finds the times alone, which predict other settings."""
    made, config = replace(CALIBRATION, cores=1.5), recipe(staleness=1, steps=24)
    events = simulate(config, made, HERE)
    fitted = calibrate(config, recorded(events), HERE, cores=1.5)
    assert Workload.of_events(events.all).mean("tools_s") > 1.5 * WORK.tools_s
    assert fitted.workload.mean("tools_s") == pytest.approx(WORK.tools_s, rel=0.15)
    other = recipe(staleness=0, steps=12)
    figures, foreseen = (
        RunFigures.of_events(simulate(other, parts, HERE).logged, skipped=1) for parts in (made, fitted)
    )
    assert foreseen.step_s == pytest.approx(figures.step_s, rel=0.1)
    assert foreseen.engine_busy == pytest.approx(figures.engine_busy, abs=0.1)


def test_regions_may_share_processors_which_then_take_turns() -> None:
    speeds = replace(CALIBRATION, engine=CALIBRATION.engine.scaled(8.0), cores=1.0)
    config = recipe(staleness=1)
    apart, shared = (
        RunFigures.of_events(
            simulate(config, speeds, [RegionModel(name=name, engines=1, shares_cores=shares) for name in "ab"]).logged,
            skipped=2,
        )
        for shares in (False, True)
    )
    assert shared.step_s > 1.2 * apart.step_s


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="2 steps are too few"):
        RunFigures.of_events(simulate(recipe(staleness=1, steps=2), CALIBRATION, HERE).logged, skipped=2)


def test_a_fit_has_no_negative_coefficient() -> None:
    rows = [(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]
    assert fit_non_negative(rows, [5.0, 7.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert fit_non_negative(rows, [9.0, 7.0, 5.0])[1] == 0.0


def test_the_side_that_is_full_is_the_bottleneck() -> None:
    figures = {"steps": 5, "step_s": 10.0, "engine_s": 9.0, "tokens_per_step": 100.0, "token_ages": (60, 40)}
    full = RunFigures(trainer_busy=0.3, engine_busy=0.95, **figures)  # type: ignore[arg-type]
    assert "Engines are the bottleneck" in bottleneck(full)[0]
    assert "2.8 times" in bottleneck(full)[1]
    assert full.staleness == pytest.approx(0.4)
    assert full.inference_to_training == pytest.approx(3.0)
