"""What a decode step of the native engine costs beside its arithmetic, counted where there is no GPU.

    python tests/support/decode_counts.py        prints the counts as JSON, for programs that share no code with tests

Host waits and launches are those of :mod:`pretended`, on the smallest mixture of experts in bfloat16; bytes of keys and
values are what the kernel for paged attention asks for in Triton's interpreter, whose grid and loads are the card's.
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from etude.config.inference import EngineConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.arithmetic import AttentionRule, PagedRows
from etude.models.decoder import Decoder
from etude.models.kernels.pages import PAGE
from etude.models.spec import TINY, ModelSpec
from etude.protocols import SamplingParams
from pretended import PretendedDevice, pretended
from triton_interpreter import interpreted, kernels

STEPS = 2
"""Decode steps that are counted."""
PROMPT = [3, 1, 4, 1, 5]
CONTEXTS = (600, 1_000, 1_900)
"""Positions of the sequences whose keys and values are read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCounts:
    """Counts of one decode step."""

    host_waits_per_step: float
    """Times that the host waits for the device."""
    launches_per_step: float
    """Kernels and copies that the host starts; a CUDA graph is one."""


def count_decode(
    params: Sequence[SamplingParams], *, spec: ModelSpec = TINY, record_routes: bool = True
) -> DecodeCounts:
    """Count steps in which requests of these parameters decode together, once their graph is captured."""
    with _on_device(spec) as (device, model):
        return asyncio.run(_count(device, model, params, record_routes))


def count_mixed() -> DecodeCounts:
    """Count a step that reads a prompt beside a request that decodes, once such a graph is captured."""
    with _on_device(TINY) as (device, model):
        return asyncio.run(_count_mixed(device, model))


@contextmanager
def _on_device(spec: ModelSpec) -> Iterator[tuple[PretendedDevice, Decoder]]:
    """The pretended device, and a model there in bfloat16."""
    with pretended() as device:
        model = Decoder(spec)
        model.initialise(0, std=0.15)
        yield device, model.to("cuda", torch.bfloat16)


async def _count_mixed(device: PretendedDevice, model: Decoder) -> DecodeCounts:
    engine = NativeEngine(Weights(model, 0, ""), EngineConfig(max_running=4, max_length=64), seed=0, record_routes=True)
    calls: list[asyncio.Future[Any]] = [_scored(engine)]
    for n in range(3):  # the first is a plain one, the second is captured, the third is counted
        params = SamplingParams(max_tokens=9)
        calls.append(asyncio.ensure_future(engine.generate([*PROMPT, n], params, session=str(n))))
        await asyncio.sleep(0)
        engine.take_counters()
        device.host_waits.clear()
        device.launches.clear()
        engine.step()
    counters = engine.take_counters()
    assert counters.generated_tokens == 3 and counters.prefill_tokens, "no mixed step"
    for call in calls:
        call.cancel()
    return DecodeCounts(
        host_waits_per_step=float(device.host_waits.total()), launches_per_step=float(device.launches.total())
    )


async def _count(
    device: PretendedDevice, model: Decoder, params: Sequence[SamplingParams], record_routes: bool
) -> DecodeCounts:
    config = EngineConfig(max_running=len(params) + 1, max_length=64)
    engine = NativeEngine(Weights(model, 0, ""), config, seed=0, record_routes=record_routes)
    calls: list[asyncio.Future[Any]] = [_scored(engine)]
    calls += [
        asyncio.ensure_future(engine.generate([*PROMPT, n], dataclasses.replace(one, max_tokens=9), session=str(n)))
        for n, one in enumerate(params)
    ]
    await asyncio.sleep(0)
    for _ in range(2):  # prompts are read, then a graph is captured
        engine.step()
    engine.take_counters()
    device.host_waits.clear()
    device.launches.clear()
    for _ in range(STEPS):
        engine.step()
    counters = engine.take_counters()
    assert counters.generated_tokens == STEPS * len(params) and not counters.prefill_tokens, "not only decode steps"
    for call in calls:
        call.cancel()
    return DecodeCounts(
        host_waits_per_step=device.host_waits.total() / STEPS, launches_per_step=device.launches.total() / STEPS
    )


def _scored(engine: NativeEngine) -> asyncio.Future[Any]:
    """A prompt to score in the first step, which is then a plain one: a graph of it would be captured for nothing."""
    return asyncio.ensure_future(engine.score(PROMPT, session="scored"))


def kv_bytes_vs_least(contexts: Sequence[int] = CONTEXTS) -> float:
    """Bytes of keys and values that the decode kernel asks for, over those that the sequences have."""
    (paged_attention,) = kernels("paged_attention")
    pages = -(-max(contexts) // PAGE)
    rows = PagedRows(
        tables_BP=torch.arange(pages * len(contexts), dtype=torch.int32).view(len(contexts), pages),
        sequences_N=torch.arange(len(contexts), dtype=torch.int32),
        positions_N=torch.tensor(contexts) - 1,
        counts=(1,) * len(contexts),
    )
    generator, width = torch.Generator().manual_seed(0), 16
    keys = torch.randn(pages * len(contexts), 2, width, PAGE, generator=generator).bfloat16()
    values = torch.randn(pages * len(contexts), 2, PAGE, width, generator=generator).bfloat16()
    q_NQD = torch.randn(len(contexts), 8, width, generator=generator).bfloat16()
    with interpreted(), _counted_reads((keys, values)) as read:
        paged_attention.attend(q_NQD, (keys, values), rows, AttentionRule(scale=0.25))
    return sum(read) / (sum(contexts) * 2 * 2 * width * keys.itemsize)


@contextmanager
def _counted_reads(memory: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Collects how many bytes of some tensors each load of an interpreted kernel asks for."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, read = InterpreterBuilder.create_masked_load, list[int]()

    def counted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        for tensor in memory:
            inside = (addresses >= tensor.data_ptr()) & (addresses < tensor.data_ptr() + tensor.nbytes)
            read.append(int(inside.sum()) * tensor.itemsize)
        return load(self, pointers, mask, *rest)

    InterpreterBuilder.create_masked_load = counted
    try:
        yield read
    finally:
        InterpreterBuilder.create_masked_load = load


if __name__ == "__main__":
    counts = count_decode([SamplingParams(max_tokens=1)] * 2)
    print(json.dumps({**dataclasses.asdict(counts), "kv_bytes_vs_least": round(kv_bytes_vs_least(), 4)}))  # noqa: T201
