"""One model call from question to answer, in any dialect, whole or as a stream.

    known answer? ─▶ prompt ─▶ room in the context ─▶ a place ─▶ engines ─▶ reader ─▶ recorder ─▶ conversation ─▶ Answer

Owns the order of these and what ends a reply. Owns no decision: conversations, admission, routing and reading are
objects of their own. Knows no HTTP, no key and no dialect.

A reply that nothing but the model can end is fetched whole, which costs least. One that a stop string or its first
tool call may end, or that somebody reads along, comes in pieces; what was sampled behind its end is thrown away.

A caller that hangs up cancels the call: up to the moment at which the turn is recorded, nothing of it remains.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from etude.clock import unix_s
from etude.errors import EngineUnavailable, VersionPending
from etude.gateway.access import Visit
from etude.gateway.admission import PRIORITIES, TrafficClass
from etude.gateway.calls import Answer, Call, Ending, Events, Refusal, Reply
from etude.gateway.conversations import Conversation, Prompt
from etude.gateway.line import Line
from etude.gateway.pool import EnginePool, Want
from etude.gateway.recorder import Recorder, cut
from etude.gateway.serials import Serials
from etude.gateway.tapes import SessionFull
from etude.protocols import Clock, Completion, Piece, SamplingParams
from etude.together import together
from etude.tokens.messages import CallDelta, ChatFormat, Delta, Message, ReplyReader, TextDelta, ThinkingDelta
from etude.types import Finish, TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and under which conditions."""

    conversation: Conversation
    traffic: TrafficClass
    deadline: float
    """When the call must be over, on the gateway's clock."""
    request_id: str = ""
    """By which a retry of this call is known; empty for none."""
    retried: bool = False
    """Whether the caller says that this is a retry, without saying of what."""
    min_version: int | None = None
    """Oldest weight version that may answer."""
    kind: TurnKind = TurnKind.ACT
    """What the call is recorded as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Some tokens of a reply, and what they add to it."""

    deltas: Sequence[Delta]
    piece: Piece


