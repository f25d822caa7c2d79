"""On a GPU: how much of the card's memory bandwidth decoding uses.

Decoding one token per sequence reads every weight once and every sequence's cache once: bytes that cannot be avoided,
whatever the engine. What is left of the bandwidth that the card shows when it copies is what the engine loses. Not run
on a GPU so far.
"""

import asyncio
import random
import time

import torch

from bench.engine.models import INIT_STD
from etude.aio import background_task
from etude.config.inference import EngineConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.protocols import SamplingParams
from etude.types import Json

BATCH, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 256
COPY_BYTES = 1 << 30
COPIES = 10


def measure(spec: ModelSpec) -> dict[str, Json]:
    """Bytes per second of decoding with a bfloat16 model of this shape, and of the card's own copying.

    At ``BATCH`` sequences nearly every expert is used in every layer, so all weights count as read.
    """
    model = Decoder(spec).to("cuda", torch.bfloat16).eval()
    model.initialise(0, INIT_STD)
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    attention = spec.attention
    width = attention.key_width + (0 if attention.values_in_keys else attention.value_width)
    token_bytes = spec.layers * attention.key_heads * width * model.embedding.element_size()
    config = EngineConfig(max_running=BATCH, max_length=PROMPT_TOKENS + NEW_TOKENS, device="cuda")
    engine = NativeEngine(Weights(model, 0, ""), config, seed=0)
    seconds = decode_seconds(engine, spec.vocab_size)
    cache_bytes = BATCH * token_bytes * (PROMPT_TOKENS + NEW_TOKENS // 2)
    achieved = NEW_TOKENS * (weight_bytes + cache_bytes) / seconds
    copied = _copy_bandwidth()
    return {
        "device": torch.cuda.get_device_name(),
        "tokens_per_s": round(BATCH * NEW_TOKENS / seconds, 1),
        "decode_bytes_per_s": round(achieved),
        "copy_bytes_per_s": round(copied),
        "share": round(achieved / copied, 4),
    }


def decode_seconds(engine: NativeEngine, vocabulary: int, *, batch: int = BATCH, new_tokens: int = NEW_TOKENS) -> float:
    """Seconds for one batch, reading its prompts included; another one before it captures and compiles."""
    source, params = random.Random(0), SamplingParams(max_tokens=new_tokens)

    async def decode() -> None:
        prompts = [[source.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        await asyncio.gather(*(engine.generate(prompt, params, session=str(n)) for n, prompt in enumerate(prompts)))

    async def measured() -> float:
        async with background_task(engine.run()):
            await decode()
            started_s = time.perf_counter()
            await decode()
            return time.perf_counter() - started_s

    return asyncio.run(measured())


def _copy_bandwidth() -> float:
    """Bytes read and written per second by the card's copies."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    torch.cuda.synchronize()
    return 2 * COPIES * COPY_BYTES / (time.perf_counter() - started_s)
