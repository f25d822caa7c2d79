"""`bench science`: its tasks, its laboratory, and how claims are judged."""

import asyncio
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
import torch

from bench.science.ablations import ABLATIONS, ROLLOUTS, Arm, Claim
from bench.science.bench import RECIPE, Trial, bench_science, broken_at, differences, usable_seeds, verdict
from bench.science.laboratory import ROUTER, Laboratory, Measurement, TrialCurve, learn, perturbed
from bench.science.running_sums import ADDENDS, BASE, EQUALS, RunningSums
from bench.science.starts import Start, prepared_start
from etude.aio import background_task
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.models.checkpoint import load_checkpoint
from etude.run.resolve import resolve
from etude.run.task_families import open_family
from etude.tasks.corpora.corpus import DemonstratedFamily
from etude.types import AnswerChecks, Json, Split, Task

SMALL = ("midtrain.tokens=2_000", "trainer.steps=3", "eval.tasks=8", "rollouts.groups_per_step=2",
         "rollouts.group_size=4", "rollouts.concurrency=8")  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return prepared_start(recipe(), tmp_path_factory.mktemp("starts"))


def recipe(*changes: str) -> RunConfig:
    return load_recipe(RECIPE, [*SMALL, *changes])


def right_answer(task: Task) -> str:
    assert isinstance(task.checks, AnswerChecks)
    return task.checks.answer


def sums(*changes: str) -> RunningSums:
    family = open_family(recipe(*changes))
    assert isinstance(family, RunningSums)
    return family


def test_a_task_asks_for_the_last_digit_of_its_sum() -> None:
    for split in Split:
        task = sums().task(split, 5)
        digits = [int(word) for word in task.prompt.split()[1:]]
        assert len(digits) == ADDENDS
        assert right_answer(task) == str(sum(digits) % BASE)


def test_no_held_out_sum_is_trained_on_or_demonstrated() -> None:
    family = sums()
    heldout = {family.task(Split.HELDOUT, index).prompt for index in range(100)}
    trained = {family.task(Split.TRAIN, index).prompt for index in range(500)}
    assert isinstance(family, DemonstratedFamily)
    shown = {family.demonstrations(Split.TRAIN).session(Random(index))[0].content for index in range(500)}
    assert len(heldout) > 50
    assert not heldout & (trained | shown)


def test_right_code_ends_in_the_right_answer_and_the_agent_often_does_not() -> None:
    family = sums()
    demonstrations = family.demonstrations(Split.TRAIN)
    rights = {"code": 0, "session": 0}
    for kind in rights:
        for index in range(200):
            prompt, reply = getattr(demonstrations, kind)(Random(index))
            answer = sum(int(word) for word in prompt.content.split()[1:]) % BASE
            rights[kind] += reply.content.rpartition(EQUALS)[2].strip() == str(answer)
    assert rights["code"] == 200
    assert 20 < rights["session"] < 120


def test_prompts_come_again_where_there_are_only_so_many() -> None:
    family = sums("tasks.options.prompts=4")
    assert (family.size(Split.TRAIN), family.size(Split.HELDOUT)) == (4, None)


def test_a_trial_comes_to_the_same_again(start: Start) -> None:
    once, again = (learn(recipe(), start.folder) for _ in range(2))
    assert replace(once, seconds=0.0) == replace(again, seconds=0.0)
    assert [one.step for one in once.heldout] == [0, 3]
    assert len(once.rewards) == 3
    assert once.k3 == 0.0  # invariant arithmetic: engine and trainer agree to the last bit


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_token_is_exactly_as_old_as_it_is_to_be(start: Start, staleness: int) -> None:
    laboratory = Laboratory(resolve(recipe(f"rollouts.max_staleness={staleness}")), start.folder, 0.0)

    async def ages() -> list[set[int]]:
        seen = []
        async with background_task(laboratory.sampler.engine.run()):
            for step in range(1, 5):
                groups = await laboratory.groups(step)
                versions = {int(v) for group in groups for one in group.rollouts for v in one.turns[0].versions}
                seen.append({step - 1 - version for version in versions})
                laboratory.train(step, groups)
        return seen

    assert asyncio.run(ages()) == [{min(staleness, step)} for step in range(4)]


