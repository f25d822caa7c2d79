"""A recipe's penalties of each rollout."""

import pytest
import torch

from etude.config.inference import NumericsConfig
from etude.config.recipe import RunConfig
from etude.config.training import EffortConfig, LossConfig
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.rewards.shaping.effort import effort_penalty
from etude.run.penalties import Penalties
from etude.trainer.batching.build import build_trajectories
from etude.trainer.reference import Reference
from etude.types import (
    Disposition,
    Group,
    Verdict,
)
from records import TASK, make_rollout, make_turn

EFFORT = EffortConfig(weight=0.5, prices={"turns": 1.0})
torch.set_num_threads(1)


SUSPECT = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy",), hacked=True, graded=1.0)
PLAIN = make_rollout("plain", make_turn([1, 2], [3, 4]), make_turn([1, 2, 3, 4, 5], [6]))
BRANCHED = make_rollout("branched", make_turn([1, 2], [3, 4, 4]), make_turn([7], [8, 9]))
GROUPS = [
    Group(index=0, task=TASK, admitted_version=0, rollouts=(PLAIN,)),
    Group(
        index=1,
        task=TASK,
        admitted_version=0,
        rollouts=(BRANCHED, make_rollout("spy", make_turn([1], [2]), verdict=SUSPECT)),
    ),
]


def make_reference() -> Reference:
    model = Decoder(TINY, InvariantArithmetic())
    model.initialise(0, std=0.2)
    return Reference.alone(Decoder(TINY, InvariantArithmetic()), state_of(model), NumericsConfig())


def test_nothing_is_taken_off_unless_the_recipe_says_so() -> None:
    assert Penalties(RunConfig(), None).of(GROUPS) == {}


def test_effort_and_the_way_from_the_reference_add_up_over_all_branches() -> None:
    config = RunConfig(effort=EFFORT, loss=LossConfig(reference_beta=0.1))
    reference = make_reference()
    result = Penalties(config, reference).of(GROUPS)
    assert set(result) == {"plain", "branched"}
    for rollout, branches in ((PLAIN, 1), (BRANCHED, 2)):
        trajectories = build_trajectories(rollout, 0.0)
        assert len(trajectories) == branches
        nats = sum(nats for trajectory in trajectories for nats in reference.divergences([trajectory]))
        assert nats != 0
        assert result[rollout.rollout_id] == pytest.approx(effort_penalty(rollout, EFFORT) + 0.1 * nats, rel=1e-6)


def test_a_rank_that_has_no_rollout_has_no_penalty() -> None:
    config = RunConfig(effort=EFFORT, loss=LossConfig(reference_beta=0.1))
    assert Penalties(config, make_reference()).of([]) == {}


def test_a_reference_is_there_exactly_where_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"reference_beta = 0 does not go with"):
        Penalties(RunConfig(), make_reference())
    with pytest.raises(ValueError, match=r"reference_beta = 0\.1 does not go with None"):
        Penalties(RunConfig(loss=LossConfig(reference_beta=0.1)), None)
