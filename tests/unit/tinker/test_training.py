"""A training state, call by call: its losses, its optimiser, and the same logprobs as the engine's."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.config.inference import EngineConfig, NumericsConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.errors import UserError
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.protocols import Completion, SamplingParams
from etude.tinker.messages import BatchRequest, Datum, Numbers
from etude.tinker.training import AdamParams, TrainingState, loss_of

PROMPT = [3, 5, 8, 13]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = Decoder(TINY)
    model.initialise(0)
    save_checkpoint(folder, TINY, state_of(model), end_id=0, pad_id=0)
    return folder


@pytest.fixture
def state(checkpoint: Path) -> TrainingState:
    return TrainingState(checkpoint, NumericsConfig(replay="off"), "cpu")


def batch(data: list[Datum], loss_fn: str, *, forward_only: bool = False, **config: float) -> BatchRequest:
    return BatchRequest(
        model_id="m", seq_id=1, data=tuple(data), loss_fn=loss_fn, loss_config=config, forward_only=forward_only
    )


def imitated(tokens: list[int], first: int = 0) -> Datum:
    """Next-token prediction; the targets before ``first`` have no weight."""
    weights = [float(place >= first) for place in range(len(tokens) - 1)]
    inputs = {"target_tokens": np.array(tokens[1:], np.float64), "weights": np.array(weights)}
    return Datum(token_ids=np.array(tokens[:-1], np.int32), inputs=inputs)


def sampled(completion: Completion, advantage: float, shift: float = 0.0) -> Datum:
    """A datum as cookbooks make it: the targets of the prompt are 0, and have no advantage."""
    before = [0.0] * (len(PROMPT) - 1)
    ids = completion.token_ids.tolist()
    numbers = {
        "logprobs": [*before, *(completion.logprobs + shift).tolist()],
        "advantages": [*before, *[advantage] * len(ids)],
    }
    inputs = {name: np.array(values) for name, values in numbers.items()}
    targets = np.array([0.0] * len(before) + ids)
    return Datum(token_ids=np.array(PROMPT + ids[:-1], np.int32), inputs={"target_tokens": targets, **inputs})


def sample(state: TrainingState, count: int = 3) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        engine = NativeEngine(Weights(state.snapshot(), 0, ""), EngineConfig(max_length=64), seed=0)
        stepping = asyncio.create_task(engine.run())
        params = SamplingParams(max_tokens=12)
        calls = (engine.generate(PROMPT, params, session=str(number)) for number in range(count))
        completions = await asyncio.gather(*calls)
        stepping.cancel()
        return completions

    return asyncio.run(all_of_them())


def gradients(state: TrainingState) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])
    state.model.zero_grad()
    return flat


def test_engine_and_trainer_have_the_same_logprobs_to_the_bit_also_after_steps(state: TrainingState) -> None:
    for _ in range(2):
        completions = sample(state)
        data = [sampled(completion, 1.0) for completion in completions]
        logprobs, _ = state.forward_backward(batch(data, "importance_sampling"))
        for own, completion in zip(logprobs, completions, strict=True):
            assert own[len(PROMPT) - 1 :].tobytes() == completion.logprobs.tobytes()
        state.optim_step(AdamParams(learning_rate=1e-2))


def test_imitation_is_the_weighted_sum_and_is_learnt(state: TrainingState) -> None:
    data = [imitated([1, 2, 3, 4, 5], first=2), imitated([9, 8, 7])]
    losses = []
    for _ in range(15):
        logprobs, metrics = state.forward_backward(batch(data, "cross_entropy"))
        weighted = sum(float((own * datum.inputs["weights"]).sum()) for own, datum in zip(logprobs, data, strict=True))
        assert metrics["loss:sum"] == pytest.approx(-weighted, rel=1e-5)
        losses.append(metrics["loss:sum"])
        state.optim_step(AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.3 * losses[0]


def own_losses(state: TrainingState, datum: Datum) -> tuple[Numbers, Numbers]:
    logprobs, _ = state.forward_backward(batch([datum], "importance_sampling", forward_only=True))
    return np.exp(logprobs[0] - datum.inputs["logprobs"]), datum.inputs["advantages"]


def test_losses_are_sums_over_ratios_and_advantages(state: TrainingState) -> None:
    (completion,) = sample(state, 1)
    datum = sampled(completion, 1.0, shift=-0.5)  # all ratios are e^0.5: above the upper clip
    ratios, advantages = own_losses(state, datum)
    (_, plain), (_, clipped) = (
        state.forward_backward(batch([datum], name, forward_only=True)) for name in ("importance_sampling", "ppo")
    )
    assert plain["loss:sum"] == pytest.approx(-float((ratios * advantages).sum()), rel=1e-5)
    assert clipped["loss:sum"] == pytest.approx(-float((ratios.clip(0.8, 1.2) * advantages).sum()), rel=1e-5)
    state.forward_backward(batch([datum], "ppo"))
    assert not gradients(state).any()
    state.forward_backward(batch([datum], "ppo", clip_high_threshold=2.0))
    assert gradients(state).any()


def dro(p: Tensor, q: Tensor, a: Tensor, _m: Tensor, beta: float) -> Tensor:
    return -(p * a - 0.5 * beta * (p - q) ** 2).sum()


def ppo(p: Tensor, q: Tensor, a: Tensor, _m: Tensor, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    ratio = (p - q).exp()
    return -torch.minimum(ratio * a, ratio.clamp(clip_low_threshold, clip_high_threshold) * a).sum()


def cispo(p: Tensor, q: Tensor, a: Tensor, _m: Tensor, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    return -((p - q).exp().clamp(clip_low_threshold, clip_high_threshold).detach() * p * a).sum()


def gspo(p: Tensor, q: Tensor, a: Tensor, m: Tensor, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    ratio = ((p.detach() - q)[m != 0].mean() + p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(clip_low_threshold, clip_high_threshold) * a).sum()


def importance_sampling(p: Tensor, q: Tensor, a: Tensor, _m: Tensor) -> Tensor:
    return -((p - q).exp() * a).sum()


@pytest.mark.parametrize(
    ("formula", "given", "meant"),
    [
        (importance_sampling, {}, {}),
        (ppo, {}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        (cispo, {"clip_low_threshold": 0.7}, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.2}),
        (gspo, {}, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
        (gspo, *[{"clip_low_threshold": 0.97, "clip_high_threshold": 1.05}] * 2),
        (dro, {"beta": 0.05}, {"beta": 0.05}),
    ],
)
def test_a_loss_is_its_formula_written_out_in_value_and_gradient(
    state: TrainingState, formula: Callable[..., Tensor], given: dict[str, float], meant: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    data = [noisy(sampled(completion, 1.0), rng, masked=formula is gspo) for completion in sample(state, 4)]
    logprobs, metrics = state.forward_backward(batch(data, formula.__name__, forward_only=False, **given))
    own = gradients(state)

    imitations, total = [], 0.0
    for datum, values in zip(data, logprobs, strict=True):
        p = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        q, a = (torch.from_numpy(datum.inputs[name]) for name in ("logprobs", "advantages"))
        loss = formula(p, q, a, torch.from_numpy(datum.inputs.get("sequence_ratio_mask", a.numpy())), **meant)
        loss.backward()
        assert p.grad is not None
        weights = {"target_tokens": datum.inputs["target_tokens"], "weights": -p.grad.numpy()}
        imitations.append(replace(datum, inputs=weights))
        total += float(loss.detach())
    state.forward_backward(batch(imitations, "cross_entropy"))
    assert metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert own.any()
    torch.testing.assert_close(own, gradients(state), rtol=1e-4, atol=1e-6)


def noisy(datum: Datum, rng: np.random.Generator, *, masked: bool) -> Datum:
    """Another policy's logprobs and random advantages of every sampled token; ratios on both sides of a clip."""
    mask = datum.inputs["advantages"]
    inputs = {
        "target_tokens": datum.inputs["target_tokens"],
        "logprobs": datum.inputs["logprobs"] + rng.normal(0, 0.3, len(mask)) * mask,
        "advantages": rng.normal(0, 1, len(mask)) * mask,
        **({"sequence_ratio_mask": mask} if masked else {}),
    }
    return replace(datum, inputs=inputs)


