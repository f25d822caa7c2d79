"""The RL optimiser: it makes rewarded tokens more likely, and continues exactly where it stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from etude.config.inference import NumericsConfig
from etude.config.training import BASELINES, DualClippedOptions, LossConfig, OptimiserConfig
from etude.errors import DivergedError, InfrastructureError
from etude.models.arithmetic import Arithmetic
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.fast import FastArithmetic
from etude.models.hf import CausalModel
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.trainer.batching.batch import build_batch
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.policy import NOTHING_LEARNT, PolicyTrainer, sample_share
from etude.types import NO_ROUTE, UNSAMPLED, Finish, Group, Observation, Routes, Trajectory, Turn
from records import TASK, make_rollout

OFF = NumericsConfig(replay="off")
TIS = LossConfig()


def make_trainer(
    numerics: NumericsConfig = OFF, std: float = 0.04, loss: LossConfig = TIS, arithmetic: Arithmetic | None = None
) -> PolicyTrainer:
    model = Decoder(TINY, arithmetic)
    model.initialise(0, std)
    optimiser = build_optimiser(model, OptimiserConfig(), learning_rate=1e-2, betas=(0.9, 0.95))
    schedule = RateSchedule(steps=100, warmup_steps=1)
    return PolicyTrainer(Optimisation(model, optimiser, schedule, clip_norm=1.0), loss, numerics)


def totals(tokens: int) -> Totals:
    """Totals of a batch; the default loss does not count trajectories."""
    return Totals(tokens=tokens, trajectories=1)


def logprobs(model: CausalModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        all_tokens = model.logits(model.forward_packed(torch.tensor(ids))).log_softmax(-1)
    return all_tokens[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def make_trajectory(model: CausalModel, ids: list[int], sampled: int, advantage: float) -> Trajectory:
    """A trajectory whose last ``sampled`` tokens the model itself sampled."""
    length = len(ids)
    mask = np.arange(length) >= length - sampled
    engine = np.zeros(length, np.float32)
    engine[1:] = logprobs(model, ids).numpy()
    return Trajectory(
        rollout_id="r",
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, engine, 0).astype(np.float32),
        versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        turn_starts=(length - sampled,),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
    )


def make_batch(model: CausalModel) -> list[tuple[Trajectory, ...]]:
    good = make_trajectory(model, [1, 2, 3, 4, 5], 2, 0.5)
    bad = make_trajectory(model, [1, 2, 3, 6], 1, -0.5)
    return [(good,), (bad,)]


def test_a_step_makes_the_good_likelier_and_the_bad_less() -> None:
    trainer = make_trainer()
    chunks = make_batch(trainer.model)
    before = [float(logprobs(trainer.model, ids)[2]) for ids in ([1, 2, 3, 4], [1, 2, 3, 6])]
    stats = trainer.step(1, chunks, totals(3))
    after = [float(logprobs(trainer.model, ids)[2]) for ids in ([1, 2, 3, 4], [1, 2, 3, 6])]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert stats["trained_tokens"] == 9
    assert stats["truncated_share"] == 0


def assert_same_weights(one: PolicyTrainer, other: PolicyTrainer) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_how_a_batch_is_cut_does_not_change_the_step() -> None:
    alone, jointly = make_trainer(), make_trainer()
    good, bad = (chunk[0] for chunk in make_batch(alone.model))
    alone.step(1, [(good,), (bad,)], totals(3))
    jointly.step(1, [(good, bad)], totals(3))
    for one, other in zip(alone.model.parameters(), jointly.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_pass_without_trajectories_changes_nothing() -> None:
    with_it, without = make_trainer(), make_trainer()
    chunks = make_batch(without.model)
    assert with_it.step(1, [*chunks, ()], totals(3)) == without.step(1, chunks, totals(3))
    assert_same_weights(with_it, without)


@pytest.mark.parametrize("arithmetic", [FastArithmetic(), InvariantArithmetic()], ids=["fast", "invariant"])
def test_the_same_batches_make_the_same_policy_bit_for_bit(arithmetic: Arithmetic) -> None:
    first, second = make_trainer(arithmetic=arithmetic), make_trainer(arithmetic=arithmetic)
    chunks = make_batch(first.model)
    for step in (1, 2, 3):
        assert first.step(step, chunks, totals(3)) == second.step(step, chunks, totals(3))
    assert_same_weights(first, second)
    assert not torch.equal(first.model.embedding, make_trainer().model.embedding)


def test_tokens_that_a_correction_leaves_out_are_counted() -> None:
    trainer = make_trainer(loss=LossConfig(correction="mis"))
    (good,), (bad,) = make_batch(trainer.model)
    unlikely = replace(bad, logprobs=bad.logprobs - 1)  # the trainer finds it e times likelier than its engine did
    stats = trainer.step(1, [(good, unlikely)], totals(3))
    assert stats["masked_share"] == pytest.approx(1 / 3)
    assert stats["truncated_share"] == 0


@pytest.mark.parametrize(("step", "masked_share"), [(1, 0.0), (2, 0.0), (4, 1.0)])
def test_the_decoupled_form_takes_the_age_of_a_token_into_account(step: int, masked_share: float) -> None:
    """A version behind, all of the way from the engine is the last step's; three behind, two thirds are not: e²."""
    trainer = make_trainer(loss=LossConfig(kind="ppo_clip", correction="decoupled"))
    (good,), _ = make_batch(trainer.model)
    # A bad token that has become likelier is not clipped.
    stale = replace(good, logprobs=good.logprobs - 3, advantages=-good.advantages)
    assert trainer.step(step, [(stale,)], totals(2))["masked_share"] == masked_share


