"""The pretended device refuses what a real one refuses, and what a real one would silently compute wrongly."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

if find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("needs Triton, and no real device", allow_module_level=True)
from pretended import PretendedDevice, RefusedByDevice, UnorderedAccess, pretended


@pytest.fixture(autouse=True)
def device() -> Iterator[PretendedDevice]:
    with pretended() as device:
        yield device


def test_tensors_hold_values_and_say_cuda(device: PretendedDevice) -> None:
    weight = torch.ones(2, 3).cuda().requires_grad_()
    (weight @ torch.arange(3.0, device="cuda")).sum().backward()
    assert weight.is_cuda and weight.device == torch.device("cuda", 0)
    assert weight.grad is not None and weight.grad.tolist() == [[0, 1, 2]] * 2
    assert device.memory.held_bytes == 48
    del weight
    assert device.memory.held_bytes == 0 < device.memory.peak_bytes


def test_operands_lie_on_one_device() -> None:
    with pytest.raises(RefusedByDevice, match="operands on cuda:0 and cpu"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_a_host_that_waits_is_counted(device: PretendedDevice) -> None:
    x = torch.ones(3).cuda()
    assert device.host_waits.total() == 1  # from pageable memory
    y = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert device.host_waits.total() == 1
    assert (x + y).sum().item() == 6
    assert device.host_waits.total() == 2


def test_a_graph_computes_with_what_its_inputs_have_become(device: PretendedDevice) -> None:
    x, graph = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x + 1) * 2
    assert y.isnan().all()  # capturing computes nothing
    x.fill_(3)
    device.launches.clear()
    graph.replay()
    assert device.launches.total() == 1
    assert y.tolist() == [8, 8]


def test_a_capture_takes_no_wait_and_no_copy_from_the_host() -> None:
    x = torch.zeros(2, device="cuda")
    for forbidden in (lambda: x.sum().item(), lambda: x.copy_(torch.ones(2)), lambda: x[x > 0], torch.cuda.synchronize):
        with (
            pytest.raises(RefusedByDevice, match="while a graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            forbidden()


def test_kernels_take_what_they_are_made_for() -> None:
    ends = torch.tensor([2, 4], dtype=torch.int32, device="cuda")
    rows, weights = torch.ones(4, 6, device="cuda").bfloat16(), torch.ones(2, 6, 8, device="cuda").bfloat16()
    with pytest.raises(RefusedByDevice, match="aligned to 16 bytes"):
        functional.grouped_mm(rows, weights, offs=ends)
    from torch.nn.attention.varlen import varlen_attn

    heads = torch.ones(4, 2, 8, device="cuda")
    with pytest.raises(RefusedByDevice, match="bfloat16 and float16"):
        varlen_attn(heads, heads, heads, ends, ends, 2, 2)


def test_streams_are_ordered_by_events_alone() -> None:
    side, x = torch.cuda.Stream(), torch.zeros(2, device="cuda")
    with torch.cuda.stream(side):
        with pytest.raises(UnorderedAccess, match="stream 1 reads what stream 0 writes"):
            x + 1
        side.wait_stream(torch.cuda.current_stream())  # itself: no order with the stream that wrote
        with pytest.raises(UnorderedAccess):
            x + 1
    written = torch.cuda.Event()
    written.record()
    side.wait_event(written)
    with torch.cuda.stream(side):
        x + 1
    with pytest.raises(UnorderedAccess, match="overwrites what stream 1 reads"):
        x.zero_()


def test_pinned_memory_is_left_alone_until_it_is_copied() -> None:
    staged = torch.zeros(4, pin_memory=True)
    copied = staged.to("cuda", non_blocking=True)
    with pytest.raises(UnorderedAccess, match="the host overwrites what stream 0"):
        staged.fill_(1)
    torch.cuda.current_stream().synchronize()
    staged.fill_(1)
    assert copied.tolist() == [0, 0, 0, 0]