def test_gradients_add_up_until_the_step(state: TrainingState) -> None:
    one, other = imitated([1, 2, 3]), imitated([4, 5, 6, 7])
    state.forward_backward(batch([one], "cross_entropy"))
    state.forward_backward(batch([other], "cross_entropy"))
    apart = gradients(state)
    state.forward_backward(batch([one, other], "cross_entropy"))
    torch.testing.assert_close(gradients(state), apart)
    state.forward_backward(batch([one], "cross_entropy", forward_only=True))
    with pytest.raises(UserError, match="without a gradient"):
        state.optim_step(AdamParams())


def test_a_saved_state_goes_on_as_if_nothing_had_been(state: TrainingState, checkpoint: Path, tmp_path: Path) -> None:
    def step(one: TrainingState) -> float:
        loss = one.forward_backward(batch([imitated([1, 2, 3, 4])], "cross_entropy"))[1]["loss:sum"]
        one.optim_step(AdamParams(learning_rate=1e-2))
        return loss

    step(state)
    state.save(tmp_path / "weights.safetensors")
    restored = TrainingState(checkpoint, NumericsConfig(replay="off"), "cpu")
    restored.load(tmp_path / "weights.safetensors", optimiser=True)
    assert [step(restored) for _ in range(3)] == [step(state) for _ in range(3)]


