"""Routers, routes and the plausibility floor."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.models.decoder import Decoder
from etude.models.experts import ExpertRouter, Experts, Routing
from etude.models.fast import FastArithmetic
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ExpertsSpec, ModelSpec
from etude.types import NO_ROUTE

SPARSE = [TINY, TINY_LATENT]
ARITHMETIC = FastArithmetic()
SCORINGS: Sequence[Literal["softmax", "sigmoid"]] = ("softmax", "sigmoid")


def make_model(spec: ModelSpec, seed: int = 0) -> Decoder:
    model = Decoder(spec)
    model.initialise(seed, std=0.2)
    for module in model.modules():
        if isinstance(module, ExpertRouter) and module.correction is not None:
            module.correction.values.copy_(torch.linspace(-0.2, 0.2, spec.experts.count if spec.experts else 0))
    return model


def make_ids(spec: ModelSpec, seed: int = 0) -> Tensor:
    return torch.randint(0, spec.vocab_size, (24,), generator=torch.Generator().manual_seed(seed))


def own_routes(model: Decoder, ids: Tensor) -> Tensor:
    routing = Routing(record=True)
    with torch.no_grad():
        model.forward_packed(ids, routing=routing)
    return routing.recorded()


@pytest.mark.parametrize("spec", SPARSE)
@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_replaying_the_models_own_routes_changes_nothing(spec: ModelSpec, floor: float) -> None:
    model, ids = make_model(spec), make_ids(spec)
    routes = own_routes(model, ids)
    replayed = Routing(replay=routes, floor=floor, record=True)
    with torch.no_grad():
        assert torch.equal(model.forward_packed(ids, routing=replayed), model.forward_packed(ids))
    assert torch.equal(replayed.recorded(), routes)
    assert (replayed.pairs, replayed.flips, replayed.replaced) == (routes.numel(), 0, 0)


@pytest.mark.parametrize("spec", SPARSE)
def test_a_token_without_a_route_is_routed_live(spec: ModelSpec) -> None:
    model, ids = make_model(spec), make_ids(spec)
    routes = own_routes(model, ids)
    unknown = torch.full_like(routes, NO_ROUTE)
    unknown[3] = routes[3]
    unknown[4, 0, :-1] = routes[4, 0, :-1]  # a row with a hole is no route
    routing = Routing(replay=unknown, floor=0.5, record=True)
    with torch.no_grad():
        model.forward_packed(ids, routing=routing)
    assert torch.equal(routing.recorded(), routes)
    assert routing.pairs == routes[3].numel()


@pytest.mark.parametrize("spec", SPARSE)
def test_replayed_experts_are_used_and_flips_counted(spec: ModelSpec) -> None:
    assert spec.experts is not None
    model, ids = make_model(spec), make_ids(spec)
    other = own_routes(make_model(spec, seed=1), ids)
    live, routing = Routing(record=True), Routing(replay=other, record=True)
    with torch.no_grad():
        first = model.forward_packed(ids, routing=live)
        assert not torch.allclose(model.forward_packed(ids, routing=routing), first)
    assert torch.equal(routing.recorded(), other)
    # In the first sparse layer both passes see the same tokens, so that the flips there can be counted by hand.
    once = Routing(replay=torch.where(layer_mask(other) == 0, other, NO_ROUTE))
    with torch.no_grad():
        model.forward_packed(ids, routing=once)
    pairs = zip(other[:, 0].tolist(), live.recorded()[:, 0].tolist(), strict=True)
    assert once.flips == sum(len(set(replayed) - set(chosen)) for replayed, chosen in pairs)
    assert 0 < once.flips <= once.pairs == other[:, 0].numel()


def layer_mask(routes: Tensor) -> Tensor:
    return torch.arange(routes.shape[1]).view(1, -1, 1).expand(routes.shape)


@pytest.mark.parametrize("spec", SPARSE)
def test_gradients_reach_the_router_through_replayed_gates(spec: ModelSpec) -> None:
    model, ids = make_model(spec), make_ids(spec)
    routes = own_routes(make_model(spec, seed=1), ids)
    model.forward_packed(ids, routing=Routing(replay=routes, floor=0.5)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name != "head":
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertsSpec, list[list[float]], list[list[int]], float]:
    groups = draw(st.sampled_from([1, 2]))
    count = draw(st.sampled_from([4, 6, 8]))
    k = draw(st.integers(1, count // groups))
    scoring = draw(st.sampled_from(SCORINGS))
    spec = ExpertsSpec(count=count, per_token=k, size=4, scoring=scoring, groups=groups, top_groups=1)
    rows = st.lists(st.floats(-4, 4, width=32), min_size=count, max_size=count)
    logits = draw(st.lists(rows, min_size=1, max_size=3))
    replayed = [draw(st.permutations(range(count)))[:k] for _ in logits]
    return spec, logits, replayed, draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))


@given(cases())
def test_the_floor_replaces_as_its_definition_says(
    case: tuple[ExpertsSpec, list[list[float]], list[list[int]], float],
) -> None:
    spec, logits, replayed, floor = case
    router = ExpertRouter(spec, spec.count, 0)
    torch.nn.init.eye_(router.weight)
    model_spec = replace(TINY, layers=1, experts=spec, sparse_layers=(0,), hidden_size=spec.count)
    routing = Routing(replay=torch.tensor(replayed).unsqueeze(1), floor=floor, record=True)
    routing.begin(len(logits), model_spec, torch.device("cpu"))
    x = torch.tensor(logits)
    live, _ = router(x, ARITHMETIC, None)
    used, gates = router(x, ARITHMETIC, routing)

    values = x.softmax(-1) if spec.scoring == "softmax" else x.sigmoid()
    replaced = 0
    for row, chosen, needed, out in zip(values.tolist(), live.tolist(), replayed, used.tolist(), strict=True):
        lowest = floor * row[chosen[-1]]
        if any(abs(row[e] - lowest) < 1e-5 for e in needed):
            return  # too close to call in another arithmetic
        implausible = [e not in chosen and row[e] < lowest for e in needed]
        substitutes = iter([e for e in chosen if e not in needed])
        expected = [next(substitutes) if bad else e for e, bad in zip(needed, implausible, strict=True)]
        assert out == expected
        assert len(set(out)) == len(out)
        replaced += sum(implausible)
    assert routing.replaced == replaced
    assert torch.allclose(gates.sum(-1), torch.ones(len(logits)), atol=1e-5)


def test_the_floor_looks_at_the_score_however_large_corrections_are() -> None:
    spec = ExpertsSpec(count=4, per_token=1, size=4, scoring="sigmoid")
    router = ExpertRouter(spec, 4, 0)
    torch.nn.init.eye_(router.weight)
    assert router.correction is not None
    x = torch.tensor([[2.0, 1.0, -3.0, -3.0]])  # scores 0.88, 0.73, 0.05, 0.05

    def used(replayed: int, correction: list[float]) -> int:
        assert router.correction is not None
        router.correction.values.copy_(torch.tensor(correction))
        routing = Routing(replay=torch.tensor([[[replayed]]]), floor=0.5, record=True)
        routing.begin(1, replace(TINY, layers=1, experts=spec, sparse_layers=(0,)), x.device)
        router(x, ARITHMETIC, routing)
        return int(routing.recorded())

    for offset in (0.0, 10.0, -10.0):  # the same to all changes no choice
        assert used(1, [offset] * 4) == 1
        assert used(2, [offset] * 4) == 0
    assert used(2, [0.0, 0.0, 0.6, 0.0]) == 2  # a correction that makes the expert a candidate makes it plausible


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_experts_come_from_the_best_groups(groups: int) -> None:
    spec = ExpertsSpec(count=8, per_token=2, size=4, scoring="sigmoid", groups=groups, top_groups=1)
    router = ExpertRouter(spec, 8, 0)
    torch.nn.init.eye_(router.weight)
    x = torch.tensor([[9.0, -9.0, -9.0, -9.0, 2.0, 2.5, 3.0, 3.5]])
    experts, _ = router(x, ARITHMETIC, None)
    size = 8 // groups
    sums = [(sum(sorted(x.sigmoid()[0, i : i + size].tolist())[-2:]), i) for i in range(0, 8, size)]
    start = max(sums)[1]
    best = sorted(range(start, start + size), key=lambda e: -float(x[0, e]))[:2]
    assert experts.tolist() == [best]


@pytest.mark.parametrize(("scoring", "normalise"), list(itertools.product(SCORINGS, [True, False])))
def test_gates_are_the_chosen_scores(scoring: Literal["softmax", "sigmoid"], normalise: bool) -> None:
    spec = replace(TINY_LATENT.experts or ExpertsSpec(count=8, per_token=3, size=4), groups=1, top_groups=1)
    spec = replace(spec, scoring=scoring, normalise=normalise)
    router = ExpertRouter(spec, 8, 0)
    torch.nn.init.eye_(router.weight)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    experts, gates = router(x, ARITHMETIC, None)
    expected = (x.softmax(-1) if scoring == "softmax" else x.sigmoid()).gather(1, experts)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(gates, 2.5 * expected, atol=1e-6)
    assert gates.dtype is torch.float32


class Halving:
    """A format that can hold multiples of 1/2 only."""

    def activation(self, x_RI: Tensor) -> Tensor:
        return (x_RI * 2).round() / 2

    def weight(self, w_EOI: Tensor, *, parts: int) -> Tensor:
        assert w_EOI.shape[1] == parts * 16
        return (w_EOI * 2).round() / 2


def test_a_format_is_applied_to_both_products_and_nothing_else() -> None:
    spec = replace(TINY_LATENT.experts or ExpertsSpec(count=8, per_token=3, size=4), shared_size=0)
    plain, rounded = Experts(spec, 16, 0), Experts(spec, 16, 0)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    rounded.load_state_dict(plain.state_dict())
    rounded.routed.format = Halving()
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        actual = rounded(x, ARITHMETIC, None)
        experts, gates = plain.router(x, ARITHMETIC, None)
        halves, routed = Halving().activation(x), plain.routed
        gate_up, down = (routed.gate_up * 2).round() / 2, (routed.down * 2).round() / 2
        expected = torch.zeros_like(x)
        for token, slot in itertools.product(range(6), range(spec.per_token)):
            expert = int(experts[token, slot])
            gate, up = (gate_up[expert] @ halves[token]).chunk(2)
            inner = Halving().activation(torch.nn.functional.silu(gate) * up)
            expected[token] += gates[token, slot] * (down[expert] @ inner)
        assert not torch.allclose(plain(x, ARITHMETIC, None), expected)
        rounded.routed.published = True
        rounded.routed.gate_up.copy_(gate_up)
        rounded.routed.down.copy_(down)
        assert torch.equal(rounded(x, ARITHMETIC, None), actual)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (torch.zeros(23, 2, 2, dtype=torch.int64), r"\[23, 2, 2\], this pass needs torch.int64 \[24, 2, 2\]"),
        (torch.zeros(24, 2, 3, dtype=torch.int64), r"\[24, 2, 3\]"),
        (torch.zeros(24, 2, 2, dtype=torch.int32), r"torch.int32"),
    ],
)
def test_routes_of_another_shape_are_refused(replay: Tensor, message: str) -> None:
    model, ids = make_model(TINY), make_ids(TINY)
    with pytest.raises(ValueError, match=message):
        model.forward_packed(ids, routing=Routing(replay=replay))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floor=1\.5"):
        Routing(floor=1.5)
    with pytest.raises(ValueError, match="record=True"):
        Routing().recorded()


def test_a_dense_model_records_no_routes() -> None:
    model, ids = make_model(TINY_DENSE), make_ids(TINY_DENSE)
    assert own_routes(model, ids).shape == (24, 0, 0)
