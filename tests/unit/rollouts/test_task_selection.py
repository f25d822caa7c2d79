"""Selection of tasks: which are drawn, that the mean stays that of all tasks, and that only the ledger decides."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.loading import default_recipe, parse_config
from etude.config.tasks import PoolsOptions, SelectionConfig, ThompsonOptions
from etude.errors import ConfigError
from etude.ledger.ledger import TRAIN, Ledger
from etude.rollouts.task_history import SelectedTasks
from etude.rollouts.task_selection import TaskFacts, TaskSelection, pools, thompson
from etude.types import Split, Task
from ledgers import rollout, task

THOMPSON = SelectionConfig(kind="thompson", options=ThompsonOptions(uniform_share=0.2, half_life_epochs=2.0))
POOLS = SelectionConfig(kind="pools", options=PoolsOptions(easy_share=0.15, hard_share=0.15, rest_epochs=2.0))
BOTH = pytest.mark.parametrize("config", [THOMPSON, POOLS], ids=lambda config: config.kind)


class Numbers:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, split: Split) -> int | None:
        return self._size

    def task(self, split: Split, index: int) -> Task:
        return task(index, split)


def facts_of(selection: TaskSelection, rates: list[float], graded: int = 32, position: int = 0) -> TaskFacts:
    """Facts of tasks that were all tried at one position."""
    facts = TaskFacts.none(len(rates))
    for index, rate in enumerate(rates):
        selection.observe(facts, index, position, graded=graded, passed=rate * graded)
    return facts


def drawn(config: SelectionConfig, facts: TaskFacts, position: int, count: int = 2_000) -> list[float]:
    """Share of each task among draws at one position, by as many seeds."""
    size = len(facts.rate_N)
    counts = Counter(TaskSelection(config, size=size, seed=seed).choose(facts, position).index for seed in range(count))
    return [counts[index] / count for index in range(size)]


def test_thompson_sampling_prefers_what_is_neither_solved_nor_hopeless() -> None:
    hopeless, hard, middling, easy, solved = drawn(
        THOMPSON, facts_of(TaskSelection(THOMPSON, size=5, seed=0), [0.0, 0.1, 0.5, 0.9, 1.0]), 1
    )
    assert middling > max(hard, easy) > min(hard, easy) > max(hopeless, solved) > 0.03


def test_what_was_solved_long_ago_is_looked_at_again() -> None:
    facts = facts_of(TaskSelection(THOMPSON, size=2, seed=0), [1.0, 0.5])
    soon, late = (drawn(THOMPSON, facts, position)[0] for position in (1, 10_000))
    assert late > 2 * soon


def test_what_was_seen_a_half_life_ago_counts_half() -> None:
    rates = [0.0, 0.25, 0.5, 1.0]
    for seed in range(9):
        selection = TaskSelection(THOMPSON, size=4, seed=seed)
        later = 3 + 4 * 2  # two epochs of four tasks
        before, now = facts_of(selection, rates, 16, 3), facts_of(selection, rates, 8, later)
        assert selection.choose(before, later) == selection.choose(now, later)


def test_what_was_just_seen_counts_whole() -> None:
    selection, seen = TaskSelection(THOMPSON, size=4, seed=0), []
    for position in (0, 3, 11):
        facts = facts_of(selection, [0.0, 0.25, 0.5, 1.0], position=position)
        options, chance = ThompsonOptions(), np.random.default_rng(0)
        seen.append(thompson(options, facts, position / selection.half_life, selection.half_life, chance))
    assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


@pytest.mark.parametrize("tried", [0, 100])
def test_pools_have_their_shares_and_what_is_alike_rests(tried: int) -> None:
    facts = facts_of(TaskSelection(POOLS, size=6, seed=0), [0.0, 1.0, 0.1, 0.9, 0.5, 0.5], position=tried)
    assert drawn(POOLS, facts, tried + 11) == pytest.approx([0, 0, 0.15, 0.15, 0.35, 0.35], abs=0.04)
    assert drawn(POOLS, facts, tried + 12) == pytest.approx([0.075, 0.075, 0.075, 0.075, 0.35, 0.35], abs=0.04)


def test_the_bounds_of_a_pool_belong_to_it() -> None:
    options = PoolsOptions(easy_share=0.5, hard_share=0.25, easy_from=0.75, hard_to=0.25)
    facts = facts_of(TaskSelection(POOLS, size=3, seed=0), [0.75, 0.25, 0.5])
    assert pools(options, facts, 1).tolist() == [0.5, 0.25, 0.25]


def test_a_pool_without_a_share_is_drawn_from_where_no_other_has_tasks() -> None:
    options = PoolsOptions(easy_share=0.0, hard_share=0.5)
    facts = facts_of(TaskSelection(POOLS, size=3, seed=0), [0.9, 1.0, 0.8])
    assert pools(options, facts, 1).tolist() == [0.5, 0.0, 0.5]


def test_tasks_that_all_seem_certain_are_drawn_evenly() -> None:
    facts = facts_of(TaskSelection(THOMPSON, size=4, seed=0), [1.0] * 4, graded=10**30)
    assert TaskSelection(THOMPSON, size=4, seed=0).choose(facts, 1).weight == 1.0


def test_where_all_tasks_rest_all_are_drawn() -> None:
    for config in (POOLS, THOMPSON):
        assert all(drawn(config, facts_of(TaskSelection(config, size=3, seed=0), [0.0, 1.0, 1.0]), 1, count=60))
    selection = TaskSelection(POOLS, size=3, seed=0)
    assert selection.choose(facts_of(selection, [0.0, 1.0, 1.0]), 1).weight == pytest.approx(1.0)


@BOTH
def test_what_is_known_of_a_task_does_not_depend_on_the_order_in_which_groups_end(config: SelectionConfig) -> None:
    selection = TaskSelection(config, size=4, seed=0)
    forth, back = TaskFacts.none(4), TaskFacts.none(4)
    draws = [(0, 8, 3.0), (5, 8, 1.0), (9, 4, 4.0)]
    for facts, order in ((forth, draws), (back, draws[::-1])):
        for position, graded, passed in order:
            selection.observe(facts, 1, position, graded=graded, passed=passed)
    assert forth.drawn_N[1] == back.drawn_N[1] == 9
    assert forth.rate_N[1] == back.rate_N[1] == 1.0
    assert forth.passes_N[1] == pytest.approx(back.passes_N[1])
    assert forth.failures_N[1] == pytest.approx(back.failures_N[1])
    if config is THOMPSON:
        weights = [0.5 ** ((9 - position) / selection.half_life) for position, _, _ in draws]
        assert forth.passes_N[1] == pytest.approx(np.dot(weights, [passed for _, _, passed in draws]))


@BOTH
def test_a_draw_without_rewards_changes_nothing_but_its_position(config: SelectionConfig) -> None:
    selection = TaskSelection(config, size=2, seed=0)
    facts = facts_of(selection, [0.25, 0.5])
    selection.observe(facts, 1, 0, graded=0, passed=0.0)
    assert facts.rate_N.tolist() == [0.25, 0.5]
    assert (facts.passes_N[1], facts.failures_N[1]) == (16.0, 16.0)


def test_a_copy_of_facts_does_not_change_with_them() -> None:
    selection = TaskSelection(THOMPSON, size=2, seed=0)
    facts = facts_of(selection, [0.25, 0.5])
    copy = facts.copy()
    selection.observe(facts, 0, 5, graded=4, passed=4.0)
    for name in TaskFacts.__slots__:
        assert getattr(copy, name).tolist() == getattr(facts_of(selection, [0.25, 0.5]), name).tolist()
        assert getattr(copy, name)[0] != getattr(facts, name)[0], name


def test_a_recipe_that_takes_tasks_in_order_has_no_selection() -> None:
    with pytest.raises(ValueError, match="tasks are not chosen by"):
        TaskSelection(SelectionConfig(), size=2, seed=0)


@given(rates=st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.9, 1.0]), min_size=2, max_size=8), seed=st.integers(0, 5))
def test_weights_are_bounded_and_give_back_the_mean_over_all_tasks(rates: list[float], seed: int) -> None:
    """E[w] = 1 and E[w g] = mean of g, within 5 standard errors."""
    selection, size, count = TaskSelection(THOMPSON, size=len(rates), seed=seed), len(rates), 1_500
    facts = facts_of(selection, rates, graded=8)
    choices = [TaskSelection(THOMPSON, size=size, seed=draw).choose(facts, seed) for draw in range(count)]
    weights = np.array([choice.weight for choice in choices])
    assert weights.max() <= 1 / 0.2 + 1e-9
    gradients = np.arange(size) ** 2.0
    terms = weights * gradients[[choice.index for choice in choices]]
    assert abs(terms.mean() - gradients.mean()) <= 5 * terms.std() / np.sqrt(count) + 1e-9
    assert abs(weights.mean() - 1) <= 5 * weights.std() / np.sqrt(count) + 1e-9


def test_pools_leave_out_what_rests_and_nothing_else() -> None:
    selection = TaskSelection(POOLS, size=5, seed=3)
    facts = facts_of(selection, [1.0, 0.1, 0.9, 0.5, 0.5])
    gradients = np.array([0.0, 3.0, 1.0, 4.0, 2.0])  # that of a task that rests is 0
    terms = []
    for seed in range(3_000):
        choice = TaskSelection(POOLS, size=5, seed=seed).choose(facts, 1)
        terms.append(choice.weight * gradients[choice.index])
    assert np.mean(terms) == pytest.approx(gradients.mean(), abs=5 * np.std(terms) / np.sqrt(len(terms)))


@BOTH
def test_the_ledger_and_the_seed_decide_and_a_restart_changes_nothing(config: SelectionConfig, tmp_path: Path) -> None:
    """A process that was there from the beginning, one that starts now and one that asks again draw the same."""
    family = Numbers(6)
    selection = TaskSelection(config, size=6, seed=1)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        old = SelectedTasks(family, selection, ledger)
        for number in range(40):
            fresh = SelectedTasks(family, TaskSelection(config, size=6, seed=1), ledger)
            assert fresh.draw(number) == old.draw(number) == old.draw(number)
            slots = ledger.admit_next(old.draw, size=2, version=0, kept_below=99)
            assert slots is not None
            if number % 5:  # the others stay open
                for slot in slots:
                    reward = float(int(slot.task.task_id) % 3 == slot.slot)
                    ledger.record(rollout(slot.group_index, slot.slot, reward=reward), TRAIN)
        groups = list(ledger.groups(TRAIN))
        assert len({(group.task.task_id, group.epoch) for group in groups}) == len(groups) == 40
        for number in range(6):
            epochs = [group.epoch for group in groups if group.task.task_id == str(number)]
            assert epochs == list(range(1, len(epochs) + 1))
        assert {group.weight for group in groups} != {1.0}
        others = SelectedTasks(family, TaskSelection(config, size=6, seed=2), ledger)
        assert [others.draw(number) for number in range(20)] != [old.draw(number) for number in range(20)]


def test_a_selection_is_of_tasks_that_come_again() -> None:
    tasks: dict[str, Any]
    for settings, fault in (
        (["tasks.selection.kind=pools"], "tasks.family = 'bugfix' have no end"),
        (["tasks.selection.importance_weights=false"], "would have no effect with tasks.selection.kind = 'in_order'"),
        (["tasks.selection.kind=thompsen"], "tasks.selection.kind"),
    ):
        with pytest.raises(ConfigError, match=fault):
            default_recipe(settings)
    tasks = {"family": "summaries", "selection": {"kind": "pools", "options": {"easy_share": 0.6, "hard_share": 0.4}}}
    with pytest.raises(ConfigError, match="leave nothing for tasks that are neither"):
        parse_config({"tasks": tasks}, source="t")
    tasks = {"family": "summaries", "epochs": 2, "selection": {"kind": "pools", "options": {"uniform_share": 0.6}}}
    with pytest.raises(ConfigError, match=r"uniform_share.*it goes with 'thompson'"):
        parse_config({"tasks": tasks}, source="t")
    for options, fault in (({}, "tasks.epochs would have no effect"), ({"hard_to": 0.9}, "must be below easy_from")):
        tasks = {"family": "summaries", "epochs": 2, "selection": {"kind": "pools", "options": options}}
        with pytest.raises(ConfigError, match=fault):
            parse_config({"tasks": tasks}, source="t")
