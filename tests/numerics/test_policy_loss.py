"""Every loss with every correction against its formula in plain Python, and its gradient against finite differences.

The formulas are written from the papers, token by token, and share nothing with the code but the names of the bounds.
Where a choice is a system's rather than a paper's, the formula is its source's, read and written down here once more:

- dual clip, aggregations, k1, k2, k3 and entropy in the loss: verl 0.9.1, ``verl/trainer/ppo/core_algos.py``
  (``compute_policy_loss_vanilla``, ``agg_loss``, ``kl_penalty_forward``) and ``verl/workers/utils/losses.py``
  (``ppo_loss``);
- the ratio to a recomputed π_old with a weight for the engine: the same function's ``rollout_is_weights``, and TRL
  1.13's ``importance_sampling_ratio`` (``trl/trainer/grpo_trainer.py``, ``_compute_loss``);
- DPPO's mask and its k2 term: prime-rl 559b4477, ``src/prime_rl/trainer/rl/loss.py`` (``default_loss_fn``).

What a paper holds constant (sg) is computed from ``frozen`` logits, which finite differences leave alone.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.config.training import (
    AGGREGATIONS,
    BASELINES,
    LOSS_OPTIONS,
    UNCLIPPED,
    LossConfig,
    MaskKind,
    corrections,
)
from etude.trainer.losses import LossTokens, PolicyLoss, Totals, distillation_normaliser, policy_loss

Rows = list[list[float]]
TOTALS = Totals(tokens=20, trajectories=6, lost_tokens=3.0, lost_trajectories=1.0)
"""More than the case has: it is one micro-batch of several."""
TOKENS, TRAJECTORIES = 23, 7
"""What it is divided by, those that were lost included."""
DUAL_CLIPPED = ("grpo", "dr_grpo", "ppo_clip", "gspo")
CLIP, NARROW = {"clip_low": 0.2, "clip_high": 0.3}, {"clip_low": 0.02, "clip_high": 0.03}
CAP, MASK = {"cap": 1.5}, {"floor": 0.7, "cap": 1.4}
BOUNDS: dict[str, dict[str, float]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "ppo_clip", "cispo"), CLIP),
    **dict.fromkeys(("dppo", "gspo"), NARROW),
    "seq_mean_token_sum_norm": {"sequence_tokens": 9},
    **dict.fromkeys(("tis", "sequence_tis", "mis", "sequence_mis", "decoupled"), CAP),
    "icepop": {"floor": 0.6, "cap": 1.5},
    **dict.fromkeys(("ratio", "geometric"), MASK),
    "off_policy": {"divergence": 0.2},
}
Case: TypeAlias = dict[str, Any]
DUAL: Case = {"kind": "ppo_clip", "dual_clip": 1.35}
MASKS: tuple[MaskKind, ...] = ("none", "ratio", "geometric", "off_policy")
GRID: list[Case] = [
    {"kind": kind, "correction": correction, "sequence_mask": mask, "old_policy": old}
    for kind in BASELINES
    for old in (("engine",) if kind in UNCLIPPED else ("engine", "recomputed"))
    for correction in corrections(kind, old)  # type: ignore[arg-type]  # a literal of the line above
    for mask in (MASKS if old == "engine" else ("none", "off_policy"))  # the others see ρ alone, whatever it is of
]
"""What is done about tokens that another policy sampled."""
OPTIONS: list[Case] = [
    *({"kind": kind, "aggregation": average} for kind in BASELINES for average in dict.fromkeys(AGGREGATIONS.values())),
    *({"kind": kind, "dual_clip": 1.35} for kind in DUAL_CLIPPED),
    *(
        {"kind": kind, "kl_coef": 0.3, "kl_estimator": estimator, "kl_to": to}
        for kind in ("policy_gradient", "grpo", "dppo")
        for estimator in ("k1", "k2", "k3")
        for to in ("reference", "engine")
    ),
    *({"kind": kind, "entropy_coef": 0.3} for kind in ("policy_gradient", "grpo", "dr_grpo")),
    {"kind": "ppo_clip", "old_policy": "recomputed", "dual_clip": 1.35, "kl_coef": 0.1, "entropy_coef": 0.1},
]
CASES = GRID + OPTIONS


def name(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def make_config(case: Case) -> LossConfig:
    """A config whose bounds clip some, but not all, of the case's tokens."""
    case = {"aggregation": AGGREGATIONS[case["kind"]]} | case
    tables = {"kind": "options"} | {name: f"{name}_options" for name in ("aggregation", "correction")}
    tables["sequence_mask"] = "mask_options"
    options: dict[str, dict[str, Any]] = {
        table: dict(BOUNDS.get(case.get(key, ""), {})) for key, table in tables.items()
    }
    own = {key for key in ("old_policy", "dual_clip") if key in case and LOSS_OPTIONS.classes.get(case["kind"])}
    options["options"] |= {key: case[key] for key in own}
    return LossConfig.model_validate({key: case[key] for key in case.keys() - {"old_policy", "dual_clip"}} | options)


