"""Invariant arithmetic: a row's bits are a function of that row, and its values and gradients are torch's."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.models.arithmetic import AttentionRule, MaskTensors, PagedRows, packed_rows
from etude.models.fast import FastArithmetic
from etude.models.invariant import ROWS_PER_TASK, InvariantArithmetic
from etude.models.kernels.pages import PAGE

RULE = AttentionRule(scale=0.3)
OURS, TORCH = InvariantArithmetic(), FastArithmetic()
CPU = torch.device("cpu")
WIDTHS = st.sampled_from([1, 3, 8, 16, 20, 32, 48, 67])
Operation = Callable[[InvariantArithmetic | FastArithmetic, Tensor], Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def row_by_row(operation: Operation, x: Tensor) -> Tensor:
    return torch.cat([operation(OURS, row) for row in x.split(1)])


def operations(inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, Operation]:
    weight, bias, gain = make(outputs, inputs, seed=1).to(dtype), make(outputs, seed=2), make(inputs, seed=3).to(dtype)
    return {
        "linear": lambda a, x: a.linear(x, weight),
        "linear with bias": lambda a, x: a.linear(x, weight, bias),
        "norm": lambda a, x: a.norm(x, gain, 1e-6),
        "gated": lambda a, x: a.gated(torch.cat([x, 2 * x], -1)),
        "softmax": lambda a, x: a.softmax(x),
    }


@given(rows=st.integers(1, 13), inputs=WIDTHS, outputs=WIDTHS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=25, deadline=None)
def test_rows_are_torchs_and_do_not_know_each_other(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x = make(rows, inputs, seed=rows)
    for name, operation in operations(inputs, outputs, dtype).items():
        batched = operation(OURS, x)
        assert torch.equal(batched, row_by_row(operation, x)), name
        torch.testing.assert_close(batched, operation(TORCH, x), atol=2e-5, rtol=2e-5, msg=name)


def test_many_rows_on_several_threads_have_the_same_bits(threads: int) -> None:
    x = make(2 * ROWS_PER_TASK + 7, 40)
    for name, operation in operations(40, 24, torch.float32).items():
        batched = operation(OURS, x)
        assert torch.equal(batched[-3:], operation(OURS, x[-3:])), (name, threads)


@given(rows=st.integers(1, 30), experts=st.integers(2, 9), data=st.data())
@settings(max_examples=25, deadline=None)
def test_experts_are_torchs_and_tokens_do_not_know_each_other(rows: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    x, weight = make(rows, 24), make(experts, 32, 24, seed=1)
    scores = make(rows, experts, seed=2)
    gates = scores.gather(1, OURS.best(scores, k))

    def mixed(a: InvariantArithmetic | FastArithmetic, chosen: slice) -> Tensor:
        choice = a.best(scores[chosen], k)
        sent = a.dispatch(choice, experts)
        y = a.grouped(x[chosen][sent.order_R // k], sent.ends_E, weight)
        return a.combine(y, sent.order_R, gates[chosen])

    everything = slice(0, rows)
    assert torch.equal(OURS.best(scores, k), scores.topk(k).indices)
    torch.testing.assert_close(mixed(OURS, everything), mixed(TORCH, everything), atol=1e-5, rtol=1e-5)
    alone = torch.cat([mixed(OURS, slice(row, row + 1)) for row in range(rows)])
    assert torch.equal(mixed(OURS, everything), alone)


def test_of_equal_scores_the_lower_columns_are_best() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert OURS.best(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


def test_rotation_is_torchs() -> None:
    x, cosines, sines = make(7, 3, 10), make(7, 10, seed=1), make(7, 10, seed=2)
    rotated = OURS.rotate(x, cosines, sines)
    torch.testing.assert_close(rotated, TORCH.rotate(x, cosines, sines))
    assert torch.equal(rotated[4:5], OURS.rotate(x[4:5], cosines[4:5], sines[4:5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"), [(8, 2, 32, 32), (3, 3, 20, 12), (6, 1, 40, 32)]
)
def test_pages_and_chunks_do_not_change_a_bit(
    heads: int, key_heads: int, width: int, value_width: int, dtype: torch.dtype
) -> None:
    length, ours = 75, InvariantArithmetic(dtype)
    q, k = make(length, heads, width), make(length, key_heads, width, seed=1)
    v = make(length, key_heads, value_width, seed=2)
    alone = packed_rows([length], CPU)
    whole = ours.attend_packed(q, k, v, alone, RULE)
    torch.testing.assert_close(whole, TORCH.attend_packed(q, k.to(dtype).float(), v.to(dtype).float(), alone, RULE))
    for chunks in ([length], [1] * length, [30, 1, 1, 17, 26], [64, 11]):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(len(chunks)))
        tables = torch.cat([order[:2], order[2:7]])[None].to(torch.int32)
        keys = torch.zeros(9, key_heads, width, PAGE, dtype=dtype)
        cache = keys, torch.zeros(9, key_heads, PAGE, value_width, dtype=dtype)
        start, parts, fast = 0, list[Tensor](), list[Tensor]()
        for count in chunks:
            rows = PagedRows(
                tables_BP=tables,
                sequences_N=torch.zeros(count, dtype=torch.int32),
                positions_N=torch.arange(start, start + count),
                counts=(count,),
            )
            here = slice(start, start + count)
            ours.write_pages(k[here], v[here], cache, rows)
            parts.append(ours.attend_pages(q[here], cache, rows, RULE))
            fast.append(TORCH.attend_pages(q[here], cache, rows, RULE))
            start += count
        assert torch.equal(torch.cat(parts), whole)
        torch.testing.assert_close(torch.cat(fast), whole, atol=1e-5, rtol=1e-5)


def test_log_probabilities_are_of_what_was_sampled_from() -> None:
    logits, ids = make(4, 50), torch.tensor([3, 7, 0, 49])
    temperatures = torch.tensor([1.0, 0.7, 0.0, 2.0])
    mask = MaskTensors(offsets_N1=torch.tensor([0, 0, 3, 3, 5]), token_ids=torch.tensor([7, 9, 30, 2, 49]))
    actual = OURS.logprobs(logits, ids, temperatures, mask)
    torch.testing.assert_close(actual, TORCH.logprobs(logits, ids, temperatures, mask))
    torch.testing.assert_close(actual[0], logits[0].log_softmax(-1)[3])
    torch.testing.assert_close(actual[1], (logits[1] / 0.7)[[7, 9, 30]].log_softmax(-1)[0])
    assert actual[2] == 0
    own = MaskTensors(offsets_N1=torch.tensor([0, 3]), token_ids=mask.token_ids[:3])
    assert torch.equal(actual[1:2], OURS.logprobs(logits[1:2], ids[1:2], temperatures[1:2], own))


def gradient(operation: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    operation(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_gradients_are_torchs() -> None:
    x, weight = make(9, 24), make(32, 24, seed=1)
    experts, ends = make(3, 32, 24, seed=2), torch.tensor([4, 4, 9], dtype=torch.int32)
    q, k, v, rows = make(19, 4, 8), make(19, 2, 8, seed=1), make(19, 2, 8, seed=2), packed_rows([7, 7, 5], CPU)
    ids, temperatures = torch.arange(9), torch.full((9,), 0.8)
    order, gates = torch.randperm(9), make(3, 3, seed=4)
    cases: list[tuple[Callable[[FastArithmetic | InvariantArithmetic], Callable[..., Tensor]], tuple[Tensor, ...]]] = [
        (lambda a: a.linear, (x, weight)),
        (lambda a: lambda x, g: a.norm(x, g, 1e-6), (x, make(24, seed=3))),
        (lambda a: a.gated, (x,)),
        (lambda a: a.softmax, (x,)),
        (lambda a: lambda x, w: a.grouped(x, ends, w), (x, experts)),
        (lambda a: lambda y, g: a.combine(y, order, g), (x, gates)),
        (lambda a: lambda q, k, v: a.attend_packed(q, k, v, rows, RULE), (q, k, v)),
        (lambda a: lambda x: a.logprobs(x, ids, temperatures, None), (x,)),
    ]
    for of, inputs in cases:
        for ours, torchs in zip(gradient(of(OURS), *inputs), gradient(of(TORCH), *inputs), strict=True):
            torch.testing.assert_close(ours, torchs, atol=1e-4, rtol=1e-4)