def test_noise_changes_routers_alone_and_is_a_mismatch(start: Start) -> None:
    _, state = load_checkpoint(start.folder)
    noisy = perturbed(state, 0.5)
    changed = {name for name, tensor in state.items() if not torch.equal(tensor, noisy[name])}
    assert changed == {name for name in state if name.endswith(ROUTER)} != set()
    assert learn(recipe(), start.folder, router_noise=0.5).k3 > 0


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_arm_is_a_recipe_and_every_claim_is_of_arms(name: str) -> None:
    ablation = ABLATIONS[name]
    names = [arm.name for arm in ablation.arms]
    assert len(set(names)) == len(names)
    for arm in ablation.arms:
        changed = load_recipe(RECIPE, [*arm.start, *arm.changes]) != load_recipe(RECIPE)
        assert changed == bool(arm.start or arm.changes)
    for claim in ablation.claims:
        assert {claim.arm, claim.than} <= set(names)


def test_groups_of_every_size_have_as_many_rollouts_a_step() -> None:
    counts = {load_recipe(RECIPE, arm.changes).rollouts.rollouts_per_step for arm in ABLATIONS["group-size"].arms}
    assert counts == {ROLLOUTS}


def trial(arm: str, seed: int, sampled: float) -> Trial:
    heldout = tuple(Measurement(step=step, sampled=rate, greedy=rate, tokens=5.0)
                    for step, rate in ((0, 0.25), (40, sampled)))  # fmt: skip
    curve = TrialCurve(heldout=heldout, rewards=(0.5,), entropy=0.1, masked=0.0, k3=0.0, seconds=1.0)
    return Trial(arm=Arm(name=arm), seed=seed, start_loss=0.4, curve=curve)


def test_differences_are_of_the_same_seed() -> None:
    trials = [trial("a", 0, 0.75), trial("b", 0, 0.5), trial("a", 1, 0.5), trial("b", 1, 0.75), trial("b", 2, 0.1)]
    assert differences(trials, "a", "b", "sampled") == [0.25, -0.25]
    assert differences(trials, "a", "b", "tokens") == [0.0, 0.0]


@pytest.mark.parametrize(
    ("expected", "low", "high", "word"),
    [
        ("more", 0.01, 0.2, "agrees"),
        ("more", -0.01, 0.2, "not shown"),
        ("more", -0.2, -0.01, "contradicts"),
        ("less", -0.2, -0.01, "agrees"),
        ("less", 0.01, 0.2, "contradicts"),
        ("alike", -0.01, 0.02, "agrees"),
        ("alike", -0.03, 0.02, "not shown"),
        ("alike", 0.03, 0.2, "contradicts"),
    ],
)
def test_a_claim_is_judged_by_the_interval(expected: str, low: float, high: float, word: str) -> None:
    claim = Claim(arm="a", than="b", expected=expected)  # type: ignore[arg-type]  # a row of the table above
    assert verdict(claim, low, high) == word


def test_a_trial_is_broken_once_its_rewards_have_halved() -> None:
    assert broken_at([0.1] * 5 + [0.8] * 10 + [0.1] * 10) == 18
    assert broken_at([0.1] * 5 + [0.8] * 20) is None


def test_seeds_whose_start_has_learnt_nothing_are_left_out(tmp_path: Path) -> None:
    skipped: list[int] = []
    assert [*usable_seeds(2, SMALL, tmp_path, inf, skipped)] == [0, 1]
    assert skipped == []
    with pytest.raises(UserError, match=r"of 4 starts 0 have a loss of at most 0\.1"):
        next(usable_seeds(1, SMALL, tmp_path, 0.1, skipped))
    assert skipped == [0, 1, 2, 3]


def test_an_ablation_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ablation 'stale'; there are staleness"):
        bench_science("stale", tmp_path)


def test_a_bench_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def results() -> Json:
        changes = (*SMALL, "trainer.steps=1")
        starts = tmp_path / "starts"
        return bench_science("normalisation", tmp_path, starts, seeds=2, learnt=inf, overrides=changes)["results"]

    once = results()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert len(files) == 2 * len(ABLATIONS["normalisation"].arms)
    assert results() == once
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")} == files