@dataclass(frozen=True)
class Sample:
    """One sampled token."""

    trajectory: int
    token: int
    engine: float
    """log μ"""
    proximal: float
    """log π_prox, or log π_old"""
    reference: float
    """log π_ref"""
    advantage: float


def make_case(seed: int = 0) -> tuple[Rows, list[Sample]]:
    """Four trajectories: good and bad ones, near the engine's policy and far from it."""
    generator = torch.Generator().manual_seed(seed)
    lengths, advantages, offsets = (3, 1, 4, 5), (0.7, -0.5, -0.9, 0.4), (0.0, -0.6, 0.4, 0.05)
    logits = torch.randn(sum(lengths), 4, generator=generator, dtype=torch.float64).tolist()
    spread = torch.randn(sum(lengths), generator=generator, dtype=torch.float64).mul(0.3).tolist()
    samples: list[Sample] = []
    for trajectory, length in enumerate(lengths):
        for _ in range(length):
            row, token = logits[len(samples)], len(samples) % 4
            gap = offsets[trajectory] + spread[len(samples)]
            engine = logprob(row, token) + gap
            reference = logprob(row, (token + 1) % 4)
            samples.append(Sample(trajectory, token, engine, engine - 0.6 * gap, reference, advantages[trajectory]))
    return logits, samples


def logprob(row: list[float], token: int) -> float:
    return row[token] - math.log(sum(math.exp(x) for x in row))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference(logits: Rows, frozen: Rows, samples: list[Sample], config: LossConfig) -> float:
    """The loss, summed up trajectory by trajectory."""
    total = 0.0
    for index in range(max(sample.trajectory for sample in samples) + 1):
        places = [place for place, sample in enumerate(samples) if sample.trajectory == index]
        live = [logprob(logits[place], samples[place].token) for place in places]
        frozen_logps = [logprob(frozen[place], samples[place].token) for place in places]
        terms = reference_terms(live, frozen_logps, [samples[place] for place in places], config)
        for place, (term, x) in enumerate(zip(terms, live, strict=True)):
            sample = samples[places[place]]
            gap = x - (sample.reference if config.kl_to == "reference" else sample.engine)
            divergence = {"k1": gap, "k2": gap**2 / 2, "k3": math.exp(-gap) - 1 + gap}[config.kl_estimator]
            total -= (term - config.kl_coef * divergence + config.entropy_coef * entropy(logits[places[place]])) / {
                "token_mean": TOKENS,
                "seq_mean_token_mean": TRAJECTORIES * len(places),
                "seq_mean_token_sum": TRAJECTORIES,
                "seq_mean_token_sum_norm": TRAJECTORIES * config.sequence_tokens,
            }[config.aggregation]
    return total


def entropy(row: list[float]) -> float:
    return -sum(math.exp(logprob(row, token)) * logprob(row, token) for token in range(len(row)))


def is_anchored(config: LossConfig) -> bool:
    """Return true if the ratio is to ``Sample.proximal``."""
    return config.correction == "decoupled" or config.old_policy == "recomputed"


