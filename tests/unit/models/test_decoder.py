"""The decoder: attention masks, gradients, and the precision of its arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.models.arithmetic import Arithmetic, AttentionRule
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.models.shared_rows import shared_rows
from etude.models.spec import TINIEST, TINY, TINY_DENSE, TINY_GEMMA, TINY_LATENT, ModelSpec, WindowSpec

SPECS = TINIEST


def make_model(spec: ModelSpec, arithmetic: Arithmetic | None = None) -> Decoder:
    model = Decoder(spec, arithmetic)
    model.initialise(0, std=0.1)
    return model


def make_ids(tokens: int) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (tokens,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arithmetic", [FastArithmetic(), InvariantArithmetic()], ids=["fast", "invariant"])
def test_no_sequence_sees_another_and_no_token_its_future(spec: ModelSpec, arithmetic: Arithmetic) -> None:
    model, lengths = make_model(spec, arithmetic), (40, 7, 40)
    ids = make_ids(sum(lengths))
    changed = ids.clone()
    changed[30:47] = 5
    with torch.no_grad():
        before, after = (model.forward_packed(these, lengths).split(lengths) for these in (ids, changed))
    assert torch.allclose(before[2], after[2], atol=1e-6)
    assert torch.allclose(before[0][:30], after[0][:30], atol=1e-6)
    assert not torch.allclose(before[0][30:], after[0][30:], atol=1e-3)


@pytest.mark.parametrize("arithmetic", [FastArithmetic(), InvariantArithmetic()], ids=["fast", "invariant"])
def test_what_lies_before_all_windows_is_not_seen(arithmetic: Arithmetic) -> None:
    everywhere = WindowSpec(size=11, layers=(0, 1, 2))
    model, ids = make_model(replace(TINY_GEMMA, window=everywhere), arithmetic), make_ids(600)
    changed = ids.clone()
    changed[0] = (ids[0] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = (model.forward_packed(these) for these in (ids, changed))
    reach = 3 * (11 - 1)  # each of three layers looks ten tokens back
    assert torch.allclose(before[reach + 1 :], after[reach + 1 :], atol=1e-6)
    assert not torch.allclose(before[reach], after[reach], atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_a_packed_sequence_is_computed_as_if_it_were_alone(spec: ModelSpec) -> None:
    model, lengths = make_model(spec), (5, 5, 17, 1, 17, 30)
    ids = make_ids(sum(lengths))
    with torch.no_grad():
        batched = model.forward_packed(ids, lengths)
        alone = torch.cat([model.forward_packed(part) for part in ids.split(lengths)])
    assert torch.allclose(batched, alone, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_invariant_arithmetic_bits_do_not_depend_on_company(spec: ModelSpec, dtype: torch.dtype) -> None:
    model, lengths = make_model(spec, InvariantArithmetic()).to(dtype), (1, 13, 16, 33)
    ids = make_ids(sum(lengths))
    with torch.no_grad():
        batched = model.forward_packed(ids, lengths)
        alone = torch.cat([model.forward_packed(part) for part in ids.split(lengths)])
    assert torch.equal(batched, alone)
    assert batched.dtype is torch.float32


def repetitive_ids() -> tuple[Tensor, list[int]]:
    """Three conversations about each of two tasks, with one system message; one again, and the beginning of another."""
    system, tasks, replies = torch.arange(9), torch.arange(9, 21).split(6), torch.arange(15).split(5)
    parts = [torch.cat((system, task, reply)) for task in tasks for reply in replies]
    parts += [parts[0], parts[1][:12]]
    return torch.cat(parts), [len(part) for part in parts]


@pytest.mark.parametrize("spec", [TINY_DENSE, replace(TINY_LATENT, experts=None, sparse_layers=())])
def test_what_sequences_begin_with_alike_is_computed_once_and_to_the_same_bits(spec: ModelSpec) -> None:
    model, (ids, lengths) = make_model(spec, InvariantArithmetic()), repetitive_ids()
    shared = shared_rows(ids.tolist(), lengths)
    assert shared is not None
    assert len(shared.firsts_U) == 9 + 2 * 6 + 6 * 5
    with torch.no_grad():
        batched = model.forward_packed(ids, lengths)
        alone = torch.cat([model.forward_packed(part) for part in ids.split(lengths)])
    assert torch.equal(batched, alone)
    assert shared_rows(make_ids(40).tolist(), (20, 20)) is None


@pytest.mark.parametrize("spec", [TINY_DENSE, replace(TINY_LATENT, experts=None, sparse_layers=())])
def test_what_is_computed_once_gets_the_gradients_of_all_that_begin_with_it(spec: ModelSpec) -> None:
    ids, lengths = repetitive_ids()
    gradients = []
    for batches in ([(ids, lengths)], [(part, [len(part)]) for part in ids.split(lengths)]):
        model = make_model(spec)
        for some, own in batches:
            model.forward_packed(some, own).sin().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for packed, alone in zip(*gradients, strict=True):
        assert (packed is None) == (alone is None)
        assert packed is None or alone is None or torch.allclose(packed, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(3, 1), (), (5, 0)])
def test_lengths_that_are_not_those_of_the_tokens_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="packed"):
        make_model(TINY).forward_packed(make_ids(5), lengths)


@pytest.mark.parametrize("spec", SPECS)
def test_narrow_products_change_little_and_nothing_else_gets_narrow(spec: ModelSpec) -> None:
    ids, values, gradients = make_ids(18), [], []
    for arithmetic in (FastArithmetic(), FastArithmetic(products=torch.bfloat16)):
        model = make_model(spec, arithmetic)
        logits = model.logits(model.forward_packed(ids))
        logits.log_softmax(-1)[:, 0].sum().backward()
        values.append(logits.detach())
        gradients.append(model.embedding.grad)
    assert values[1].dtype is torch.float32
    for wide, narrow in (values, gradients):
        assert wide is not None and narrow is not None
        assert narrow.dtype is torch.float32
        assert 0 < (narrow - wide).norm() < 0.05 * wide.norm()


@pytest.mark.parametrize("spec", SPECS)
def test_arithmetics_agree_on_values_and_gradients(spec: ModelSpec) -> None:
    ids, lengths = make_ids(18), (9, 3, 6)
    values, gradients = [], []
    for arithmetic in (FastArithmetic(), InvariantArithmetic()):
        model = make_model(spec, arithmetic)
        logits = model.logits(model.forward_packed(ids, lengths))
        torch.nn.functional.cross_entropy(logits, ids.roll(-1)).backward()
        values.append(logits.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert torch.allclose(values[0], values[1], atol=1e-5)
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None and other is not None, name
        assert gradient.abs().sum() > 0, name
        assert torch.allclose(gradient, other, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("spec", SPECS)
def test_attend_gets_what_the_spec_announces(spec: ModelSpec) -> None:
    seen: list[int] = []
    attention = spec.attention

    def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
        seen.append(layer)
        assert (rule.scale, rule.window) == (attention.scale, spec.window_of(layer))
        assert q_NQD.shape == (5, attention.heads, attention.key_width)
        assert k_NKD.shape == (5, attention.key_heads, attention.key_width)
        assert v_NKW.shape == (5, attention.key_heads, attention.value_width)
        if attention.values_in_keys:
            assert torch.equal(v_NKW, k_NKD[..., : attention.value_width])
        return v_NKW.repeat_interleave(attention.heads // attention.key_heads, 1)

    model = make_model(spec)
    with torch.no_grad():
        hidden = model(make_ids(5), torch.arange(5), attend)
    assert hidden.shape == (5, spec.hidden_size)
    assert seen == list(range(spec.layers))


@pytest.mark.parametrize("spec", SPECS)
def test_only_the_head_can_be_tied(spec: ModelSpec) -> None:
    model = make_model(spec)
    hidden = torch.randn(2, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    assert (model.head is None) == spec.tied
    matrix = model.embedding if model.head is None else model.head
    with torch.no_grad():
        assert torch.allclose(model.logits(hidden), hidden @ matrix.T, atol=1e-6)


def test_initialising_is_repeatable_and_leaves_gains_at_one() -> None:
    first, second = make_model(TINY_LATENT), make_model(TINY_LATENT)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(first.gain, torch.ones(TINY_LATENT.hidden_size))
    assert first.embedding.std().item() == pytest.approx(0.1, rel=0.1)


class Watched:
    """Passes every call on to an arithmetic and remembers its name."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self.calls: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls.add(name)
        call: Callable[..., Any] = getattr(self._arithmetic, name)
        return call


def test_the_arithmetic_can_be_replaced_between_passes() -> None:
    model, watched = make_model(TINY), Watched(FastArithmetic())
    model.arithmetic = watched
    with torch.no_grad():
        model.logits(model.forward_packed(make_ids(3)))
    assert {"linear", "norm", "rotate", "best", "dispatch", "grouped", "gated", "combine"} <= watched.calls
