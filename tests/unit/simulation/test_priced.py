"""Plans on GPUs without a run: sources of figures, the calibration, money, the small fleet and the search."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest
from pydantic import ValidationError

from etude.cli.actions.plan_priced import goal_json, goal_words, load_plan, other_words
from etude.config.loading import load_recipe
from etude.errors import ConfigError
from etude.models.spec import ModelSpec
from etude.run.hardware import SHIPPED, load_gpus
from etude.run.preflight import spec_of_recipe
from etude.run.pretend import resolved_there
from etude.run.roofline import DecodeStep, Rates
from etude.simulation import split
from etude.simulation.figures import FULL, RunFigures
from etude.simulation.priced import Costs, Fleet, PricedPlan, WorkloadShape, draw_workload, gpu_price
from etude.simulation.run import SimulatedEvents
from etude.simulation.split import (
    MOST_ROLLOUTS,
    FleetSimulation,
    SimulationExtent,
    SmallFleet,
    engine_s,
    gpus_usd_h,
    parse_goal,
    search,
    split_for,
    split_within,
    trainer_s,
)
from etude.simulation.steady import SteadyMean, SteadyState
from etude.telemetry.events import StepDone

ROOT = Path(__file__).parents[3]
FIGURES = RunFigures(
    steps=5, step_s=100.0, trainer_busy=0.5, engine_busy=0.9, engine_s=90.0, tokens_per_step=1e6, token_ages=(1, 1)
)


@pytest.fixture(scope="module", name="spec")
def _spec() -> ModelSpec:
    return spec_of_recipe(resolved_there(load_recipe(ROOT / "recipes/gpu-8b", ["model.checkpoint=" + CHECKPOINT])))


CHECKPOINT = str(ROOT / "recipes/gpu-8b")


def fleet(spec: ModelSpec, plan: PricedPlan | None = None, *sets: str) -> Fleet:
    config = resolved_there(load_recipe(ROOT / "recipes/gpu-8b", [f"model.checkpoint={CHECKPOINT}", *sets]))
    return Fleet.of(config, spec, plan or load_plan("h100"))


def test_every_figure_has_a_source_and_a_date() -> None:
    gpus = load_gpus()
    assert set(gpus) >= {"h100", "h200", "b200", "mi300x"}
    raw = tomllib.loads(files("etude.run").joinpath(SHIPPED).read_text(encoding="utf-8"))
    for sheet in raw["gpus"].values():
        assert all(figure["source"].startswith("https://") for figure in sheet.values())


def test_a_full_engine_decodes_as_the_roofline_says(spec: ModelSpec) -> None:
    planned = fleet(spec)
    engine, places = planned.calibration.engine, planned.config.engine.max_running
    step = DecodeStep.of(spec, batch=places, context=planned.context, item=2, cached_bytes=None)
    assert engine.decode_s(places) == pytest.approx(step.seconds(Rates.of_gpu(load_gpus()["h100"].kind)), rel=0.01)


def test_a_step_of_the_trainer_is_its_operations_over_its_peak(spec: ModelSpec) -> None:
    planned = fleet(spec)
    rates = Rates.of_gpu(load_gpus()["h100"].kind)
    tokens = planned.rollouts * planned.plan.workload.tokens
    least_s = 6 * planned.sizes.total * tokens / (planned.ranks * rates.flops * rates.training)
    assert least_s < trainer_s(planned) < 1.6 * least_s  # attention; what is computed again
    faster = fleet(spec, load_plan("h100", ["assumptions.training_share=1.0"]))
    assert trainer_s(faster) < 0.6 * trainer_s(planned)
    in_fp8 = fleet(spec, load_plan("h100", ["assumptions.training_share=1.8"]))
    assert trainer_s(in_fp8) < 0.6 * trainer_s(faster)
    assert trainer_s(replace(planned, ranks=12)) < 0.6 * trainer_s(planned)


def test_the_ratio_of_operations_is_about_one_forward_pass_to_three(spec: ModelSpec) -> None:
    planned = fleet(spec)
    assert planned.sampling_flops / planned.training_flops == pytest.approx(1 / 3, rel=0.1)


def test_money_is_of_gpus_and_of_bytes_between_regions(spec: ModelSpec) -> None:
    regions = [{"name": "home", "engines": 2}, {"name": "far", "engines": 1, "rtt_ms": 100.0}]
    plan = PricedPlan.model_validate({"engine": "h200", "engine_market": "spot", "regions": regions}, strict=False)
    planned = fleet(spec, plan)
    costs = Costs.of(planned, FIGURES)
    assert costs.trainer_usd_h == pytest.approx(6 * 6.155)
    assert costs.engine_usd_h == pytest.approx(3 * 2.616)
    delta_gb = planned.sizes.total * 2 * plan.assumptions.delta_share / 1e9
    assert costs.egress_usd_step == pytest.approx(delta_gb * plan.assumptions.egress_usd_gb)
    hourly = costs.trainer_usd_h + costs.engine_usd_h
    assert costs.usd_step == pytest.approx(hourly * 100 / 3600 + costs.egress_usd_step)
    assert costs.usd_h == pytest.approx(36 * costs.usd_step)
    assert planned.regions[1].arrival_s == pytest.approx(delta_gb * 8 / 10)


def test_lent_engines_cost_their_share_of_time_and_price(spec: ModelSpec) -> None:
    regions = [
        {"name": "home", "engines": 2},
        {"name": "product", "engines": 5, "lent_engines": 4, "lent_usd_share": 0.5},
    ]
    plan = PricedPlan.model_validate({"regions": regions}, strict=False)
    planned = fleet(spec, plan)
    price = gpu_price(planned, "h100", "on_demand")
    assert Costs.of(planned, FIGURES).engine_usd_h == pytest.approx((2 + 1 + 4 * 0.5 * 0.5) * price)
    modelled = planned.regions[1].lent
    assert modelled is not None and modelled.left_s(0.0) == (True, 8 * 3600.0)
    assert modelled.share == 0.8
    for mistake, message in (({"lent": [8, 8]}, "two different hours"), ({"lent_engines": 2}, "leave none")):
        with pytest.raises(ValidationError, match=message):
            PricedPlan.model_validate({"regions": [regions[0] | mistake]}, strict=False)


def test_a_gpu_without_a_price_is_refused_and_one_of_your_own_is_taken(spec: ModelSpec) -> None:
    free = load_plan("mi300x", ["engine_market=spot"])
    with pytest.raises(ConfigError, match="spot_usd_h under"):
        Costs.of(fleet(spec, free), FIGURES)
    priced = load_plan(
        "mi300x",
        ["engine_market=spot", 'gpus.mi300x.spot_usd_h={value=1.0, source="our contract", read="2026-11-28"}']
        + [f'gpus.mi300x.{key}={{value={value}, source="its sheet", read="2026-11-28"}}'
           for key, value in (("memory_gb", 192), ("bandwidth_tb_s", 5.3), ("bf16_tflops", 1307.4),
                              ("on_demand_usd_h", 2.0))],
    )  # fmt: skip
    assert Costs.of(fleet(spec, priced), FIGURES).engine_usd_h == 2.0


@pytest.mark.parametrize(
    ("hardware", "assume", "message"),
    [
        ("nosuch", (), "is neither a GPU"),
        ("h100", ("workload.turns",), "expected KEY=VALUE"),
        ("h100", ("workload.turns=0",), "workload.turns"),
        ("h100", ("engine.share=1",), "--assume 'engine.share=1': 'engine' is a value, not a section"),
        ("h100", ("assumptions.luck=1",), "assumptions.luck"),
    ],
)
def test_mistakes_of_a_plan_are_named(hardware: str, assume: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(hardware, assume)


def test_engines_that_hold_no_model_and_rollouts_that_are_too_long_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="weights take 16 and 512 sequences"):
        fleet(spec, None, "engine.max_running=512")
    with pytest.raises(ConfigError, match=r"longer than engine\.max_length"):
        fleet(spec, load_plan("h100", ["workload.prompt_tokens=100000"]))


def test_a_workload_has_the_mean_and_the_spread_of_its_shape() -> None:
    shape = WorkloadShape(sampled_tokens=10_000, spread=0.5)
    lengths = [work.sampled_tokens for work in draw_workload(shape).rollouts]
    assert sum(lengths) / len(lengths) == pytest.approx(10_000, rel=0.01)
    assert max(lengths) > 2 * min(lengths)
    alike = {work.sampled_tokens for work in draw_workload(shape.model_copy(update={"spread": 0.0})).rollouts}
    assert len(alike) == 1


def test_a_round_of_a_workload_draws_each_of_its_groups_once() -> None:
    workload = draw_workload(WorkloadShape(spread=0.8))
    count, random = len(workload.groups), Random(0)
    rounds = [[workload.draw(0.0, start + index, random) for index in range(count)] for start in (0, count)]
    for drawn in rounds:
        assert all(any(work in group for work in drawn) for group in workload.groups)
    assert [work.turns for work in rounds[0]] != [work.turns for work in rounds[1]]


def test_a_fleet_in_the_small_has_the_pace_of_the_large_one(spec: ModelSpec) -> None:
    large = fleet(spec, None, "engine.replicas=32", "rollouts.groups_per_step=512", "rollouts.concurrency=4096")
    small = SmallFleet.of(large)
    rollouts = small.config.rollouts
    assert rollouts.rollouts_per_step <= MOST_ROLLOUTS
    assert small.factor == 512 / rollouts.groups_per_step
    assert rollouts.concurrency == round(4096 / small.factor)
    engine, whole = small.calibration.engine, large.calibration.engine
    tokens_s = sum(small.engines) * engine.max_running / engine.decode_s(engine.max_running) / small.second_s
    assert small.factor * tokens_s == pytest.approx(32 * 64 / whole.decode_s(64))
    more = SmallFleet.of(replace(large, engines=(33,)))  # its places may be as many: it is faster nevertheless
    rates = more.calibration.engine
    faster_s = sum(more.engines) * rates.max_running / rates.decode_s(rates.max_running) / more.second_s
    assert more.factor * faster_s == pytest.approx(33 * 64 / whole.decode_s(64))


def test_the_smallest_split_fills_both_sides(spec: ModelSpec) -> None:
    chosen = split_for(fleet(spec), 120.0)
    assert trainer_s(chosen) <= FULL * 120.0 < trainer_s(replace(chosen, ranks=chosen.ranks - 8) if chosen.ranks > 8
                                                          else replace(chosen, ranks=1))  # fmt: skip
    (engines,) = chosen.engines
    assert engine_s(chosen) <= FULL * 120.0 < engine_s(replace(chosen, engines=(engines - 1,)))


def test_the_best_split_for_money_costs_no_more(spec: ModelSpec) -> None:
    little, much = (split_within(fleet(spec), usd) for usd in (200.0, 800.0))
    assert gpus_usd_h(little) <= 200 < gpus_usd_h(much) <= 800
    assert trainer_s(much) < trainer_s(little) and engine_s(much) < engine_s(little)
    with pytest.raises(ConfigError, match="costs"):
        split_within(fleet(spec), 1.0)


def test_a_search_compares_splits_on_the_same_rollouts_and_says_which_it_cannot_tell_apart(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "SEARCHED", SimulationExtent(batches=3))
    monkeypatch.setattr(split, "ROUNDS", 1)
    shape = {"turns": 4, "sampled_tokens": 1000, "prompt_tokens": 2000, "tools_s": 10.0, "spread": 0.4}
    plan = PricedPlan.model_validate({"workload": shape}, strict=False)
    small = fleet(spec, plan, "rollouts.groups_per_step=8", "rollouts.group_size=4", "rollouts.concurrency=64")
    chosen, others = search(small, ("usd", 200.0))
    (other,) = others
    assert gpus_usd_h(other.fleet) <= 200 and other.fleet.ranks != chosen.fleet.ranks
    assert other.steps_per_hour <= chosen.steps_per_hour
    tokens = [
        [each.event.metrics["staleness_tokens"] for each in candidate.simulation.events.steps
         if isinstance(each.event, StepDone)]
        for candidate in (chosen, other)
    ]  # fmt: skip
    assert tokens[0] == tokens[1]
    longer = other.longer_than(chosen)
    assert longer.low < longer.value < longer.high
    assert ("no proven difference" in other_words(other, longer)) == (longer.low <= 0 <= longer.high)
    same = chosen.longer_than(chosen)
    assert same.value == 0 and "no proven difference" in other_words(chosen, same)


@pytest.mark.parametrize(
    ("steps_h", "met", "within"), [(30.0, True, False), (35.0, True, True), (37.0, False, True), (40.0, False, False)]
)
def test_a_goal_within_the_interval_of_a_step_is_said_to_be_so(
    spec: ModelSpec, steps_h: float, met: bool, within: bool
) -> None:
    other = SteadyMean(0.5, 0.4)
    simulated = FleetSimulation(
        figures=FIGURES,  # 36 steps an hour
        events=SimulatedEvents(logged=(), rollouts=(), sandboxes=()),
        small=SmallFleet.of(fleet(spec)),
        steady=SteadyState(
            steps=60, step_s=SteadyMean(20.0, 1.0), trainer_busy=other, engine_busy=other, staleness=other
        ),
    )
    assert goal_json(steps_h, simulated) == {"steps_per_hour": steps_h, "met": met, "within_interval": within}
    words = goal_words(steps_h, simulated)
    assert ("not met" not in words, "within the 95% interval" in words) == (met, within)


@pytest.mark.parametrize("goal", ["steps", "steps=0", "usd=x", "time=3"])
def test_a_goal_that_is_none_is_refused(goal: str) -> None:
    with pytest.raises(ConfigError, match="expected steps=N or usd=N"):
        parse_goal(goal)


COMPOSER = [
    'engine.options.arguments={"data-parallel-size"=16, "enable-expert-parallel"=true}',
    "engine.max_length=65536",
    "engine.max_running=512",
    "rollouts.groups_per_step=192",
    "rollouts.group_size=16",
    "rollouts.concurrency=6144",
    "parallel.dp=1024",
]
"""The settings of docs/planning.md."""


TEN_THOUSAND = [
    'engine.options.arguments={"data-parallel-size"=16, "enable-expert-parallel"=true}',
    "engine.max_length=131072",
    "engine.max_running=320",
    "rollouts.groups_per_step=768",
    "rollouts.group_size=16",
    "rollouts.concurrency=32000",
    "parallel.dp=8400",
    "parallel.ep=48",
]
"""The settings of docs/planning.md."""


def test_the_split_of_ten_thousand_gpus_is_the_calculated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = resolved_there(load_recipe(Path("recipes/gpu-1t"), TEN_THOUSAND))
    planned = Fleet.of(config, spec_of_recipe(config), load_plan("docs/plans/ten-thousand.toml"))
    assert planned.ranks + planned.sampling_gpus == 10_000
    calculated = split_within(planned, gpus_usd_h(planned))
    assert (calculated.ranks, calculated.engines) == (planned.ranks, planned.engines)
    assert calculated.config.rollouts.concurrency == config.rollouts.concurrency
    document = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    assert all(setting in document for setting in TEN_THOUSAND)


def test_the_composer_fleet_is_in_the_published_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = resolved_there(load_recipe(Path("recipes/gpu-1t"), COMPOSER))
    planned = Fleet.of(config, spec_of_recipe(config), load_plan("docs/plans/composer.toml"))
    assert 1.0e12 < planned.sizes.total < 1.1e12
    assert len(planned.regions) == 4 and planned.remote_regions == 4
    assert planned.delta_s < 60 and planned.delta_bytes == pytest.approx(20.3 * 2**30, rel=0.1)
    assert 0.25 <= planned.sampling_flops / planned.training_flops <= 0.42
    assert 300 <= max(trainer_s(planned), engine_s(planned)) / FULL <= 900
    document = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    assert all(setting in document for setting in COMPOSER)
