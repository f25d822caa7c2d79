"""A gateway in a process of its own, so that what it takes can be measured, before an engine that needs no script.

    python long_gateway.py      prints its port; ends when its input does

Whatever the engine samples is a function of the prompt that it was given: a turn whose completion is that of its prompt
was recorded exactly as the engine saw it, and nobody has to remember what that was.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from functools import cache
from hashlib import sha256

import numpy as np

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.protocols import Completion, EngineHealth, SamplingParams, TokenChunk
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.serving import listening
from etude.tokens.chat import SPECIAL_TOKENS, ChatTemplate
from etude.types import Finish, TokenIds

ADMIN_KEY = "the admin key"
WINDOW = 200_000
"""Tokens of a context."""
VOCAB_SIZE, END_ID = 600, SPECIAL_TOKENS.index("<|end|>")
WORDS = [f"{head}{middle}{tail}" for head in ("ta", "re", "su") for middle in ("x", "port", "m") for tail in ("", "es")]
SHORTEST, LONGEST = 20, 200
"""Tokens of a completion."""


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train([" ".join(WORDS)] * 4, vocab_size=VOCAB_SIZE)


def completion_of(prompt_ids: TokenIds) -> Completion:
    """The engine's completion of a prompt."""
    digest = sha256(np.asarray(prompt_ids, np.int32).tobytes()).digest()
    chance = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    sampled = int(chance.integers(SHORTEST, LONGEST))
    token_ids = chance.integers(len(SPECIAL_TOKENS), template().vocab_size, sampled).astype(np.int32)
    token_ids[-1] = END_ID
    return Completion(
        token_ids=token_ids,
        logprobs=-chance.random(sampled, np.float32),
        versions=np.full(sampled, len(prompt_ids) // 1000, np.int32),
        finish=Finish.STOP,
    )


class ScriptedEngine:
    """Implements :class:`~etude.protocols.Engine`."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        return completion_of(prompt_ids)

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        whole = completion_of(prompt_ids)
        yield TokenChunk(token_ids=whole.token_ids, logprobs=whole.logprobs, versions=whole.versions, completion=whole)

    async def health(self) -> EngineHealth:
        return EngineHealth(version=0, digest="d", running=0, waiting=0)


async def serve() -> None:
    """Serve until standard input of this process ends."""
    plan = GatewaySpec(
        chat=template(),
        max_length=WINDOW,
        recorder=Recorder(None),
        engines=(EngineEntry(name="one", url="http://scripted"),),
        keys=(Key(key_id="admin", digest=digest_of(ADMIN_KEY), scope=Scope.ADMIN),),
    )
    config = GatewayConfig()
    async with (
        open_gateway(plan, config, SystemClock(), lambda _url: ScriptedEngine()) as parts,
        listening(http_server(parts.gateway.handle), 0) as port,
    ):
        while not parts.pool.versions():
            await asyncio.sleep(0.005)
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
