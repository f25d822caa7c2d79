"""One call from question to answer: stops, several replies, permits, replays, failures."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.errors import CaptureError, EngineUnavailable, SessionLost, VersionPending
from etude.gateway.api.calls import Answer, ApiError, Call, FinishReason, Sampling
from etude.gateway.api.chat import parse
from etude.gateway.capture.conversations import Conversation
from etude.gateway.request_log import RequestRecord
from etude.gateway.routing.admission import AdmissionController, AdmissionLimits, AdmissionQueue, TrafficClass
from etude.gateway.routing.pool import EnginePool, PoolLimits
from etude.gateway.routing.router import EngineEntry, Router
from etude.gateway.service import Caller, CallService, Recorder, ReplySampler
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore
from etude.protocols import Completion, Engine, SamplingParams, TokenChunk
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatMessage
from etude.types import Json, SamplingMask, TokenIds

VOCAB_SIZE, MAX_LENGTH = 300, 128
GO = (ChatMessage(role="user", content="go"),)
CLOCK = SystemClock()


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["return total\n"] * 4, vocab_size=VOCAB_SIZE)


@dataclass(frozen=True)
class Bench:
    """A service and its surroundings."""

    service: CallService
    queue: AdmissionQueue
    conversation: Conversation

    def caller(self, **wishes: object) -> Caller:
        caller = Caller(conversation=self.conversation, traffic=TrafficClass.ROLLOUT, deadline=CLOCK.now() + 600.0)
        return replace(caller, **wishes)  # type: ignore[arg-type]  # fields of a caller

    async def answer(self, call: Call, **wishes: object) -> Answer:
        return await self.service.answer(call, self.caller(**wishes), RequestRecord(began=0.0))

    async def stream(self, **fields: Json) -> list[dict[str, Json]]:
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True, **fields}
        request = parse(orjson.dumps(body))
        data = b""
        async with aclosing(
            self.service.stream(request.call, request.events(), self.caller(), RequestRecord(began=0.0))
        ) as chunks:
            async for chunk in chunks:
                data += chunk
        lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return [orjson.loads(line) for line in lines[:-1]]


class KeepingEngine(FakeEngine):
    """Records the sampling mask of each token, as for top-p."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        whole = await super().generate(prompt_ids, params, session=session)
        offsets = np.arange(len(whole.token_ids) + 1, dtype=np.int64)
        return replace(whole, sampling_mask=SamplingMask(offsets=offsets, token_ids=whole.token_ids))