def reference_terms(
    live: list[float], frozen_logps: list[float], samples: list[Sample], config: LossConfig
) -> list[float]:
    """Each token's term of the objective, from log π with a gradient (``live``) and without."""
    weights = reference_weights(frozen_logps, samples, config)
    bounds = config.options.model_dump()
    low, high = 1 - bounds.get("clip_low", 0), 1 + bounds.get("clip_high", 0)
    anchors = [sample.proximal if is_anchored(config) else sample.engine for sample in samples]
    advantage = samples[0].advantage
    ratios = [math.exp(x - anchor) for x, anchor in zip(live, anchors, strict=True)]
    if config.kind == "gspo":
        mean = sum(x - anchor for x, anchor in zip(live, anchors, strict=True)) / len(samples)
        ratios = [math.exp(mean)] * len(samples)
    match config.kind:
        case "policy_gradient" | "rloo":
            values = [advantage * x for x in live]
        case "grpo" | "dr_grpo" | "ppo_clip" | "gspo":
            values = [min(ratio * advantage, clip(ratio, low, high) * advantage) for ratio in ratios]
            if bounds["dual_clip"] and advantage < 0:
                values = [max(value, bounds["dual_clip"] * advantage) for value in values]
        case "cispo":
            constants = [clip(math.exp(x - anchor), low, high) for x, anchor in zip(frozen_logps, anchors, strict=True)]
            values = [constant * advantage * x for constant, x in zip(constants, live, strict=True)]
        case "dppo":
            moves = [math.exp(x) - math.exp(anchor) for x, anchor in zip(frozen_logps, anchors, strict=True)]
            keeps = [move <= bounds["clip_high"] if advantage > 0 else move >= -bounds["clip_low"] for move in moves]
            values = [keep * ratio * advantage for keep, ratio in zip(keeps, ratios, strict=True)]
    return [weight * value for weight, value in zip(weights, values, strict=True)]


def reference_weights(frozen_logps: list[float], samples: list[Sample], config: LossConfig) -> list[float]:
    proximal = [sample.proximal for sample in samples] if is_anchored(config) else frozen_logps
    gaps = [x - sample.engine for x, sample in zip(proximal, samples, strict=True)]
    ratios, whole = [math.exp(gap) for gap in gaps], math.exp(sum(gaps))
    bounds, mask = config.correction_options.model_dump(), config.mask_options.model_dump()
    match config.correction:
        case "none":
            weights = [1.0 for _ in ratios]
        case "tis":
            weights = [min(ratio, bounds["cap"]) for ratio in ratios]
        case "sequence_tis":
            weights = [min(whole, bounds["cap"]) for _ in ratios]
        case "mis" | "decoupled":
            weights = [ratio if ratio <= bounds["cap"] else 0.0 for ratio in ratios]
        case "icepop":
            weights = [ratio if bounds["floor"] <= ratio <= bounds["cap"] else 0.0 for ratio in ratios]
        case "sequence_mis":
            weights = [whole if whole <= bounds["cap"] else 0.0 for _ in ratios]
    mean = sum(gaps) / len(gaps)
    match config.sequence_mask:
        case "none":
            keep = True
        case "ratio":
            keep = mask["floor"] <= whole <= mask["cap"]
        case "geometric":
            keep = mask["floor"] <= math.exp(mean) <= mask["cap"]
        case "off_policy":
            left = sum(sample.engine - x for x, sample in zip(frozen_logps, samples, strict=True)) / len(gaps)
            keep = not (samples[0].advantage < 0 and left > mask["divergence"])
    return weights if keep else [0.0 for _ in weights]


def tokens_of(logits: Tensor, samples: list[Sample], config: LossConfig) -> LossTokens:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float64)

    ids = torch.tensor([sample.token for sample in samples])
    return LossTokens(
        logprobs_N=logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1),
        engine_logprobs_N=column("engine"),
        advantages_N=column("advantage"),
        trajectories_N=torch.tensor([sample.trajectory for sample in samples]),
        proximal_logprobs_N=column("proximal") if is_anchored(config) else None,
        reference_logprobs_N=column("reference"),
        entropies_N=torch.special.entr(logits.softmax(-1)).sum(-1),
    )


