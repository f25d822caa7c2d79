"""Effort: what is counted, and its cost."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.training import SAMPLED_KINDS, EffortConfig
from etude.rewards.shaping.effort import Effort, concave_cost, effort_of, effort_penalty
from etude.types import Finish, Rollout, RolloutStatus, Turn

THOUGHT = 99
"""Ends thinking."""


def turn(prompt: int, completion: list[int], after: Turn | None = None) -> Turn:
    """A turn with a context of ``prompt`` tokens, which begins with the context and reply of ``after``."""
    stored = [] if after is None else [*after.prompt_ids, *after.completion_ids]
    return Turn(
        prompt_ids=np.array([*stored, *[0] * (prompt - len(stored))], np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.zeros(len(completion), np.float32),
        versions=np.zeros(len(completion), np.int32),
        finish=Finish.STOP,
    )


FIRST = turn(10, [1, 2, THOUGHT, 3])
ROLLOUT = Rollout(
    rollout_id="r",
    group_index=0,
    slot=0,
    attempt=0,
    status=RolloutStatus.GRADED,
    reward=1.0,
    counts={"read": 2, "malformed": 1},
    turns=(FIRST, turn(20, [4, 5], FIRST), turn(5, [THOUGHT, 6, 7])),
)
"""The second turn has read 6 tokens more than the first left; the third goes on from an edited history."""
SPENT = Effort(thinking_tokens=4, call_tokens=3, output_tokens=6, final_tokens=2, calls=3, turns=3)


def by_integral(spent: float, scale: float, curvature: float, steps: int = 20_000) -> float:
    """∫₀ˣ (1 + kt)^(−q) dt by the midpoint rule: the marginal cost, summed up."""
    width = spent / steps
    return math.fsum((1 + scale * (i + 0.5) * width) ** -curvature for i in range(steps)) * width


def test_every_token_is_counted_once_under_its_kind() -> None:
    effort = effort_of(ROLLOUT.turns, ROLLOUT.counts, THOUGHT)
    assert effort == SPENT
    sampled = sum(len(turn.completion_ids) for turn in ROLLOUT.turns)
    assert effort.thinking_tokens + effort.call_tokens + effort.final_tokens == sampled
    assert effort_of(ROLLOUT.turns, ROLLOUT.counts, -1).thinking_tokens == 0


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(("thinking_tokens", 4), ("call_tokens", 3), ("output_tokens", 6), ("final_tokens", 2)),
        *(("calls", 3), ("turns", 3)),
    ],
)
def test_each_price_is_of_its_own_kind(kind: str, count: int) -> None:
    thinking = {"thinking_end_id": THOUGHT} if kind in SAMPLED_KINDS else {}
    config = EffortConfig.model_validate({"weight": 0.5, "curvature": 0.0, "prices": {kind: 2.0}, **thinking})
    assert effort_penalty(ROLLOUT, config) == pytest.approx(0.5 * 2.0 * count)


def test_what_a_sub_agent_reads_between_two_turns_is_not_charged_to_either() -> None:
    main = turn(5000, [1])
    agent = turn(200, [2])
    more = turn(300, [3], agent)
    back = turn(5007, [4], main)
    turns = (main, agent, more, back, turn(5020, [5], back))
    assert effort_of(turns, {}, THOUGHT).output_tokens == 99 + 6 + 12


def test_effort_is_free_unless_the_recipe_prices_it() -> None:
    assert effort_penalty(ROLLOUT, EffortConfig()) == 0.0


@pytest.mark.parametrize("curvature", [0.0, 0.5, 1.0, 1.0 + 1e-9, 2.0])
def test_the_cost_is_the_sum_of_its_margins(curvature: float) -> None:
    for spent in (0.0, 3.0, 500.0):
        results = concave_cost(spent, scale=0.02, curvature=curvature)
        assert math.isclose(results, by_integral(spent, 0.02, curvature), rel_tol=1e-5, abs_tol=1e-12)


def test_the_closed_forms_of_the_paper() -> None:
    assert concave_cost(7.0, scale=3.0, curvature=0.0) == pytest.approx(7.0)
    assert concave_cost(7.0, scale=3.0, curvature=1.0) == pytest.approx(math.log(22) / 3)
    assert concave_cost(1e30, scale=3.0, curvature=2.0) == pytest.approx(1 / 3)
    assert concave_cost(7.0, scale=3.0, curvature=0.5) == pytest.approx((22**0.5 - 1) / 1.5)


@settings(deadline=None)
@given(st.floats(0, 1e5), st.floats(1e-2, 1e4), st.floats(1e-4, 10), st.floats(0, 3))
def test_more_costs_more_and_less_each_time(spent: float, more: float, scale: float, curvature: float) -> None:
    low, middle, high = (concave_cost(spent + i * more, scale=scale, curvature=curvature) for i in range(3))
    assert 0 <= low <= middle <= high
    assert high - middle <= (middle - low) * (1 + 1e-6) + 1e-9 * high