class EndlessEngine(FakeEngine):
    """Streams tokens without end, counts them, and signals when it is stopped."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
        self.sampled = 0
        self.stopped = asyncio.Event()
        self._tokens = tokens

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        try:
            for index in count():
                self.sampled += 1
                token = np.array([self._tokens[index % len(self._tokens)]], np.int32)
                yield TokenChunk(token_ids=token, logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32))
                await asyncio.sleep(0)
        finally:
            self.stopped.set()


def fake_engine() -> FakeEngine:
    return FakeEngine(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)


@asynccontextmanager
async def bench(engine: Engine, payloads: Path | None = None, places: int = 8) -> AsyncIterator[Bench]:
    admission = AdmissionController(AdmissionLimits(rollouts=places, floor=1))
    pool = EnginePool(lambda _url: engine, Router(), CLOCK, PoolLimits(outage_s=0.1), admission=admission)
    pool.add(EngineEntry(name="one", url="http://fake"))
    queue = AdmissionQueue(admission, CLOCK)
    recorder = Recorder(None if payloads is None else Payloads(ObjectStore(str(payloads))))
    sampler = ReplySampler(template(), pool, queue, recorder, CLOCK)
    polling = asyncio.create_task(pool.watch())
    try:
        yield Bench(CallService(sampler, max_length=MAX_LENGTH), queue, Conversation("session", template()))
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


def play(engine: Engine, scene: Callable[[Bench], Awaitable[None]], payloads: Path | None = None) -> None:
    async def run() -> None:
        async with bench(engine, payloads) as stage:
            await asyncio.wait_for(scene(stage), 60)

    asyncio.run(run())


def ids_of(text: str) -> list[int]:
    """One token per letter, so that every stop string ends at a token."""
    return [token for letter in text for token in template().encode(letter)]


def ask(**sampling: object) -> Call:
    return Call(messages=GO, sampling=Sampling(**sampling))  # type: ignore[arg-type]  # fields of a sampling


def output(events: Sequence[dict[str, Json]], index: int = 0) -> str:
    text = ""
    for event in events:
        choices = event["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            assert isinstance(choice, dict)
            delta = choice["delta"]
            assert isinstance(delta, dict)
            text += str(delta.get("content") or "") if choice["index"] == index else ""
    return text


def test_a_stop_string_ends_the_reply_and_the_turn_after_the_token_that_completed_it() -> None:
    engine = fake_engine()
    engine.script([*ids_of("abcdef"), template().end_id])

    async def scene(stage: Bench) -> None:
        answer = await stage.answer(ask(max_tokens=9, stops=("cd",)))
        (reply,) = answer.replies
        assert (reply.message.content, reply.finish_reason, reply.stop_text) == ("ab", FinishReason.STOP_TEXT, "cd")
        assert reply.turn.completion_ids.tolist() == ids_of("abcd")
        assert len(reply.turn.logprobs) == len(reply.turn.versions) == 4

    play(engine, scene)


def test_an_engine_is_stopped_at_a_stop_string() -> None:
    async def run() -> None:
        engine = EndlessEngine(ids_of("abcd"))
        async with bench(engine) as stage:
            answer = await stage.answer(ask(max_tokens=64, stops=("d",)))
            assert answer.replies[0].message.content == "abc"
            await asyncio.wait_for(engine.stopped.wait(), 30)
            assert engine.sampled == 4
            assert stage.queue.controller.inflight(TrafficClass.ROLLOUT) == 0

    asyncio.run(run())


def test_what_top_p_left_is_recorded_of_a_reply_that_was_cut(tmp_path: Path) -> None:
    engine = KeepingEngine(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
    engine.script([*ids_of("abcdef"), template().end_id])

    async def scene(stage: Bench) -> None:
        answer = await stage.answer(ask(max_tokens=9, stops=("cd",), top_p=0.5))
        (turn,) = Payloads(ObjectStore(str(tmp_path))).fetch([answer.replies[0].turn])
        assert turn.completion_ids.tolist() == ids_of("abcd")
        assert turn.sampling_mask is not None
        assert len(turn.sampling_mask) == 4

    play(engine, scene, tmp_path)


def test_several_replies_share_a_prompt_and_are_turns_of_their_own() -> None:
    async def scene(stage: Bench) -> None:
        answer = await stage.answer(ask(max_tokens=8, count=5, seed=3))
        assert len(answer.replies) == len(stage.conversation.turns) == 5
        assert len({tuple(turn.completion_ids.tolist()) for turn in stage.conversation.turns}) > 1
        assert len({tuple(turn.prompt_ids.tolist()) for turn in stage.conversation.turns}) == 1
        again = await stage.answer(ask(max_tokens=8, count=5, seed=3))
        assert [reply.message.content for reply in again.replies] == [r.message.content for r in answer.replies]

    play(fake_engine(), scene)


def test_several_streamed_replies_are_those_of_the_record() -> None:
    async def scene(stage: Bench) -> None:
        events = await stage.stream(n=6, max_tokens=8)
        turns = stage.conversation.turns
        assert len(turns) == 6
        for index, turn in enumerate(turns):
            assert output(events, index) == template().decode(turn.completion_ids.tolist())

    play(fake_engine(), scene)


def test_the_first_failure_of_several_replies_cancels_the_others_and_nothing_is_recorded() -> None:
    class OneBad(FakeEngine):
        calls = 0

        async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("no")
            await asyncio.sleep(30)
            raise AssertionError("it was cancelled")

    async def scene(stage: Bench) -> None:
        with pytest.raises(ApiError, match="the engine rejected the request: no"):
            await stage.answer(ask(max_tokens=8, count=3))
        with pytest.raises(ApiError, match="the engine rejected the request: no"):
            engine.calls = 0
            await stage.stream(n=3, max_tokens=8)
        assert stage.conversation.turns == []
        assert stage.queue.controller.inflight(TrafficClass.ROLLOUT) == 0

    engine = OneBad(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
    play(engine, scene)


def test_calls_wait_for_a_place_and_go_in_order_of_arrival() -> None:
    class Noting(FakeEngine):
        most = now = 0

        async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.01)
            self.now -= 1
            return await super().generate(prompt_ids, params, session=session)

    async def run() -> None:
        engine = Noting(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
        async with bench(engine, places=2) as stage:
            await asyncio.gather(*(stage.answer(ask(max_tokens=4)) for _ in range(8)))
            assert len(stage.conversation.turns) == 8
            assert engine.most == 2

    asyncio.run(run())


def test_a_caller_whose_wait_times_out_gets_a_retry_time_and_leaves_the_queue() -> None:
    async def run() -> None:
        engine = EndlessEngine(ids_of("a"))
        async with bench(engine, places=1) as stage:
            holding = asyncio.create_task(stage.answer(ask(max_tokens=64, stops=("never",))))
            async with asyncio.timeout(30):
                while not engine.sampled:
                    await asyncio.sleep(0.001)
            with pytest.raises(ApiError) as refused:
                await stage.answer(ask(max_tokens=4), deadline=CLOCK.now() + 0.05)
            assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
            assert refused.value.retry_after_s
            waiting = asyncio.create_task(stage.answer(ask(max_tokens=4)))
            async with asyncio.timeout(30):
                while not stage.queue.controller.waiting(TrafficClass.ROLLOUT):
                    await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert stage.queue.controller.waiting(TrafficClass.ROLLOUT) == 0
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            assert stage.queue.controller.inflight(TrafficClass.ROLLOUT) == 0
            await asyncio.wait_for(engine.stopped.wait(), 30)

    asyncio.run(run())


def test_a_model_name_asks_for_an_adapter_where_nothing_is_learnt() -> None:
    given: list[str] = []

    class Adapted(FakeEngine):
        async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
            given.append(params.adapter)
            return await super().generate(prompt_ids, params, session=session)

    async def scene(stage: Bench) -> None:
        for model in ("policy:tenant-1", "policy", "gpt-4:x"):
            await stage.answer(replace(ask(), model=model), traffic=TrafficClass.PRODUCTION)
        with pytest.raises(ApiError, match="this session is learnt from, by 'policy' alone"):
            await stage.answer(replace(ask(), model="policy:tenant-1"))

    play(Adapted(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH), scene)
    assert given == ["tenant-1", "", ""]


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    async def scene(stage: Bench) -> None:
        call = Call(prompt=tuple(range(40, 40 + 100)), sampling=Sampling(max_tokens=29))
        with pytest.raises(ApiError, match="is 128 tokens: 100 prompt tokens and 29 to sample exceed it") as refused:
            await stage.answer(call)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
        assert stage.service.count(call, stage.conversation) == 100

    play(fake_engine(), scene)


def test_a_stream_whose_request_was_answered_meanwhile_says_so_and_leaves_no_turn() -> None:
    async def scene(stage: Bench) -> None:
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 20}
        request = parse(orjson.dumps(body))
        caller = stage.caller(request_id="a")
        chunks = stage.service.stream(request.call, request.events(), caller, RequestRecord(began=0.0))
        await anext(chunks)
        await stage.service.answer(request.call, caller, RequestRecord(began=0.0))
        with pytest.raises(ApiError) as refused:
            async for _ in chunks:
                pass
        assert refused.value.status == 409
        assert len(stage.conversation.turns) == 1

    engine = fake_engine()
    engine.script(ids_of("abcdefghij") * 2, ids_of("abcdefghij") * 2)
    play(engine, scene)


def test_a_stream_that_is_closed_early_leaves_nothing() -> None:
    async def run() -> None:
        engine = EndlessEngine(ids_of("abc"))
        async with bench(engine) as stage:
            body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
            request = parse(orjson.dumps(body))
            record = RequestRecord(began=0.0)
            chunks = stage.service.stream(request.call, request.events(), stage.caller(), record)
            async with aclosing(chunks):
                await anext(chunks)
            await asyncio.wait_for(engine.stopped.wait(), 30)
            assert stage.conversation.turns == []
            prompt = stage.conversation.prompt(request.call)
            assert record.prompt_tokens == len(prompt.token_ids)
            assert 0 < record.completion_tokens <= engine.sampled
            assert stage.queue.controller.inflight(TrafficClass.ROLLOUT) == 0

    asyncio.run(run())


def test_what_a_call_took_is_known_however_it_ends() -> None:
    class Slow(FakeEngine):
        request = asyncio.Event()

        async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
            self.request.set()
            await asyncio.sleep(30)
            raise AssertionError("it was cancelled")

    async def scene(stage: Bench) -> None:
        record = RequestRecord(began=0.0)
        call = asyncio.create_task(stage.service.answer(ask(max_tokens=4), stage.caller(), record))
        await engine.request.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        read = stage.service.count(ask(max_tokens=4), stage.conversation)
        assert (record.prompt_tokens, record.completion_tokens) == (read, 0)
        late, pending = RequestRecord(began=0.0), RequestRecord(began=0.0)
        with pytest.raises(EngineUnavailable):
            await stage.service.answer(ask(max_tokens=4), stage.caller(deadline=CLOCK.now() + 0.05), late)
        assert late.prompt_tokens == read
        with pytest.raises(VersionPending):
            await stage.service.answer(ask(max_tokens=4), stage.caller(min_version=99), pending)
        assert pending.prompt_tokens == 0

    engine = Slow(CLOCK, vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
    play(engine, scene)


def test_trouble_comes_out_as_what_it_is() -> None:
    engine = fake_engine()

    async def scene(stage: Bench) -> None:
        engine.fail_next(10**6)
        with pytest.raises(EngineUnavailable):
            await stage.answer(ask(max_tokens=4))
        with pytest.raises(EngineUnavailable):
            await stage.stream(max_tokens=4)
        engine.fail_next(0)
        stage.conversation.close()
        await asyncio.sleep(0.5)
        with pytest.raises(SessionLost):
            await stage.answer(ask(max_tokens=4))

    play(engine, scene)


def test_a_record_without_the_sets_that_were_cut_from_is_no_turn(tmp_path: Path) -> None:
    async def scene(stage: Bench) -> None:
        with pytest.raises(CaptureError, match="no sampling mask"):
            await stage.answer(ask(max_tokens=4, top_p=0.5))
        assert stage.conversation.turns == []

    play(fake_engine(), scene, tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="abc", min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
)
def test_a_streamed_reply_is_the_whole_one(text: str, stops: list[str]) -> None:
    engine = fake_engine()
    tokens = [*ids_of(text), template().end_id]
    engine.script(tokens, tokens)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    end = min(ends, default=None)

    async def scene(stage: Bench) -> None:
        answer = await stage.answer(ask(max_tokens=20, stops=tuple(stops)))
        options: dict[str, Json] = {"stop": list(stops)} if stops else {}
        events = await stage.stream(max_tokens=20, **options)
        one, two = stage.conversation.turns
        assert one.completion_ids.tolist() == two.completion_ids.tolist() == tokens[:end]
        assert output(events) == answer.replies[0].message.content
        assert (answer.replies[0].finish_reason is FinishReason.STOP_TEXT) is (end is not None)

    play(engine, scene)