@pytest.mark.parametrize("case", CASES, ids=name)
def test_it_is_the_formula(case: Case) -> None:
    config = make_config(case)
    logits, samples = make_case()
    result = policy_loss(tokens_of(torch.tensor(logits, dtype=torch.float64), samples, config), config, TOTALS)
    assert math.isclose(float(result.loss), reference(logits, logits, samples, config), rel_tol=1e-12)
    assert result.loss != 0


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_gradient_is_that_of_the_formula(case: Case) -> None:
    config = make_config(case)
    logits, samples = make_case()
    live = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    policy_loss(tokens_of(live, samples, config), config, TOTALS).loss.backward()
    assert live.grad is not None
    assert float(live.grad.abs().max()) > 0
    step = 1e-6
    for row in range(len(logits)):
        for column in range(4):
            above, below = [[*row_] for row_ in logits], [[*row_] for row_ in logits]
            above[row][column] += step
            below[row][column] -= step
            slope = (reference(above, logits, samples, config) - reference(below, logits, samples, config)) / (2 * step)
            assert math.isclose(float(live.grad[row, column]), slope, rel_tol=1e-6, abs_tol=1e-9)


def test_the_bounds_of_these_tests_cut_something_and_not_everything() -> None:
    logits, samples = make_case()
    for case in GRID:
        config = make_config(case)
        result = policy_loss(tokens_of(torch.tensor(logits, dtype=torch.float64), samples, config), config, TOTALS)
        if (config.correction, config.sequence_mask) != ("none", "none") or config.kind not in UNCLIPPED:
            assert 0 < result.truncated + result.masked < len(samples), case
    for case in OPTIONS:
        if "dual_clip" in case:
            with_it, without = (
                policy_loss(tokens_of(torch.tensor(logits, dtype=torch.float64), samples, config), config, TOTALS)
                for config in (make_config(case), make_config(case | {"dual_clip": 0.0}))
            )
            assert with_it.masked > without.masked, case


def test_the_default_has_the_bits_of_its_equation() -> None:
    """−(1/T) Σ min(π/μ, 2) · A · log π in float32, in the order in which it has always been computed."""
    generator = torch.Generator().manual_seed(1)
    engine, advantages = -torch.rand(500, generator=generator), torch.randn(500, generator=generator)
    start = engine + 0.5 * torch.randn(500, generator=generator)
    ours, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
    tokens = LossTokens(
        logprobs_N=ours,
        engine_logprobs_N=engine,
        advantages_N=advantages,
        trajectories_N=torch.arange(500) // 7,
    )
    result = policy_loss(tokens, LossConfig(), Totals(tokens=777, trajectories=80))
    ratios = (plain - engine).exp().detach()
    expected = -(ratios.clamp(max=2.0) * advantages * plain).sum() / 777
    result.loss.backward()
    expected.backward()
    assert ours.grad is not None
    assert plain.grad is not None
    assert torch.equal(result.loss, expected)
    assert torch.equal(ours.grad, plain.grad)
    assert (result.truncated, result.masked) == (int((ratios > 2).sum()), 0)
    assert result.truncated > 10


@pytest.mark.parametrize("kind", BASELINES)
def test_distillation_examples_are_divided_by_what_a_token_with_an_advantage_is_divided_by(kind: str) -> None:
    """The batch's groups all have a signal, its trajectories have one length, and the engine's policy sampled them."""
    config = make_config({"kind": kind})
    logprobs_N = torch.full((12,), -0.5, dtype=torch.float64, requires_grad=True)
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        engine_logprobs_N=logprobs_N.detach(),
        advantages_N=torch.ones(12, dtype=torch.float64),
        trajectories_N=torch.arange(12) // 4,
    )
    totals = Totals(tokens=12, trajectories=3, sampled=12, sampled_trajectories=3)
    policy_loss(tokens, config, totals).loss.backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([-1 / distillation_normaliser(config, totals)] * 12)


