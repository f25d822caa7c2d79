"""Hinted turns: the student comes nearer to the teacher there, and nothing else is touched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.config.hints import HintRule, HintsConfig
from etude.config.inference import NumericsConfig
from etude.config.training import LossConfig, OptimiserConfig, SumNormOptions
from etude.models.decoder import Decoder
from etude.models.spec import TINY, TINY_DENSE, ModelSpec
from etude.trainer.distillation import Distillation, DistillationExample, TokenDivergences, divergences, prefix_weights
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.policy import NOTHING_LEARNT, PolicyTrainer
from etude.types import NO_ROUTE, UNSAMPLED, Routes, Trajectory

OFF = NumericsConfig(replay="off")
DEFAULT = LossConfig()
HINTS = HintsConfig(weight=2.0, contexts="all")
SAMPLED = HintsConfig(weight=2.0, estimator="sampled", contexts="all")
BOTH = pytest.mark.parametrize("hints", [HINTS, SAMPLED], ids=["full", "sampled"])
torch.set_num_threads(1)


def make_model(spec: ModelSpec = TINY) -> Decoder:
    model = Decoder(spec)
    model.initialise(0, 0.2)
    return model


def make_trainer(hints: HintsConfig = HINTS, loss: LossConfig = DEFAULT) -> PolicyTrainer:
    model = make_model()
    optimiser = build_optimiser(model, OptimiserConfig(), learning_rate=3e-3, betas=(0.9, 0.95))
    optimisation = Optimisation(model, optimiser, RateSchedule(steps=100, warmup_steps=1), clip_norm=1.0)
    return PolicyTrainer(optimisation, loss, OFF, hints=hints)


def make_view(prompt: list[int], reply: list[int], *, temperature: float = 1.0, engine: float = -2.0) -> Trajectory:
    """One turn as it was sampled."""
    length = len(prompt) + len(reply)
    mask = np.arange(length) >= len(prompt)
    return Trajectory(
        rollout_id="r",
        token_ids=np.array(prompt + reply, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, engine, 0).astype(np.float32),
        versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        turn_starts=(len(prompt),),
        advantages=np.zeros(length, np.float32),
    )


def make_example(prompt: list[int], reply: list[int], *, temperature: float = 1.0) -> DistillationExample:
    """The hint is two tokens, before the last one of the context."""
    hinted = [*prompt[:-1], 30, 31, prompt[-1]]
    return DistillationExample(
        student=make_view(prompt, reply, temperature=temperature),
        teacher=make_view(hinted, reply, temperature=temperature),
    )


EXAMPLES = (make_example([1, 2, 3, 4], [5, 6, 7]), make_example([9, 8], [7]), make_example([3, 3, 3, 3, 3], [4, 1]))


def teach(
    model: Decoder, *examples: DistillationExample, hints: HintsConfig = HINTS, sampled: int = 10, chunk: int = 1 << 20
) -> tuple[Tensor, list[Tensor], float]:
    """The loss of a piece, its gradient, and the nats."""
    model.zero_grad()
    distilled = Distillation(config=hints, replay="off", floor=0.0, chunk_logits=chunk).teach(model, examples, sampled)
    distilled.loss.backward()
    return distilled.loss.detach(), [gradient_of(parameter) for parameter in model.parameters()], distilled.nats


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def log_softmaxes(model: Decoder, view: Trajectory, temperature: float = 1.0) -> Tensor:
    """[reply, V] of the distributions that the reply is drawn from."""
    hidden = model.forward_packed(torch.from_numpy(view.token_ids).long())
    return (model.logits(hidden[np.flatnonzero(view.loss_mask) - 1]) / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_loss_is_the_divergence_of_the_two_contexts(temperature: float) -> None:
    model, example = make_model(), make_example([1, 2, 3, 4], [5, 6, 7], temperature=temperature)
    loss, _, nats = teach(model, example)
    compared_at = temperature or 1.0  # a greedy turn is taught what it would say at 1
    with torch.no_grad():
        student, teacher = (log_softmaxes(model, view, compared_at) for view in (example.student, example.teacher))
        expected = float((student.exp() * (student - teacher)).sum())
    assert nats == pytest.approx(expected, rel=1e-5)
    assert expected > 0.01
    assert float(loss) == pytest.approx(2.0 * expected / 10, rel=1e-5)


def test_its_gradient_is_that_of_finite_differences_with_the_teacher_held() -> None:
    """In float64, for one number of every parameter; the teacher's weights are equal and constant."""
    model = make_model(TINY_DENSE).double()
    example = EXAMPLES[0]
    _, gradients, _ = teach(model, example)
    with torch.no_grad():
        teacher = log_softmaxes(model, example.teacher)

        def value() -> float:
            student = log_softmaxes(model, example.student)
            return float((student.exp() * (student - teacher)).sum()) * 2.0 / 10

        step = 1e-6
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            place = int(gradient.abs().argmax())
            number = parameter.view(-1)[place].item()
            parameter.view(-1)[place] = number + step
            above = value()
            parameter.view(-1)[place] = number - step
            below = value()
            parameter.view(-1)[place] = number
            assert float(gradient.view(-1)[place]) == pytest.approx((above - below) / (2 * step), abs=1e-7, rel=1e-4)
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in gradients)