NOTHING = Piece(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32))
"""Goes with text that was held back: its tokens went before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A call that is ready for engines."""

    call: Call
    caller: Caller
    prompt: Prompt
    params: SamplingParams
    visit: Visit
    """Where it is noted what the call takes, as it takes it: a caller that hangs up has used up as much."""

    @property
    def session(self) -> str:
        """Calls of one session go to one engine, which has read what they begin with."""
        return self.caller.conversation.session_id

    @property
    def ends_early(self) -> bool:
        """Whether something but the model may end the reply."""
        return bool(self.call.sampling.stops) or self.call.single_call

    @property
    def bulky(self) -> bool:
        """Whether the engine's record holds more than tokens: it comes at the very end only, so that is waited for."""
        return self.params.want_routes or self.params.cuts

    def params_of(self, index: int) -> SamplingParams:
        """Of one reply: with the caller's seed each reply has another one, or all would be the same."""
        seed = self.params.seed
        return self.params if seed is None or index == 0 else replace(self.params, seed=seed + index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a service is made of."""

    chat: ChatFormat
    pool: EnginePool
    line: Line
    recorder: Recorder
    clock: Clock


@final
class Service:
    """Answers calls. ``max_length`` is the engines' bound on prompt and completion together, in tokens."""

    def __init__(self, parts: Parts, *, max_length: int) -> None:
        self._chat = parts.chat
        self._pool = parts.pool
        self._line = parts.line
        self._recorder = parts.recorder
        self._clock = parts.clock
        self._max_length = max_length
        self._serials = Serials()

    def count(self, call: Call, conversation: Conversation) -> int:
        """How many tokens the prompt of a call has. Raises :class:`~etude.gateway.calls.Refusal`."""
        return len(_prompt(conversation, call).token_ids)

    async def answer(self, call: Call, caller: Caller, visit: Visit) -> Answer:
        """The recorded answer; what it took is noted in ``visit``.

        Raises :class:`~etude.gateway.calls.Refusal` and what conversation, line, pool and recorder raise.
        """
        answer = _known(call, caller)
        if answer is None:
            job = self._job(call, caller, visit)
            if call.sampling.count == 1:
                replies = [await self._reply(job, 0)]
            else:
                replies = await together(self._reply(job, index) for index in range(call.sampling.count))
            answer = self._record(job, replies, self._serials.draw(), int(unix_s()))
        _note(answer, visit)
        return answer

    async def stream(self, call: Call, events: Events, caller: Caller, visit: Visit) -> AsyncGenerator[bytes, None]:
        """The answer as encoded events: the first ones with the first tokens, so that a refusal comes before any.

        The closing comes once the answer is recorded. Raises like :meth:`answer`; closing the iterator ends the call.
        """
        known = _known(call, caller)
        if known is not None:
            _note(known, visit)
            yield _replayed(known, events)
            return
        job, answer_id, created = self._job(call, caller, visit), self._serials.draw(), int(unix_s())
        replies: dict[int, Reply] = {}
        opening = events.opening(answer_id, created)
        async with aclosing(self._spoken(job)) as parts:
            async for index, part in parts:
                if isinstance(part, Reply):
                    replies[index] = part
                    continue
                if not visit.versions and len(part.piece.versions):
                    visit.versions = (int(part.piece.versions[0]),)
                data, opening = opening + events.delta(index, part.deltas, part.piece), b""
                if data:
                    yield data
        ordered = [replies[index] for index in sorted(replies)]
        answer = self._record(job, ordered, answer_id, created)
        _note(answer, visit)
        if answer.answer_id != answer_id:
            raise Refusal(409, "answered_meanwhile", "another attempt of this request was answered: ask for it again")
        yield events.closing(answer)

    def _job(self, call: Call, caller: Caller, visit: Visit) -> _Job:
        prompt = _prompt(caller.conversation, call)
        sampling, read = call.sampling, len(prompt.token_ids)
        room = self._max_length - read
        wanted = max(room, 1) if sampling.max_tokens is None else sampling.max_tokens
        if wanted > room:
            raise Refusal(
                400,
                "context_length_exceeded",
                # OpenAI's words: some clients know a full context by them, not by the code.
                f"This model's maximum context length is {self._max_length} tokens: {read} prompt tokens and {wanted} "
                f"to sample exceed it",
                param=_param(call),
            )
        params = SamplingParams(
            max_tokens=wanted,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_ids=self._chat.stop_ids,
            seed=sampling.seed,
            priority=PRIORITIES[caller.traffic],
        )
        return _Job(call=call, caller=caller, prompt=prompt, params=self._recorder.params(params), visit=visit)

    def _want(self, job: _Job) -> Want:
        """What an engine must have and do for a call that has its place now."""
        deadline_s = job.caller.deadline - self._clock.now()
        return Want(
            min_version=job.caller.min_version, deadline_s=deadline_s, taken=partial(setattr, job.visit, "taken")
        )

    @contextmanager
    def _charged(self, job: _Job) -> Iterator[None]:
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

    def _sampled(self, job: _Job, tokens: int) -> None:
        """Some tokens have come."""
        job.visit.first_token = job.visit.first_token or self._clock.now()
        job.visit.completion_tokens += tokens

    async def _reply(self, job: _Job, index: int) -> Reply:
        """One reply that nobody reads along."""
        if job.ends_early:
            async with aclosing(self._parts(job, index)) as parts:
                async for part in parts:
                    if isinstance(part, Reply):
                        return part
            raise AssertionError("the last part is the reply")
        async with self._line.place(job.caller.traffic, job.caller.deadline):
            with self._charged(job):
                completion = await self._pool.generate(
                    job.prompt.token_ids, job.params_of(index), session=job.session, want=self._want(job)
                )
        self._sampled(job, len(completion.token_ids))
        reader = self._reader(job.call)
        reader.feed(completion.token_ids.tolist())
        reader.finish()
        return await self._finished(job, index, reader, completion)

    async def _parts(self, job: _Job, index: int) -> AsyncGenerator[Spoken | Reply, None]:
        """One reply while it is sampled, then as a whole."""
        reader, said, sampled, whole = self._reader(job.call), list[Piece](), 0, None
        async with (
            self._line.place(job.caller.traffic, job.caller.deadline),
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

    async def _pieces(self, job: _Job, index: int) -> AsyncGenerator[Piece, None]:
        """What the engines sample."""
        with self._charged(job):
            async with aclosing(
                self._pool.stream(job.prompt.token_ids, job.params_of(index), session=job.session, want=self._want(job))
            ) as pieces:
                async for piece in pieces:
                    yield piece

    async def _finished(self, job: _Job, index: int, reader: ReplyReader, completion: Completion) -> Reply:
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

    async def _spoken(self, job: _Job) -> AsyncGenerator[tuple[int, Spoken | Reply], None]:
        """The parts of all replies, as they come."""
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

    def _reader(self, call: Call) -> ReplyReader:
        return self._chat.reader(call.tools, stops=call.sampling.stops, single_call=call.single_call)

    def _record(self, job: _Job, replies: Sequence[Reply], answer_id: str, created: int) -> Answer:
        answer = Answer(
            answer_id=answer_id,
            created=created,
            model=job.call.model,
            replies=tuple(replies),
            reused_tokens=job.prompt.reused,
        )
        return job.caller.conversation.record(job.call, answer, job.caller.request_id)


def _known(call: Call, caller: Caller) -> Answer | None:
    """What this very request was answered before: its caller says that it asks again, or its session was forked."""
    if caller.request_id and (known := caller.conversation.answered(caller.request_id, call)) is not None:
        return known
    try:
        replayed = caller.conversation.replayed(call, caller.request_id)
    except ValueError as error:
        raise Refusal(409, "another_call", str(error)) from error
    if replayed is not None or caller.request_id:
        return replayed
    return caller.conversation.last_answer(call) if caller.retried else None


def _prompt(conversation: Conversation, call: Call) -> Prompt:
    try:
        return conversation.prompt(call)
    except SessionFull as error:
        raise Refusal(400, "session_full", str(error)) from error
    except ValueError as error:
        raise Refusal(400, "invalid_request", str(error), param=_param(call)) from error


def _param(call: Call) -> str:
    return "messages" if call.prompt is None else "prompt"


async def _next(parts: AsyncGenerator[Spoken | Reply, None]) -> Spoken | Reply:
    return await anext(parts)


def _ending(message: Message, reader: ReplyReader, finish: Finish) -> Ending:
    if reader.stop_text is not None:
        return Ending.STOP_TEXT
    if finish is Finish.LENGTH and reader.stopped_after is None:
        return Ending.LENGTH
    return Ending.TOOL_CALLS if message.tool_calls else Ending.STOP


def _turned_away(job: _Job) -> None:
    """Engines did not take the call, unless some of an answer has come: then its prompt was read."""
    if not job.visit.completion_tokens:
        job.visit.prompt_tokens = job.visit.reused_tokens = 0


def _until(piece: Piece, end: int | None, before: int) -> Piece:
    """The part of a piece that belongs to a reply of ``end`` tokens, of which ``before`` came earlier."""
    if end is None or before + len(piece.token_ids) <= end:
        return piece
    kept = end - before
    return replace(
        piece, token_ids=piece.token_ids[:kept], logprobs=piece.logprobs[:kept], versions=piece.versions[:kept]
    )


def _joined(pieces: Sequence[Piece]) -> Completion:
    """What was sampled up to an end that the engine did not know of."""
    return Completion(
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=np.concatenate([piece.versions for piece in pieces]),
        finish=Finish.LENGTH,
    )


def _note(answer: Answer, visit: Visit) -> None:
    visit.prompt_tokens = answer.prompt_tokens
    visit.completion_tokens = answer.completion_tokens
    visit.reused_tokens = answer.reused_tokens
    ends = (reply.turn.versions[edge] for reply in answer.replies for edge in (0, -1) if len(reply.turn.versions))
    visit.versions = tuple(sorted({int(version) for version in ends}))


def _replayed(answer: Answer, events: Events) -> bytes:
    """The events of an answer that is there already."""
    parts = [events.opening(answer.answer_id, answer.created)]
    for index, reply in enumerate(answer.replies):
        turn = reply.turn
        piece = Piece(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
        parts.append(events.delta(index, _deltas(reply.message), piece))
    return b"".join([*parts, events.closing(answer)])


def _deltas(message: Message) -> list[Delta]:
    deltas: list[Delta] = []
    if message.thinking:
        deltas.append(ThinkingDelta(message.thinking))
    if message.content:
        deltas.append(TextDelta(message.content))
    for index, call in enumerate(message.tool_calls):
        deltas.append(CallDelta(index, call_id=call.call_id, name=call.name))
        deltas.append(CallDelta(index, arguments=call.arguments))
    return deltas