def test_a_recomputed_old_policy_is_what_ratios_are_taken_to() -> None:
    """The engine is off by e³, which is TIS's to mend; the policy has moved by nothing, so nothing is clipped."""
    trainer = make_trainer(loss=LossConfig(kind="ppo_clip", options=DualClippedOptions(old_policy="recomputed")))
    (good,), _ = make_batch(trainer.model)
    strange = replace(good, logprobs=good.logprobs - 3, old_logprobs=good.logprobs)
    stats = trainer.step(1, [(strange,)], totals(2))
    assert (stats["masked_share"], stats["truncated_share"]) == (0.0, 1.0)
    moved = replace(good, old_logprobs=good.logprobs - 3)
    assert trainer.step(2, [(moved,)], totals(2))["masked_share"] == 1.0


def test_a_batch_without_the_old_policys_scores_is_refused_where_ratios_are_taken_to_it() -> None:
    """Ratios to the policy itself would all be 1: nothing would be clipped, and nobody would notice."""
    trainer = make_trainer(loss=LossConfig(kind="ppo_clip", options=DualClippedOptions(old_policy="recomputed")))
    with pytest.raises(AssertionError, match="old policy"):
        trainer.step(1, make_batch(trainer.model), totals(4))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_divergence_in_the_loss_pulls_towards_the_reference(estimator: str) -> None:
    trainer = make_trainer(loss=LossConfig.model_validate({"kl_coef": 1.0, "kl_estimator": estimator}))
    (good,), _ = make_batch(trainer.model)
    expected = good.logprobs + np.where(good.loss_mask, np.array([0, 0, 0, 0.3, -0.3]), 0).astype(np.float32)
    still = replace(good, advantages=np.zeros_like(good.advantages), reference_logprobs=expected)
    for step in range(1, 31):
        trainer.step(step, [(still,)], totals(2))
    after = np.abs(logprobs(trainer.model, [1, 2, 3, 4, 5]).numpy()[2:] - expected[3:])
    assert (after < 0.15).all(), "it was 0.3 away"


def test_a_bonus_makes_what_is_drawn_from_more_even() -> None:
    trainer = make_trainer(std=0.2, loss=LossConfig(entropy_coef=1.0))
    (good,), _ = make_batch(trainer.model)
    still = replace(good, advantages=np.zeros_like(good.advantages))
    entropies = [trainer.step(step, [(still,)], totals(2))["entropy"] for step in (1, 2, 3)]
    assert entropies == sorted(set(entropies))


def test_an_empty_batch_leaves_the_weights_alone() -> None:
    trainer = make_trainer()
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.step(1, [], totals(0)) == NOTHING_LEARNT
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_it_says_once_that_the_weights_are_about_to_change() -> None:
    trainer = make_trainer()
    chunks = make_batch(trainer.model)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    seen: list[bool] = []

    def look() -> None:
        parameters = list(trainer.model.parameters())
        seen.append(all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)))
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in parameters)

    trainer.step(1, chunks, totals(3), before_update=look)
    assert seen == [True], "exactly once, with the gradients there and the weights as they were"
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    trainer.step(2, [], totals(0), before_update=look)
    assert seen == [True], "an empty batch changes nothing, so nobody need wait for it"