def parts(samples: list[Sample], cuts: list[int]) -> list[list[int]]:
    """Places of tokens by micro-batch: trajectory i is in micro-batch ``cuts[i]``."""
    return [
        [place for place, sample in enumerate(samples) if cuts[sample.trajectory] == number] for number in set(cuts)
    ]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CASES), st.integers(0, 99), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_microbatches_add_up_to_the_batch(case: Case, seed: int, cuts: list[int]) -> None:
    config = make_config(case)
    rows, samples = make_case(seed)
    logits = torch.tensor(rows, dtype=torch.float64)
    whole = policy_loss(tokens_of(logits, samples, config), config, TOTALS)
    chunks: list[PolicyLoss] = []
    for places in parts(samples, cuts):
        order = sorted({samples[place].trajectory for place in places})
        renumbered = [replace(samples[place], trajectory=order.index(samples[place].trajectory)) for place in places]
        chunks.append(policy_loss(tokens_of(logits[places], renumbered, config), config, TOTALS))
    assert math.isclose(float(whole.loss), sum(float(chunk.loss) for chunk in chunks), rel_tol=1e-12, abs_tol=1e-12)
    assert whole.truncated == sum(chunk.truncated for chunk in chunks)
    assert whole.masked == sum(chunk.masked for chunk in chunks)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(GRID), st.integers(0, 99))
def test_on_policy_every_correction_and_clip_is_the_identity(case: Case, seed: int) -> None:
    """Engine = trainer: nothing is cut, and the gradient is the score function's, averaged as the kind does."""
    config = make_config(case)
    rows, samples = make_case(seed)
    same = [
        replace(sample, engine=logprob(row, sample.token), proximal=logprob(row, sample.token))
        for row, sample in zip(rows, samples, strict=True)
    ]
    logits = torch.tensor(rows, dtype=torch.float64)
    tokens = tokens_of(logits, same, config)
    leaf = tokens.logprobs_N.clone().requires_grad_()
    result = policy_loss(replace(tokens, logprobs_N=leaf, engine_logprobs_N=leaf.detach()), config, TOTALS)
    result.loss.backward()
    assert (result.truncated, result.masked) == (0, 0)
    lengths = torch.bincount(tokens.trajectories_N)[tokens.trajectories_N]
    divisors: dict[str, int | Tensor] = {
        "token_mean": TOKENS,
        "seq_mean_token_sum": TRAJECTORIES,
        "seq_mean_token_mean": lengths * TRAJECTORIES,
        "seq_mean_token_sum_norm": config.sequence_tokens * TRAJECTORIES,
    }
    expected = -tokens.advantages_N / divisors[config.aggregation]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-9, atol=1e-12)


def test_a_microbatch_without_tokens_adds_nothing() -> None:
    leaf, none = torch.zeros(0, requires_grad=True), torch.zeros(0)
    tokens = LossTokens(logprobs_N=leaf, engine_logprobs_N=none, advantages_N=none, trajectories_N=none.long())
    for case in CASES:
        result = policy_loss(tokens, make_config(case), TOTALS)
        result.loss.backward()
        assert (float(result.loss.detach()), result.truncated, result.masked) == (0.0, 0, 0)


