"""The replies of one call: what engines sample, read as a message, checked and recorded as a turn.

A reply that nothing but the model can end is fetched whole, which costs least. One that a stop string or its first
tool call may end, or that somebody reads along, comes in pieces; what was sampled behind its end is thrown away.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from etude.aio import gather_or_cancel
from etude.errors import EngineUnavailable, VersionPending
from etude.gateway.api.calls import Ending, Refusal, Reply
from etude.gateway.capture.generation_request import Job
from etude.gateway.capture.recorder import Recorder, cut
from etude.gateway.routing.admission_queue import Line, Place
from etude.gateway.routing.pool import EnginePool, Want
from etude.protocols import Clock, Completion, TokenChunk
from etude.tokens.messages import ChatFormat, Delta, Message, ReplyReader
from etude.types import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What replies are made with."""

    chat: ChatFormat
    pool: EnginePool
    line: Line
    recorder: Recorder
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Some tokens of a reply, and what they add to it."""

    deltas: Sequence[Delta]
    piece: TokenChunk


NOTHING = TokenChunk(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32))
"""Goes with text that was held back: its tokens went before it."""


@final
class Replies:
    """Has the replies of jobs sampled."""

    def __init__(self, parts: Parts) -> None:
        self._chat = parts.chat
        self._pool = parts.pool
        self._line = parts.line
        self._recorder = parts.recorder
        self._clock = parts.clock

    async def whole(self, job: Job) -> list[Reply]:
        """All replies that the call asks for, in order, which nobody reads along."""
        if job.call.sampling.count == 1:
            return [await self._reply(job, 0)]
        return await gather_or_cancel(self._reply(job, index) for index in range(job.call.sampling.count))

    async def spoken(self, job: Job) -> AsyncGenerator[tuple[int, Spoken | Reply], None]:
        """The parts of all replies with their numbers, as they come; the last part of each is the reply itself."""
        if job.call.sampling.count == 1:
            async with aclosing(self._parts(job, 0)) as parts:
                async for part in parts:
                    yield 0, part
            return
        speakers = [self._parts(job, index) for index in range(job.call.sampling.count)]
        awaited = {asyncio.create_task(_next(speaker)): index for index, speaker in enumerate(speakers)}
        try:
            while awaited:
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part, index = task.result(), awaited.pop(task)
                    yield index, part
                    if not isinstance(part, Reply):
                        awaited[asyncio.create_task(_next(speakers[index]))] = index
        finally:
            for task in awaited:
                task.cancel()
            await asyncio.gather(*awaited, return_exceptions=True)
            for speaker in speakers:
                await speaker.aclose()

    async def _reply(self, job: Job, index: int) -> Reply:
        """One reply that nobody reads along."""
        if job.ends_early:
            async with aclosing(self._parts(job, index)) as parts:
                async for part in parts:
                    if isinstance(part, Reply):
                        return part
            raise AssertionError("the last part is the reply")
        async with self._place(job):
            with self._charged(job):
                completion = await self._pool.generate(
                    job.prompt.token_ids, job.params_of(index), session=job.session, want=self._want(job)
                )
        self._sampled(job, len(completion.token_ids))
        reader = self._reader(job)
        reader.feed(completion.token_ids.tolist())
        reader.finish()
        return await self._finished(job, index, reader, completion)

    def _place(self, job: Job) -> Place:
        return self._line.place(job.caller.traffic, job.caller.deadline, job.caller.account)

    async def _parts(self, job: Job, index: int) -> AsyncGenerator[Spoken | Reply, None]:
        """One reply while it is sampled, then as a whole."""
        reader, said, sampled, whole = self._reader(job), list[TokenChunk](), 0, None
        async with (
            self._place(job),
            aclosing(self._pieces(job, index)) as pieces,
        ):
            async for piece in pieces:
                whole = piece.completion
                self._sampled(job, len(piece.token_ids))
                if reader.stopped_after is None:
                    deltas = reader.feed(piece.token_ids.tolist())
                    said.append(_until(piece, reader.stopped_after, sampled))
                    sampled += len(piece.token_ids)
                    yield Spoken(deltas=deltas, piece=said[-1])
                if reader.stopped_after is not None and not job.bulky:
                    break
        rest = reader.finish()
        if rest:
            yield Spoken(deltas=rest, piece=NOTHING)
        yield await self._finished(job, index, reader, whole or _joined(said))

    async def _pieces(self, job: Job, index: int) -> AsyncGenerator[TokenChunk, None]:
        """What the engines sample."""
        with self._charged(job):
            async with aclosing(
                self._pool.stream(job.prompt.token_ids, job.params_of(index), session=job.session, want=self._want(job))
            ) as pieces:
                async for piece in pieces:
                    yield piece

    async def _finished(self, job: Job, index: int, reader: ReplyReader, completion: Completion) -> Reply:
        """The reply, checked and with its payload stowed."""
        end = reader.stopped_after
        if end is not None and end < len(completion.token_ids):
            completion = cut(completion, end)
        message = reader.message()
        turn = await self._recorder.turn(
            job.prompt.token_ids,
            job.params_of(index),
            completion,
            job.caller.conversation.session_id,
            reused=job.prompt.reused,
        )
        ending = _ending(message, reader, completion.finish)
        kind = job.caller.kind
        return Reply(message=message, ending=ending, stop_text=reader.stop_text, turn=replace(turn, kind=kind))

    def _want(self, job: Job) -> Want:
        """What an engine must have and do for a call that has its place now."""
        deadline_s = job.caller.deadline - self._clock.now()
        return Want(
            min_version=job.caller.min_version, deadline_s=deadline_s, taken=partial(setattr, job.visit, "taken")
        )

    @contextmanager
    def _charged(self, job: Job) -> Iterator[None]:
        """What engines do for a call that has its place now: its prompt is theirs to read, unless they turn it away."""
        job.visit.prompt_tokens, job.visit.reused_tokens = len(job.prompt.token_ids), job.prompt.reused
        try:
            yield
        except ValueError as error:
            _turned_away(job)
            raise Refusal(400, "invalid_request", f"the engine refused: {error}") from error
        except (EngineUnavailable, VersionPending):
            if self._clock.now() < job.caller.deadline:
                _turned_away(job)
            raise

    def _sampled(self, job: Job, tokens: int) -> None:
        """Some tokens have come."""
        job.visit.first_token = job.visit.first_token or self._clock.now()
        job.visit.completion_tokens += tokens

    def _reader(self, job: Job) -> ReplyReader:
        call = job.call
        return self._chat.reader(
            call.tools,
            prompt_ids=job.prompt.token_ids,
            stops=call.sampling.stops,
            single_call=call.single_call,
        )


async def _next(parts: AsyncGenerator[Spoken | Reply, None]) -> Spoken | Reply:
    return await anext(parts)


def _ending(message: Message, reader: ReplyReader, finish: Finish) -> Ending:
    if reader.stop_text is not None:
        return Ending.STOP_TEXT
    if finish is Finish.LENGTH and reader.stopped_after is None:
        return Ending.LENGTH
    return Ending.TOOL_CALLS if message.tool_calls else Ending.STOP


def _turned_away(job: Job) -> None:
    """Engines did not take the call, unless some of an answer has come: then its prompt was read."""
    if not job.visit.completion_tokens:
        job.visit.prompt_tokens = job.visit.reused_tokens = 0


def _until(piece: TokenChunk, end: int | None, before: int) -> TokenChunk:
    """The part of a piece that belongs to a reply of ``end`` tokens, of which ``before`` came earlier."""
    if end is None or before + len(piece.token_ids) <= end:
        return piece
    kept = end - before
    return replace(
        piece, token_ids=piece.token_ids[:kept], logprobs=piece.logprobs[:kept], versions=piece.versions[:kept]
    )


def _joined(pieces: Sequence[TokenChunk]) -> Completion:
    """What was sampled up to an end that the engine did not know of."""
    return Completion(
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=np.concatenate([piece.versions for piece in pieces]),
        finish=Finish.LENGTH,
    )
