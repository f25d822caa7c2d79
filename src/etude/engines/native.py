"""The native engine: continuous batching on the trainer's own model code.

    generate() ──▶ Scheduler.plan ──▶ one forward pass ──▶ sample ──▶ futures
                        ▲                                    │
                        └──────────── next step ◀────────────┘   swap() takes effect between two steps

Owns the key/value cache and the step loop. Decisions are the :class:`~etude.engines.scheduler.Scheduler`'s; where
weights come from is the caller's business. Runs in one event loop: a step computes for some milliseconds, then I/O has
its turn.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from etude.config import EngineConfig
from etude.engines.inplace import Scatter
from etude.engines.scheduler import Counters, Request, Scheduler, Work
from etude.models.qwen3_moe import Qwen3Moe
from etude.protocols import Completion, EngineHealth, SamplingParams
from etude.types import Finish


@dataclass(frozen=True, slots=True)
class Weights:
    """A model with the name and the proof of its weights; while it serves, changed between two steps only."""

    model: Qwen3Moe
    version: int
    digest: str


class KeyValueCache:
    """Keys and values of every slot, [layers, slots, kv heads, length, head width]."""

    def __init__(self, model: Qwen3Moe, slots: int, length: int) -> None:
        spec = model.spec
        shape = (spec.layers, slots, spec.kv_heads, length, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=model.embedding.dtype, device=model.embedding.device)
        self.values = torch.zeros_like(self.keys)


class NativeEngine:
    """Samples with a :class:`~etude.models.qwen3_moe.Qwen3Moe`; implements :class:`~etude.protocols.Engine`."""

    def __init__(self, weights: Weights, config: EngineConfig, *, seed: int) -> None:
        self._weights = weights
        self._scheduler = Scheduler(
            slots=config.slots, max_length=config.max_length, prefill_tokens=config.prefill_tokens
        )
        self._cache = KeyValueCache(weights.model, config.slots, config.max_length)
        self._random = np.random.default_rng(seed)
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._work = asyncio.Event()
        self.busy_s = 0.0
        """Seconds spent computing."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion. Raises ``ValueError`` on ids outside the vocabulary or a prompt that is too long."""
        vocabulary = self._weights.model.spec.vocab_size
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise ValueError(f"prompt ids must be in 0 … {vocabulary - 1} and not empty")
        request = Request(session=session, params=params, token_ids=list(prompt_ids), prompt_length=len(prompt_ids))
        self._scheduler.add(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        self._work.set()
        try:
            return await future
        finally:
            if self._futures.pop(request, None) is not None:  # the caller went away before the end
                self._scheduler.cancel(request)

    async def health(self) -> EngineHealth:
        """Which weights are serving, and the load."""
        return EngineHealth(
            version=self._weights.version,
            digest=self._weights.digest,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )

    @property
    def weights(self) -> Weights:
        """What is serving now."""
        return self._weights

    def take_counters(self) -> Counters:
        """Token counts since the last call."""
        counters, self._scheduler.counters = self._scheduler.counters, Counters()
        return counters

    def swap(self, weights: Weights, scatters: Sequence[Scatter] = ()) -> float:
        """Sample with other weights from the next token on; returns the pause in seconds.

        ``scatters`` are written into their model first; they may go into the one that serves. When that raises, the
        weights are of no version: load them anew. Turns in progress keep their cache; later turns start from a clean
        prefix (see the scheduler).
        """
        started_s = time.perf_counter()
        for scatter in scatters:
            scatter.apply()
        self._weights = weights
        return time.perf_counter() - started_s

    async def run(self) -> None:
        """Step for ever.

        consumes: queued requests; produces: completions; waits for: a request; woken by: :meth:`generate`;
        on shutdown: cancelled, pending calls are cancelled by their callers.
        """
        while True:
            await self._work.wait()
            self._work.clear()
            while self.step():
                await asyncio.sleep(0)  # I/O has its turn

    def step(self) -> bool:
        """Compute one step; false when there was nothing to do."""
        started_s = time.perf_counter()
        plan = self._scheduler.plan(self._weights.version)
        if not plan:
            return False
        hidden_RH = self._forward(plan)
        self._sample([work.request for work in plan if work.samples], hidden_RH)
        self.busy_s += time.perf_counter() - started_s
        return True

    @torch.inference_mode()
    def _forward(self, plan: list[Work]) -> Tensor:
        """Run the planned tokens through the model; returns the hidden states [R,H] of rows that sample."""
        model = self._weights.model
        token_ids = [token for work in plan for token in work.request.token_ids[work.start : work.start + work.count]]
        positions = [position for work in plan for position in range(work.start, work.start + work.count)]
        slots = [work.request.slot for work in plan for _ in range(work.count)]
        device = model.embedding.device
        attention = CachedAttention(
            self._cache, plan, torch.tensor(slots, device=device), torch.tensor(positions, device=device)
        )
        hidden_NH: Tensor = model(torch.tensor(token_ids, device=device), attention.positions_N, attention)
        ends = np.cumsum([work.count for work in plan]) - 1
        last = [int(end) for end, work in zip(ends, plan, strict=True) if work.samples]
        for work in plan:
            self._scheduler.advance(work)
        return hidden_NH[last]

    @torch.inference_mode()
    def _sample(self, requests: list[Request], hidden_RH: Tensor) -> None:
        """Draw the next token of each request and complete those that ended."""
        if not requests:
            return
        weights = self._weights
        logits_RV = weights.model.logits(hidden_RH).float().cpu()
        temperatures = [request.params.temperature for request in requests]
        greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        scale_R1 = torch.tensor([temperature or 1.0 for temperature in temperatures]).unsqueeze(1)
        logprobs_RV = (logits_RV / scale_R1).log_softmax(-1)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        draws_R1 = torch.tensor([[self._uniform(request)] for request in requests], dtype=torch.float64)
        drawn_R1 = torch.searchsorted(cumulative_RV, draws_R1 * cumulative_RV[:, -1:], right=True)
        drawn_R1.clamp_(max=logits_RV.shape[1] - 1)
        tokens_R = torch.where(greedy, logits_RV.argmax(-1), drawn_R1.squeeze(1))
        chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
        chosen_R = torch.where(greedy, torch.zeros(()), chosen_R)
        for request, token, logprob in zip(requests, tokens_R.tolist(), chosen_R.tolist(), strict=True):
            self._scheduler.append(request, token, logprob, weights.version)
            if request.finished:
                self._complete(request)

    def _uniform(self, request: Request) -> float:
        if request.params.seed is None:
            return float(self._random.random())
        return float(np.random.default_rng((request.params.seed, request.sampled)).random())

    def _complete(self, request: Request) -> None:
        self._scheduler.finish(request)
        future = self._futures.pop(request, None)
        if future is None or future.done():
            return
        stopped = request.token_ids[-1] in request.params.stop_ids
        future.set_result(
            Completion(
                token_ids=np.array(request.token_ids[request.prompt_length :], np.int32),
                logprobs=np.array(request.logprobs, np.float32),
                versions=np.array(request.versions, np.int32),
                finish=Finish.STOP if stopped else Finish.LENGTH,
            )
        )


class CachedAttention:
    """Attention of one step's tokens over the cache: the ``attend`` of the native engine.

    Decoding rows come first in the plan and are computed together, over all slots in use; each prefill chunk is its own
    causal attention.
    """

    def __init__(self, cache: KeyValueCache, plan: list[Work], slots_N: Tensor, positions_N: Tensor) -> None:
        self._cache = cache
        self._slots_N = slots_N
        self.positions_N = positions_N
        self._decoding = sum(work.count == 1 and work.samples for work in plan)
        self._chunks = plan[self._decoding :]
        if self._decoding:
            slots = slots_N[: self._decoding]
            self._rows = int(slots.max()) + 1
            self._length = int(positions_N[: self._decoding].max()) + 1
            # Few of many slots: gather their rows. Most of them: compute all rows and pick, which copies no cache.
            self._gather = self._decoding * 2 < self._rows
            reach = positions_N[: self._decoding]
            if not self._gather:
                reach = torch.zeros(self._rows, dtype=reach.dtype, device=reach.device).index_copy(0, slots, reach)
            visible = torch.arange(self._length, device=slots.device) <= reach.unsqueeze(1)
            self._bias = torch.zeros_like(visible, dtype=cache.keys.dtype).masked_fill_(~visible, float("-inf"))
        self._masks = [_causal(work, slots_N.device) for work in self._chunks]

    def __call__(self, layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """Write this step's keys and values, then attend."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots_N, :, self.positions_N] = k_NKD
        values[self._slots_N, :, self.positions_N] = v_NKD
        out = torch.empty_like(q_NQD)
        if self._decoding:
            out[: self._decoding] = self._decode(q_NQD[: self._decoding], keys, values)
        start = self._decoding
        for work, mask in zip(self._chunks, self._masks, strict=True):
            stop, end, slot = start + work.count, work.start + work.count, work.request.slot
            q = q_NQD[start:stop].transpose(0, 1).unsqueeze(0)
            k, v = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
            grouped = q.shape[1] != k.shape[1]
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
            out[start:stop] = attended[0].transpose(0, 1)
            start = stop
        return out

    def _decode(self, q_BQD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        slots = self._slots_N[: self._decoding]
        if self._gather:
            k, v, q = keys[slots, :, : self._length], values[slots, :, : self._length], q_BQD
        else:
            k, v = keys[: self._rows, :, : self._length], values[: self._rows, :, : self._length]
            q = q_BQD.new_zeros(self._rows, *q_BQD.shape[1:]).index_copy(0, slots, q_BQD)
        q = q.unflatten(1, (k.shape[1], -1))  # queries of one key/value head side by side: [rows, K, Q/K, D]
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + self._bias[:, None, None]
        attended = torch.matmul(scores.softmax(-1), v).flatten(1, 2)
        return attended if self._gather else attended[slots]


def _causal(work: Work, device: torch.device) -> Tensor:
    """[count, start + count]: a chunk's token sees the cache before it and itself."""
    columns = torch.arange(work.start + work.count, device=device)
    return columns <= torch.arange(work.start, work.start + work.count, device=device).unsqueeze(1)