def test_weights_that_may_not_change_yet_do_not() -> None:
    trainer = make_trainer()
    before = [parameter.clone() for parameter in trainer.model.parameters()]

    def refuse() -> None:
        raise InfrastructureError("the version before was not read in time")

    with pytest.raises(InfrastructureError):
        trainer.step(1, make_batch(trainer.model), totals(3), before_update=refuse)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_nothing() -> None:
    trainer = make_trainer()
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    broken = make_trajectory(trainer.model, [1, 2, 3, 4, 5], 2, float("nan"))
    calls: list[None] = []
    with pytest.raises(DivergedError, match="step 1"):
        trainer.step(1, [(broken,)], totals(2), before_update=lambda: calls.append(None))
    assert calls == []
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_restored_trainer_takes_the_same_next_step_bit_for_bit(tmp_path: Path) -> None:
    first, second = make_trainer(), make_trainer()
    first.step(1, make_batch(first.model), totals(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, first.optimisation.tensors())
    second.optimisation.restore(checkpoints.load(1))
    chunks = make_batch(first.model)
    first.step(2, chunks, totals(3))
    second.step(2, chunks, totals(3))
    assert_same_weights(first, second)


def test_a_sample_is_reproducible_and_never_empty() -> None:
    model = make_trainer().model
    batch = [make_trajectory(model, [1, 2, i], 1, 1.0) for i in range(3, 13)]
    assert sample_share(batch, 0.3, step=4) == sample_share(batch, 0.3, step=4)
    assert len(sample_share(batch, 0.3, step=4)) == 3
    assert len(sample_share(batch, 0.001, step=4)) == 1
    assert sample_share(batch, 0.0, step=4) == []


def own_routes(model: CausalModel, ids: list[int]) -> Routes:
    """[L, layers, k] the routes of an engine with the same router; those of the last token are unknown."""
    routing = Routing(record=True)
    with torch.no_grad():
        model.forward_packed(torch.tensor(ids), routing=routing)
    routes = routing.recorded().numpy().astype(np.uint16)
    routes[-1] = NO_ROUTE
    return routes


def other_routes(routes: Routes, experts: int) -> Routes:
    """Every expert but the routed ones, in each layer."""
    flipped = routes.copy()
    for row in np.ndindex(routes.shape[:2]):
        others = [expert for expert in range(experts) if expert not in routes[row]]
        flipped[row] = others[: routes.shape[2]]
    flipped[-1] = NO_ROUTE
    return flipped


IDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("mode", "rows"), [("off", 0), ("completion", 3), ("full", 6)])
def test_the_mode_says_whose_routes_are_replayed(mode: Literal["off", "completion", "full"], rows: int) -> None:
    trainer = make_trainer(NumericsConfig(replay=mode, replay_floor=0.0))
    routes = other_routes(own_routes(trainer.model, IDS), experts=4)
    trajectory = replace(make_trajectory(trainer.model, IDS, 3, 0.5), routes=routes)
    stats = trainer.step(1, [(trajectory,)], totals(3))
    pairs = rows * routes.shape[1] * routes.shape[2]
    assert (stats["replayed_pairs"], stats["replaced_pairs"]) == (pairs, 0)
    assert (stats["flipped_pairs"] > 0) == (rows > 0)


def test_replaying_what_the_router_chooses_anyway_changes_no_bit() -> None:
    live, replayed = make_trainer(), make_trainer(NumericsConfig(replay="full"))
    for trainer in (live, replayed):
        trajectory = make_trajectory(trainer.model, IDS, 3, 0.5)
        trajectory = replace(trajectory, routes=own_routes(trainer.model, IDS))
        stats = trainer.step(1, [(trajectory, make_trajectory(trainer.model, [1, 2, 6], 1, -0.5))], totals(4))
        assert (stats["flipped_pairs"], stats["replaced_pairs"]) == (0, 0)
    assert_same_weights(live, replayed)


