"""On a GPU: how much of the card's memory bandwidth decoding uses.

    prompts ──▶ the native engine, step by step, until all sequences decode ──▶ STEPS steps are timed

Decoding one token per sequence reads every weight once and every sequence's cache once: bytes that cannot be avoided,
whatever the engine. What is left of the bandwidth that the card shows when it copies is what the engine loses: kernels
that read twice or start late, the sampler, the host. The model has Qwen3-8B's shape and random weights, which cost the
same; contexts are as long as the card has room for.
"""

import asyncio
import random
import time
from dataclasses import dataclass

import torch

from bench.trainer.worker import settle
from etude.config.inference import EngineConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.pages import PAGE
from etude.models.decoder import Decoder
from etude.models.spec import GroupedSpec, ModelSpec, RopeSpec
from etude.protocols import SamplingParams
from etude.trainer.parallel import materialise
from etude.types import Json

QWEN3_8B = ModelSpec(
    vocab_size=151_936,
    hidden_size=4096,
    layers=36,
    attention=GroupedSpec(heads=32, kv_heads=8, head_dim=128, normed=True),
    dense_size=12_288,
    rope=RopeSpec(theta=1e6),
    max_positions=40_960,
    tied=False,
)
BATCH = 64
CONTEXTS = (64, 8192)
"""Tokens of a sequence when its steps are timed."""
WARM_UPS, STEPS = 4, 24
CACHED_BYTES = 2
"""Bytes of a number in the cache: bfloat16."""
ROOM_SHARE = 0.9
"""Share of the card's memory for weights and cache."""
INIT_STD = 0.02
COPY_BYTES = 1 << 30
COPIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """Decoding at one batch size and context."""

    batch: int
    context: int
    """Mean tokens of a sequence in the timed steps."""
    step_s: float
    least_bytes: int
    """Bytes of one step: all weights except the embedding, and every sequence's keys and values, once."""

    def to_json(self, copy_bytes_per_s: float) -> dict[str, Json]:
        """Printed values, beside the card's own copy bandwidth."""
        rate = self.least_bytes / self.step_s
        return {
            "batch": self.batch,
            "context": self.context,
            "step_ms": round(self.step_s * 1e3, 3),
            "tokens_per_s": round(self.batch / self.step_s, 1),
            "least_bytes": self.least_bytes,
            "decode_bytes_per_s": round(rate),
            "share": round(rate / copy_bytes_per_s, 4),
        }


def measure() -> dict[str, Json]:
    """Bytes per second of decoding in bfloat16 at :data:`CONTEXTS`, and of the card's own copying."""
    copied = copy_bandwidth("cuda")
    model = _random_model(QWEN3_8B)
    room = int(ROOM_SHARE * torch.cuda.mem_get_info()[1]) - _weight_bytes(model, embedding=True)
    longest = room // BATCH // (CACHED_BYTES * model.spec.cached_numbers) // PAGE * PAGE
    speeds = [decode_speed(model, batch=BATCH, context=min(context, longest)) for context in CONTEXTS]
    return {
        "device": torch.cuda.get_device_name(),
        "model": "Qwen3-8B's shape, bfloat16",
        "copy_bytes_per_s": round(copied),
        "decoding": [speed.to_json(copied) for speed in speeds],
    }


def decode_speed(model: Decoder, *, batch: int, context: int) -> DecodeSpeed:
    """Time of a step in which ``batch`` sequences of about ``context`` tokens decode."""
    return asyncio.run(_decode(model, batch, context))


async def _decode(model: Decoder, batch: int, context: int) -> DecodeSpeed:
    """Prompts are read a few per step while others decode: there must be tokens left when the last one is read."""
    config = EngineConfig(max_running=batch, max_length=context)
    steps_to_read = -(-batch * context // (config.native.step_tokens - batch)) + batch
    new_tokens = min(context // 2, steps_to_read + WARM_UPS + STEPS)
    engine = NativeEngine(Weights(model, 0, ""), config, seed=0)
    source, params = random.Random(0), SamplingParams(max_tokens=new_tokens)
    prompts = [[source.randrange(model.spec.vocab_size) for _ in range(context - new_tokens)] for _ in range(batch)]
    calls = [asyncio.ensure_future(engine.generate(ids, params, session=str(n))) for n, ids in enumerate(prompts)]
    await asyncio.sleep(0)
    sampled = 0

    def step() -> bool:
        """True if all sequences decoded and nothing else ran."""
        nonlocal sampled
        engine.step()
        counters = engine.take_counters()
        sampled += counters.generated_tokens
        return counters.generated_tokens == batch and not counters.prefill_tokens

    while not step():
        assert sampled < batch * new_tokens, "sequences ended before the last prompt was read"
    for _ in range(WARM_UPS):
        step()
    started_s = time.perf_counter()  # every step ends with a wait for what it drew
    alike = [step() for _ in range(STEPS)]
    step_s = (time.perf_counter() - started_s) / STEPS
    assert all(alike), "a sequence ended while steps were timed"
    cached = batch * (context - new_tokens) + sampled
    for call in calls:
        call.cancel()
    least = _weight_bytes(model, embedding=model.head is None) + cached * (CACHED_BYTES * model.spec.cached_numbers)
    return DecodeSpeed(batch=batch, context=cached // batch, step_s=step_s, least_bytes=least)


def _random_model(spec: ModelSpec) -> Decoder:
    """Made on the card, part by part: the host need not have room for it."""
    with torch.device("meta"):
        model = Decoder(spec).to(torch.bfloat16)
    for part in (*model.blocks, model):
        materialise(part, "cuda")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, INIT_STD) if weight.ndim > 1 else weight.fill_(1)
    return model.eval()


def _weight_bytes(model: Decoder, *, embedding: bool) -> int:
    """Without the embedding, of which a step reads a row per token."""
    parameters = [weight for weight in model.parameters() if embedding or weight is not model.embedding]
    return sum(weight.numel() * weight.element_size() for weight in parameters)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a device's copies in its own memory."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # gets its pages
    settle(device)
    started_s = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    settle(device)
    return 2 * COPIES * COPY_BYTES / (time.perf_counter() - started_s)