@BOTH
def test_the_teacher_has_no_gradient(hints: HintsConfig) -> None:
    """Only the teacher reads the hint, so embedding rows of the hint alone get no gradient."""
    model = make_model(replace(TINY, tied=False))
    teach(model, EXAMPLES[0], hints=hints)
    assert model.embedding.grad is not None
    rows = model.embedding.grad.abs().sum(-1)
    assert rows[[30, 31]].tolist() == [0.0, 0.0]
    assert rows[[1, 2, 3, 4, 5, 6]].min() > 0


@BOTH
def test_without_a_hint_there_is_nothing_to_learn(hints: HintsConfig) -> None:
    view = make_view([1, 2, 3, 4], [5, 6, 7])
    _, gradients, nats = teach(make_model(), DistillationExample(student=view, teacher=view), hints=hints)
    assert nats == 0.0
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-7


@BOTH
def test_how_examples_are_packed_and_chunked_changes_nothing(hints: HintsConfig) -> None:
    model = make_model()
    jointly, summed, nats = teach(model, *EXAMPLES, hints=hints)
    alone = [teach(model, example, hints=hints, chunk=1) for example in EXAMPLES]
    assert float(jointly) == pytest.approx(sum(float(loss) for loss, _, _ in alone), rel=1e-4)
    assert nats == pytest.approx(sum(result for _, _, result in alone), rel=1e-4)
    for index, gradient in enumerate(summed):
        assert torch.allclose(gradient, sum((each[index] for _, each, _ in alone), torch.zeros(())), atol=1e-6)


@BOTH
def test_other_turns_of_a_context_are_not_distilled(hints: HintsConfig) -> None:
    """A reply in the context is context: with its tokens scored, too, the loss is another."""
    model, example = make_model(), EXAMPLES[0]
    whole = np.arange(len(example.student.token_ids)) > 0
    wide = replace(example.student, loss_mask=whole, versions=np.zeros_like(example.student.versions))
    hinted = replace(
        example.teacher,
        loss_mask=np.isin(np.arange(9), [1, 2, 5, 6, 7, 8]),
        versions=np.zeros_like(example.teacher.versions),
    )
    narrow, wider = (
        teach(model, example, hints=hints)[2],
        teach(model, DistillationExample(student=wide, teacher=hinted), hints=hints)[2],
    )
    assert narrow != pytest.approx(wider, rel=1e-3)


def test_a_chunk_without_examples_keeps_others_company() -> None:
    for hints in (HINTS, SAMPLED):
        loss, gradients, nats = teach(make_model(), hints=hints)
        assert float(loss) == nats == 0.0
        assert max(float(gradient.abs().max()) for gradient in gradients) == 0.0