def test_a_router_learns_from_tokens_whose_experts_the_engine_chose() -> None:
    trainer = make_trainer(NumericsConfig(replay="full", replay_floor=0.0), std=0.2)
    routes = other_routes(own_routes(trainer.model, IDS), experts=4)
    trajectory = replace(make_trajectory(trainer.model, IDS, 3, 0.5), routes=routes)
    trainer.step(1, [(trajectory,)], totals(3))
    routers = {name: p.grad for name, p in trainer.model.named_parameters() if "router" in name}
    assert len(routers) == 2
    assert all(gradient is not None and gradient.any() for gradient in routers.values())


def test_implausible_experts_are_replaced_and_counted() -> None:
    strict = make_trainer(NumericsConfig(replay="completion", replay_floor=1.0), std=0.4)
    routes = other_routes(own_routes(strict.model, IDS), experts=4)
    trajectory = replace(make_trajectory(strict.model, IDS, 3, 0.5), routes=routes)
    stats = strict.step(1, [(trajectory,)], totals(3))
    assert stats["replaced_pairs"] == stats["flipped_pairs"] == stats["replayed_pairs"] == 12


def test_the_temperature_is_part_of_the_policy() -> None:
    """At the engine's temperature nothing is truncated; taken for 1 the same tokens' ratios are far off."""
    trainer = make_trainer(std=0.4)
    with torch.no_grad():
        logits = trainer.model.logits(trainer.model.forward_packed(torch.tensor(IDS)))
    sharp = (logits / 0.2).log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:]).unsqueeze(1)).squeeze(1)
    trajectory = make_trajectory(trainer.model, IDS, 6, 0.5)
    engine = np.where(trajectory.loss_mask, np.append(np.float32(0), sharp.numpy()), 0).astype(np.float32)
    right = replace(trajectory, logprobs=engine, temperatures=np.where(trajectory.loss_mask, 0.2, 1).astype(np.float32))
    assert trainer.step(1, [(right,)], totals(6))["truncated_share"] == 0
    assert make_trainer(std=0.4).step(1, [(replace(trajectory, logprobs=engine),)], totals(6))["truncated_share"] > 0.3


def test_an_undecided_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the device"):
        make_trainer(NumericsConfig())


def live_session(model: CausalModel, name: int, ids: list[int], sampled: int, reward: float) -> Group:
    engine = logprobs(model, ids)[-sampled:].numpy().astype(np.float32)
    turn = Turn(
        prompt_ids=np.array(ids[:-sampled], np.int32), completion_ids=np.array(ids[-sampled:], np.int32),
        logprobs=engine - 0.1, versions=np.zeros(sampled, np.int32), finish=Finish.STOP,
    )  # fmt: skip
    observation = Observation(user=f"u{name}", day=0, template="t", arm="", prompt_tokens=len(ids) - sampled)
    rollout = replace(make_rollout(f"s{name}", turn, group=name, reward=reward), observation=observation)
    return Group(index=name, task=TASK, admitted_version=0, rollouts=(rollout,))


@pytest.mark.parametrize("kind", BASELINES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_every_loss_learns_from_groups_of_one_held_to_a_reference_or_not(kind: str, kl_coef: float) -> None:
    """A session's advantage compares it with the others; liked replies become more likely."""
    options: dict[str, object] = {"aggregation_options": {"sequence_tokens": 4}} if kind == "dr_grpo" else {}
    options |= {"options": {"clip_low": 0.9, "clip_high": 0.9}} if kind == "gspo" else {}
    loss = LossConfig.model_validate({"kind": kind, "baseline": "mean", "kl_coef": kl_coef, **options})
    trainer = make_trainer(loss=loss)
    groups = [
        live_session(trainer.model, 0, [1, 2, 3, 4], 1, 1.0), live_session(trainer.model, 1, [1, 2, 3, 6], 1, 0.0)
    ]  # fmt: skip
    batch = build_batch(1, groups)
    trajectories = [replace(one, reference_logprobs=one.logprobs) for one in batch.trajectories]
    before = [float(logprobs(trainer.model, ids)[2]) for ids in ([1, 2, 3, 4], [1, 2, 3, 6])]
    stats = trainer.step(1, [trajectories], Totals(tokens=batch.num_loss_tokens, trajectories=2))
    after = [float(logprobs(trainer.model, ids)[2]) for ids in ([1, 2, 3, 4], [1, 2, 3, 6])]
    assert stats["grad_norm"] > 0
    assert after[0] - before[0] > after[1] - before[1]