@pytest.mark.parametrize("optimiser", [True, False])
def test_loaded_weights_meet_no_moments_or_gradients_of_others(
    state: TrainingState, checkpoint: Path, tmp_path: Path, *, optimiser: bool
) -> None:
    """The state was saved before its first step, so it has no moments, with or without ``optimiser``."""

    def step(one: TrainingState) -> list[float]:
        one.forward_backward(batch([imitated([1, 2, 3, 4])], "cross_entropy"))
        one.optim_step(AdamParams(learning_rate=1e-2))
        (logprobs,), _ = one.forward_backward(batch([imitated([1, 2, 3, 4])], "cross_entropy", forward_only=True))
        return [float(each) for each in logprobs]

    state.save(tmp_path / "weights.safetensors")
    expected = step(TrainingState(checkpoint, NumericsConfig(replay="off"), "cpu"))
    step(state)
    state.forward_backward(batch([imitated([4, 3, 2, 1])], "cross_entropy"))
    state.load(tmp_path / "weights.safetensors", optimiser=optimiser)
    assert step(state) == expected


def with_inputs(**others: float) -> Datum:
    """A datum of two tokens for the clipped losses, with changed or additional inputs."""
    inputs = {"target_tokens": 1.0, "logprobs": -1.0, "advantages": 1.0, **others}
    return Datum(token_ids=np.array([1, 2], np.int32), inputs={name: np.full(2, x) for name, x in inputs.items()})


@pytest.mark.parametrize(
    ("data", "loss_fn", "message"),
    [
        ([imitated([1, 2])], "stable_reinforce", "is not one of this server's, for it needs what Tinker keeps"),
        ([imitated([1, 2])], "custom", "is not one of this server's: set one of cross_entropy, importance_sampling"),
        ([imitated([1, 2])], "ppo", "has no 'advantages'"),
        ([with_inputs(weights=1.0)], "ppo", "has 'weights' in loss_fn_inputs, which the loss does not use"),
        ([with_inputs()], "gspo", "has no 'sequence_ratio_mask'"),
        ([with_inputs(sequence_ratio_mask=0.0)], "gspo", "sequence_ratio_mask is 0 everywhere"),
        ([with_inputs()], "dro", "needs loss_fn_config"),
        ([imitated([1, 99_999])], "cross_entropy", "outside of the vocabulary"),
        ([imitated([1])], "cross_entropy", "has no token"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    state: TrainingState, data: list[Datum], loss_fn: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        state.forward_backward(batch(data, loss_fn))


def test_an_option_without_effect_or_sense_is_refused() -> None:
    with pytest.raises(UserError, match="'clip_low_threshold', which would have no effect on 'cross_entropy'"):
        loss_of("cross_entropy", {"clip_low_threshold": 0.5})
    with pytest.raises(UserError, match=r"clip_low_threshold=0\.8, clip_high_threshold=0\.2: they are ratios"):
        loss_of("ppo", {"clip_high_threshold": 0.2})