@BOTH
def test_greedy_turns_say_something_in_full_only(hints: HintsConfig) -> None:
    _, gradients, _ = teach(make_model(), make_example([1, 2, 3], [4, 5], temperature=0.0), hints=hints)
    moved = max(float(gradient.abs().max()) for gradient in gradients) > 1e-6
    assert moved == (hints is HINTS)


def test_steps_on_examples_alone_bring_the_student_nearer() -> None:
    trainer = make_trainer()
    totals = Totals(tokens=0, trajectories=0, sampled=6)
    result = [trainer.step(step, [], totals, examples=[EXAMPLES]) for step in range(1, 21)]
    assert result[0]["hinted_tokens"] == 6
    assert result[-1]["hint_nats"] < 0.3 * result[0]["hint_nats"]
    assert result[0]["trained_tokens"] == 17
    assert not result[0].keys() & {"entropy", "masked_share"}


def test_a_step_without_examples_is_what_it_was_bit_for_bit() -> None:
    """With a weight, without one, and with examples of weight zero."""
    good = replace(make_view([1, 2, 3], [4, 5]), advantages=np.array([0, 0, 0, 1, 1], np.float32))
    totals = Totals(tokens=2, trajectories=1, sampled=2)
    trainers = [make_trainer(), make_trainer(HintsConfig())]
    result = [trainer.step(1, [(good,)], totals) for trainer in trainers]
    assert result[0] == result[1]
    weightless = make_trainer(HintsConfig())
    weightless.step(1, [(good,)], totals, examples=[EXAMPLES])
    for one, other, third in zip(*(t.model.parameters() for t in (*trainers, weightless)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_examples_add_to_what_rewards_say() -> None:
    good = replace(make_view([1, 2, 3], [4, 5]), advantages=np.array([0, 0, 0, 1, 1], np.float32))
    totals = Totals(tokens=2, trajectories=1, sampled=2)
    alone, distilled = make_trainer(), make_trainer()
    one, two = alone.step(1, [(good,)], totals), distilled.step(1, [(good,)], totals, examples=[EXAMPLES])
    assert two["grad_norm"] != one["grad_norm"]
    assert two["entropy"] == one["entropy"]
    assert (one["hinted_tokens"], two["hinted_tokens"]) == (0, 6)


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (DEFAULT, 60),
        (LossConfig(kind="rloo"), 3),
        (LossConfig(kind="dr_grpo", aggregation_options=SumNormOptions(sequence_tokens=5)), 15),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_examples_are_divided_as_the_loss_would_be_though_no_group_has_a_signal(loss: LossConfig, divisor: int) -> None:
    totals = Totals(tokens=0, trajectories=0, sampled=60, sampled_trajectories=3)
    by_one = Totals(tokens=0, trajectories=0, sampled=1)
    result, whole = (
        make_trainer(loss=kind).step(1, [], each, examples=[EXAMPLES])["grad_norm"]
        for kind, each in ((loss, totals), (DEFAULT, by_one))
    )
    assert result == pytest.approx(whole / divisor, rel=1e-4)


def test_a_batch_without_rewards_or_examples_teaches_nothing() -> None:
    assert make_trainer().step(1, [], Totals(tokens=0, trajectories=0)) == NOTHING_LEARNT


def make_routes(length: int, seed: int) -> Routes:
    random = np.random.default_rng(seed)
    layers, slots = TINY.routes_shape
    return np.argsort(random.random((length, layers, 4)), axis=-1)[..., :slots].astype(np.uint16)


def test_the_teacher_goes_its_own_way_behind_the_hint() -> None:
    """Full replay: the shared part before the hint has the same routes; after it, unknown routes are not replayed."""
    example = EXAMPLES[0]
    routes = make_routes(7, 0)
    unknown = np.full((9, *routes.shape[1:]), NO_ROUTE, np.uint16)
    unknown[:3] = routes[:3]
    routed = DistillationExample(
        student=replace(example.student, routes=routes), teacher=replace(example.teacher, routes=unknown)
    )
    model = make_model()
    nats = {}
    for mode in ("off", "completion", "full"):
        for name, chosen in (("plain", example), ("routed", routed)):
            distilled = Distillation(config=HINTS, replay=mode, floor=0.0).teach(model, [chosen], 10)
            nats[mode, name] = distilled.nats
    assert nats["off", "plain"] == nats["off", "routed"] == nats["full", "plain"]
    assert len({round(nats[mode, "routed"], 5) for mode in ("off", "completion", "full")}) == 3


def test_a_example_is_one_reply_in_two_contexts() -> None:
    with pytest.raises(ValueError, match="must read the same one"):
        DistillationExample(student=make_view([1], [2, 3]), teacher=make_view([1, 9], [2, 4]))
    with pytest.raises(ValueError, match="must read the same one"):
        DistillationExample(student=make_view([1, 2], []), teacher=make_view([1, 9, 2], []))


def test_divergences_of_a_distribution_from_itself_are_nothing() -> None:
    logits, ids = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 8, 1])
    assert divergences(logits, logits, torch.ones(4), ids).abs().max() == 0
    assert divergences(logits, logits.flip(-1), torch.ones(4), ids)[:, 0].min() > 0


