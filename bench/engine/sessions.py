"""How much of a conversation the native engine reads again: sessions whose every turn repeats all turns before it.

That is what a harness sends: the opening, everything sampled and answered since, and something new. Whole pages of what
the engine has read under the weights that serve can be reused; the rest of the last page and what is new cannot.
"""

import asyncio
import random
from dataclasses import dataclass

import torch

from bench.engine.models import INIT_STD
from etude.aio import background_task
from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.protocols import SamplingParams
from etude.types import Json

SESSIONS = 8
"""At the same time."""
TURNS = 6
OPENING_TOKENS = 384
"""A short system prompt with tools, and a task."""
SAMPLED_TOKENS, ANSWERED_TOKENS = 24, 16
"""Tokens of each turn: from the model, and from its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Prompt tokens of all turns but the first."""

    prompt_tokens: int
    reused_tokens: int
    seen_tokens: int
    """Tokens that the engine had read or sampled before: no cache could reuse more."""

    @property
    def share(self) -> float:
        """Reused of all."""
        return self.reused_tokens / self.prompt_tokens

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        return {
            "case": f"{SESSIONS} sessions of {TURNS} turns",
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "share": round(self.share, 4),
            "share_of_seen": round(self.reused_tokens / self.seen_tokens, 4),
        }


def measure(spec: ModelSpec, threads: int) -> Reuse:
    """Hold the sessions with a model of random weights."""
    torch.set_num_threads(threads)
    model = Decoder(spec).eval()
    model.initialise(0, INIT_STD)
    length = OPENING_TOKENS + TURNS * (SAMPLED_TOKENS + ANSWERED_TOKENS)
    config = EngineConfig(max_running=SESSIONS, max_length=length, options=NativeOptions(threads=threads))
    return asyncio.run(_hold(NativeEngine(Weights(model, 0, ""), config, seed=0), spec.vocab_size))


async def _hold(engine: NativeEngine, vocabulary: int) -> Reuse:
    source = random.Random(0)
    contexts = [[source.randrange(vocabulary) for _ in range(OPENING_TOKENS)] for _ in range(SESSIONS)]
    params = SamplingParams(max_tokens=SAMPLED_TOKENS)
    prompt_tokens = seen_tokens = 0
    async with background_task(engine.run()):
        for turn in range(TURNS):
            if turn == 1:
                engine.take_counters()
            if turn:
                prompt_tokens += sum(map(len, contexts))
                seen_tokens += sum(len(context) - ANSWERED_TOKENS for context in contexts)
            calls = (engine.generate(context, params, session=str(n)) for n, context in enumerate(contexts))
            for context, completion in zip(contexts, await asyncio.gather(*calls), strict=True):
                context += completion.token_ids.tolist()
                context += [source.randrange(vocabulary) for _ in range(ANSWERED_TOKENS)]
    reused = engine.take_counters().reused_tokens
    return Reuse(prompt_tokens=prompt_tokens, reused_tokens=reused, seen_tokens=seen_tokens)
