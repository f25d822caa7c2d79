"""Users get released weights only, whatever engines hold, report or do."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from etude.clock import SystemClock
from etude.errors import EngineUnavailable
from etude.gateway.routing.arms import ReleasedArms
from etude.gateway.routing.pool import CallOptions, EnginePool, PoolLimits
from etude.gateway.routing.router import EngineEntry, HealthLimits, Router
from etude.gateway.routing.shadow import Shadow, ShadowCall
from etude.protocols import Completion, Engine, EngineHealth, SamplingParams, TokenChunk
from etude.routing_table import CANARY, LIVE, SHADOW, Arm, RoutingTable
from etude.types import Finish, TokenIds
from waiting import until

LIMITS = HealthLimits(healthy_poll_s=0.01, suspect_poll_s=0.01, stale_poll_s=0.01, dead_poll_s=0.01, max_lag=None)
PARAMS = SamplingParams(max_tokens=3, seed=1)
OLD, NEW = (Arm(name=LIVE, version=number, digest=f"digest {number}", share=1.0) for number in (1, 2))


@dataclass(eq=False)
class Chain:
    """An engine with one weight version; ``sampled`` is another one that it samples with behind its reports."""

    mark: int
    sampled: int = 0
    down: bool = False
    requests: list[SamplingParams] = field(default_factory=list)

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        self.requests.append(params)
        if self.down:
            raise EngineUnavailable("it is down")
        ids = np.array([5], np.int32)
        return Completion(
            token_ids=ids,
            logprobs=-ids.astype(np.float32),
            versions=np.array([self.sampled or self.mark], np.int32),
            finish=Finish.LENGTH,
        )

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        whole = await self.generate(prompt_ids, params, session=session)
        yield TokenChunk(token_ids=whole.token_ids, logprobs=whole.logprobs, versions=whole.versions, completion=whole)

    async def health(self) -> EngineHealth:
        return EngineHealth(version=self.mark, digest=f"digest {self.mark}", running=0, waiting=0)


def split(share: float, generation: int = 1) -> RoutingTable:
    arms = (Arm(name=LIVE, version=1, digest="digest 1", share=1 - share),
            Arm(name=CANARY, version=2, digest="digest 2", share=share))  # fmt: skip
    return RoutingTable(generation=generation, salt="s", arms=arms)


def only(arm: Arm, generation: int = 1, shadow: Arm | None = None) -> RoutingTable:
    return RoutingTable(generation=generation, salt="s", arms=(arm,), shadow=shadow)


@dataclass
class Users:
    """Calls of users through a pool that follows tables."""

    pool: EnginePool
    arms: ReleasedArms = field(default_factory=ReleasedArms)

    async def ask(self, session: str, user: str = "", *, streamed: bool = False) -> Completion:
        arm = self.arms.of_call(session, user or session)
        options = CallOptions(arm=arm)
        if not streamed:
            return await self.pool.generate([1], PARAMS, session=session, options=options)
        async with aclosing(self.pool.stream([1], PARAMS, session=session, options=options)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    return chunk.completion
        raise AssertionError("a stream ends with its completion")


@asynccontextmanager
async def served(**engines: Chain) -> AsyncIterator[Users]:
    by_name: dict[str, Engine] = dict(engines)
    pool = EnginePool(by_name.__getitem__, Router(LIMITS), SystemClock(), PoolLimits(outage_s=0.3))
    for name in engines:
        pool.add(EngineEntry(name=name, url=name))
    watch = asyncio.create_task(pool.watch())
    try:
        await until(lambda: all(view.health is not None for view in pool.list()))
        yield Users(pool)
    finally:
        watch.cancel()


def test_an_engine_with_the_newest_unreleased_version_gets_no_call_of_a_user() -> None:
    async def run() -> None:
        old, newest = Chain(mark=1), Chain(mark=9)
        async with served(old=old, newest=newest) as users:
            with pytest.raises(EngineUnavailable, match="nothing is released yet"):
                await users.ask("early")
            users.arms.follow(only(OLD))
            users.pool.announce(9, "digest 9")
            for number in range(50):
                completion = await users.ask(f"s{number}")
                assert set(completion.versions.tolist()) == {1}
            old.down = True
            with pytest.raises(EngineUnavailable):
                await users.ask("s")
            assert not newest.requests

    asyncio.run(run())


def test_tokens_of_weights_that_were_swapped_behind_a_report_are_given_to_no_one() -> None:
    async def run() -> None:
        liar, good = Chain(mark=1, sampled=9), Chain(mark=1)
        async with served(liar=liar, good=good) as users:
            users.arms.follow(only(OLD))
            for number in range(20):
                completion = await users.ask(f"s{number}", streamed=number % 2 == 0)
                assert set(completion.versions.tolist()) == {1}
            assert users.pool.counters.unreleased == len(liar.requests) > 0

    asyncio.run(run())


def test_users_go_to_their_arm_then_to_the_live_one_and_back_with_the_table() -> None:
    async def run() -> None:
        old, new = Chain(mark=1), Chain(mark=2)
        async with served(old=old, new=new) as users:
            users.arms.follow(split(0.3))
            versions = {user: int((await users.ask(f"s{user}", f"u{user}")).versions[0]) for user in range(60)}
            table = users.arms.table
            assert table is not None
            assert versions == {user: table.assign(f"u{user}").arm.version for user in range(60)}
            assert set(versions.values()) == {1, 2}
            assert not users.arms.follow(only(NEW, generation=1)), "it is no newer"
            tried = next(user for user, version in versions.items() if version == 2)
            stayed = next(user for user, version in versions.items() if version == 1)
            users.arms.follow(split(0.99, generation=2))
            assert (await users.ask(f"s{stayed}", f"u{stayed}")).versions[0] == 1, "a session keeps its weights"
            assert users.arms.of_call(f"s{stayed}", f"u{stayed}").label == "live.1"
            users.arms.follow(only(OLD, generation=3))
            assert (await users.ask(f"s{tried}", f"u{tried}")).versions[0] == 1, "and loses them when they are gone"
            users.arms.follow(split(0.99, generation=4))
            new.down = True
            assert (await users.ask("fresh", f"u{tried}")).versions[0] == 1, "none has the canary: the live arm"

    asyncio.run(run())


def test_a_shadow_samples_what_users_ask_and_no_user_sees_it() -> None:
    async def run() -> None:
        old, new = Chain(mark=1), Chain(mark=2)
        async with served(old=old, new=new) as users:
            calls: list[ShadowCall] = []
            shadow = Shadow(users.pool, users.arms, SystemClock(), calls.append, share=1.0)
            users.arms.follow(only(OLD, shadow=Arm(name=SHADOW, version=2, digest="digest 2")))
            completion = await users.ask("s")
            assert set(completion.versions.tolist()) == {1}
            shadow.offer([1], PARAMS, completion, "s", 0.5)
            await until(lambda: bool(calls))
            assert (calls[0].digest, calls[0].failed, calls[0].live_seconds) == ("digest 2", False, 0.5)
            assert new.requests[0].priority > PARAMS.priority
            new.down = True
            shadow.offer([1], PARAMS, completion, "s", 0.5)
            await until(lambda: len(calls) == 2)
            assert calls[1].failed
            await shadow.close()

    asyncio.run(run())