def one_token(policy: float, engine: float, advantage: float) -> LossTokens:
    """One token with these log-probabilities."""
    return LossTokens(
        logprobs_N=torch.tensor([policy], dtype=torch.float64, requires_grad=True),
        engine_logprobs_N=torch.tensor([engine], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        trajectories_N=torch.tensor([0]),
    )


@pytest.mark.parametrize(
    ("case", "policy", "engine", "advantage", "masked"),
    [
        ({"kind": "ppo_clip"}, -0.1, -3.0, 1.0, 1),
        ({"kind": "ppo_clip"}, -0.1, -3.0, 0.0, 0),
        ({"kind": "ppo_clip"}, -3.0, -0.1, -1.0, 1),
        ({"kind": "ppo_clip"}, -3.0, -0.1, 0.0, 0),
        (DUAL, -0.1, -3.0, -1.0, 1),
        (DUAL, -0.1, -3.0, 0.0, 0),
        ({"kind": "dppo"}, -0.1, -3.0, 1.0, 1),
        ({"kind": "dppo"}, -0.1, -3.0, 0.0, 0),
    ],
)
def test_a_token_without_an_advantage_has_nothing_to_clip(
    case: Case, policy: float, engine: float, advantage: float, masked: int
) -> None:
    config = make_config(case | {"correction": "none"})
    tokens = one_token(policy, engine, advantage)
    assert policy_loss(tokens, config, Totals(tokens=1, trajectories=1)).masked == masked


@pytest.mark.parametrize(
    ("case", "ratio", "advantage", "bounded"),
    [
        ({"kind": "ppo_clip"}, 2.0, 3.0, 1.3),
        ({"kind": "ppo_clip"}, 2.0, -3.0, 2.0),
        ({"kind": "ppo_clip"}, 0.5, 3.0, 0.5),
        ({"kind": "ppo_clip"}, 0.5, -3.0, 0.8),
        (DUAL, 2.0, 3.0, 1.3),
        (DUAL, 2.0, -3.0, 1.35),
        (DUAL, 0.5, -3.0, 0.8),
        ({"kind": "gspo"}, 2.0, 3.0, 1.03),
        ({"kind": "gspo"}, 0.5, -3.0, 0.98),
    ],
)
def test_a_clip_bounds_a_ratio_in_the_direction_of_its_advantage(
    case: Case, ratio: float, advantage: float, bounded: float
) -> None:
    tokens = one_token(math.log(ratio) - 1, -1.0, advantage)
    result = policy_loss(tokens, make_config(case | {"correction": "none"}), Totals(tokens=1, trajectories=1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-bounded * advantage)
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.item() == pytest.approx(-ratio * advantage if bounded == ratio else 0.0)


@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 1.3), (1.1, 1.1), (0.5, 0.8)])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio: float, weight: float, advantage: float) -> None:
    tokens = one_token(math.log(ratio) - 1, -1.0, advantage)
    config = make_config({"kind": "cispo", "correction": "none"})
    result = policy_loss(tokens, config, Totals(tokens=1, trajectories=1))
    result.loss.backward()
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.item() == pytest.approx(-weight * advantage)
    assert (result.truncated, result.masked) == (int(weight != ratio), 0)


EXP = float(torch.tensor(0.25, dtype=torch.float64).exp())
"""A ratio whose logarithm is exact."""


@pytest.mark.parametrize(
    ("kind", "bounds", "policy", "advantage"),
    [
        ("ppo_clip", {"clip_high": EXP - 1}, 0.25, 1.0),
        ("ppo_clip", {"clip_low": 0.0}, 0.0, -1.0),
        ("ppo_clip", {"dual_clip": EXP}, 0.25, -1.0),
        ("gspo", {"clip_high": EXP - 1}, 0.25, 1.0),
        ("cispo", {"clip_high": EXP - 1}, 0.25, 1.0),
        ("cispo", {"clip_low": 0.0}, 0.0, 1.0),
        ("dppo", {"clip_high": EXP - 1}, 0.25, 1.0),
        ("dppo", {"clip_low": 0.0}, 0.0, -1.0),
    ],
)
def test_a_ratio_at_a_bound_is_within_it(kind: str, bounds: Case, policy: float, advantage: float) -> None:
    config = LossConfig.model_validate({"kind": kind, "correction": "none", "options": bounds})
    tokens = one_token(policy, 0.0, advantage)
    result = policy_loss(tokens, config, Totals(tokens=1, trajectories=1))
    result.loss.backward()
    assert (result.truncated, result.masked) == (0, 0)
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.item() == pytest.approx(-advantage * math.exp(policy))


def test_an_absurd_ratio_is_cut_and_not_made_into_nan() -> None:
    """If exp of the log-ratio overflows, the weight bounds or masks the token, and the others still learn."""
    for correction in ("tis", "mis", "icepop", "sequence_mis"):
        config = LossConfig(kind="policy_gradient", correction=correction)
        leaf = torch.tensor([-0.1, -0.1], requires_grad=True)
        tokens = LossTokens(
            logprobs_N=leaf,
            engine_logprobs_N=torch.tensor([-200.0, -0.1]),
            advantages_N=torch.ones(2),
            trajectories_N=torch.tensor([0, 1]),
        )
        result = policy_loss(tokens, config, Totals(tokens=2, trajectories=2))
        result.loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [-1.0 if correction == "tis" else 0.0, -0.5]
        assert result.truncated + result.masked == 1