def make_compared(gaps: list[float], examples: list[int]) -> TokenDivergences:
    found_N = torch.tensor(gaps)
    return TokenDivergences(found_N, found_N, found_N, torch.tensor(examples, dtype=torch.int64))


def test_a_token_counts_as_far_as_the_teacher_would_have_come_there() -> None:
    """The weight is exp of how much less likely the prefix is for the teacher, at most 1, anew for every example."""
    result = make_compared([-1.0, 2.0, -3.0, 0.5, -2.0, 1.0], [0, 0, 0, 1, 1, 1])
    expected = [0.0, -1.0, 0.0, 0.0, 0.0, -1.5]  # sums before each: 0, −1, 1 and 0, 0.5, −1.5
    assert prefix_weights(result).log().tolist() == pytest.approx(expected)
    assert prefix_weights(make_compared([], [])).tolist() == []


@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_shared_contexts_take_the_weight_off_what_the_teacher_would_not_have_said(estimator: str) -> None:
    """The first token counts fully, so an example of one token is unchanged; longer ones count less."""
    shared = HintsConfig.model_validate({"weight": 2.0, "estimator": estimator})
    alike = HintsConfig.model_validate({"weight": 2.0, "estimator": estimator, "contexts": "all"})
    model, (long, short, _) = make_model(), EXAMPLES
    assert float(teach(model, short, hints=shared)[0]) == float(teach(model, short, hints=alike)[0])
    whole, part = (teach(model, long, hints=hints) for hints in (alike, shared))
    assert float(part[0]) != float(whole[0])
    assert (part[2] < whole[2]) or estimator == "sampled"
    jointly = teach(model, long, short, hints=shared)
    assert float(jointly[0]) == pytest.approx(float(part[0] + teach(model, short, hints=shared)[0]), rel=1e-5)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hints.estimator would have no effect with hints.weight = 0"):
        HintsConfig(estimator="sampled")
    with pytest.raises(ValueError, match=r"hints.contexts would have no effect with hints.weight = 0"):
        HintsConfig(contexts="all")
    with pytest.raises(ValueError, match=r"hints.cap would have no effect with hints.estimator = 'full'"):
        HintsConfig(weight=1.0, cap=3.0)
    with pytest.raises(ValueError, match="neither rules nor a judge"):
        HintsConfig(weight=1.0, tools=False)
    rule = HintRule(name="a", where="said", pattern="x", text="y")
    with pytest.raises(ValueError, match="two rules have one name"):
        HintsConfig(weight=1.0, rules=(rule, rule))
    with pytest.raises(ValueError, match="not a regular expression"):
        HintRule(name="a", where="said", pattern="(", text="y")
