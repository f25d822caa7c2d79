"""One model call in any API protocol: from the parsed request to the recorded answer, whole or streamed.

    answered before? ─▶ prompt ─▶ room in the context ─▶ ReplySampler ─▶ Recorder ─▶ conversation ─▶ Answer
                                                         permit, engine   Turn

Owns the order of these steps, and how a completion becomes a reply and a turn. Conversations, admission and routing are
separate objects. Knows no HTTP, no keys and no API protocol.

A reply that only the model can end is fetched whole, which is cheapest. A reply that a stop string or the first tool
call may end, or that is streamed to the caller, arrives in chunks; tokens after its end are discarded.

A turn is checked before it is recorded, and its large parts (routes, sampling mask) are written to a file first. If an
engine's record is missing or inconsistent, the engine is at fault, not the model: the rollout fails as infrastructure,
is retried and is never grouped.

A caller that disconnects cancels the call: until the turn is recorded, the call leaves no trace.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from etude.aio import gather_or_cancel
from etude.clock import unix_s
from etude.errors import CaptureError, EngineUnavailable, VersionPending
from etude.gateway.api.calls import MODEL, Answer, ApiError, Call, EventEncoder, FinishReason, Reply, new_id
from etude.gateway.capture.conversations import Conversation, Prompt, SessionFull
from etude.gateway.capture.live import LiveRecorder
from etude.gateway.request_log import RequestRecord
from etude.gateway.routing.admission import PRIORITIES, AdmissionQueue, TrafficClass
from etude.gateway.routing.arms import CallArm
from etude.gateway.routing.pool import CallOptions, EnginePool
from etude.gateway.routing.shadow import Shadow
from etude.ledger.payloads import Payloads
from etude.protocols import Clock, Completion, SamplingParams, TokenChunk, turn_of
from etude.tokens.messages import (
    CallDelta,
    ChatFormat,
    ChatMessage,
    Delta,
    ReplyReader,
    TextDelta,
    ThinkingDelta,
    UnreadKwargs,
)
from etude.types import Finish, RouteSpace, SamplingMask, TokenIds, Turn, TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a model call, and the caller's conditions."""

    conversation: Conversation
    traffic: TrafficClass
    deadline: float
    """Deadline of the call, on the gateway's clock."""
    account: str = ""
    """The key whose share of the engines the call uses."""
    request_id: str = ""
    """Id that identifies a retry of this call; empty for none."""
    retried: bool = False
    """True if the caller marks this call as a retry without naming the earlier request."""
    min_version: int | None = None
    """Oldest weight version that may answer."""
    wait_for_version: bool = False
    """Wait while no engine serves ``min_version``, instead of failing at once."""
    kind: TurnKind = TurnKind.ACT
    """The kind of the recorded turn."""
    arm: CallArm | None = None
    """The released weights that may answer a user; ``None``: any weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A call that is ready to be sent to the engines."""

    call: Call
    caller: Caller
    prompt: Prompt
    params: SamplingParams
    record: RequestRecord
    """Counts the call's tokens as they arrive, so that tokens of a call whose caller disconnects are counted too."""

    @property
    def session(self) -> str:
        """The session's id: all calls of a session go to one engine, which has their common prefix cached."""
        return self.caller.conversation.session_id

    @property
    def ends_early(self) -> bool:
        """True if something other than the model may end the reply."""
        return bool(self.call.sampling.stops) or self.call.single_call

    @property
    def has_payload(self) -> bool:
        """True if the engine's record has more than tokens. The rest arrives with the last token, so that token is
        awaited.
        """
        return self.params.want_routes or self.params.truncates

    def params_of(self, index: int) -> SamplingParams:
        """The parameters of one reply. Its seed is derived from the caller's, so that the replies differ."""
        seed = self.params.seed
        return self.params if seed is None or index == 0 else replace(self.params, seed=seed + index)


@final
class CallService:
    """Answers calls. ``max_length`` is the engines' limit on prompt and completion, in tokens; ``live`` records live
    sessions, if the gateway has any.
    """

    def __init__(self, sampler: "ReplySampler", *, max_length: int, live: LiveRecorder | None = None) -> None:
        self._sampler = sampler
        self._max_length = max_length
        self._live = live

    def count(self, call: Call, conversation: Conversation) -> int:
        """The number of prompt tokens of a call. Raises :class:`~etude.gateway.api.calls.ApiError`."""
        return len(_prompt(conversation, call).token_ids)

    async def answer(self, call: Call, caller: Caller, record: RequestRecord) -> Answer:
        """The recorded answer; its tokens are counted in ``record``.

        Raises :class:`~etude.gateway.api.calls.ApiError` and the errors of conversation, admission, pool and recorder.
        """
        answer = _earlier_answer(call, caller)
        if answer is None:
            request = self._request(call, caller, record)
            replies = await self._sampler.sample(request)
            answer = self._record(request, replies, new_id(), int(unix_s()))
        await self._keep(caller, answer)
        _note(answer, record)
        return answer

    async def stream(
        self, call: Call, events: EventEncoder, caller: Caller, record: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        """The answer as encoded events. The first events come with the first tokens, so an earlier error precedes all
        events.

        The final events come once the answer is recorded. Raises like :meth:`answer`; closing the iterator cancels the
        call.
        """
        earlier = _earlier_answer(call, caller)
        if earlier is not None:
            await self._keep(caller, earlier)
            _note(earlier, record)
            yield _replayed(earlier, events)
            return
        request, answer_id, created = self._request(call, caller, record), new_id(), int(unix_s())
        replies: dict[int, Reply] = {}
        opening = events.opening(answer_id, created)
        async with aclosing(self._sampler.stream(request)) as parts:
            async for index, part in parts:
                if isinstance(part, Reply):
                    replies[index] = part
                    continue
                if not record.versions and len(part.chunk.versions):
                    record.versions = (int(part.chunk.versions[0]),)
                data, opening = opening + events.delta(index, part.deltas, part.chunk), b""
                if data:
                    yield data
        ordered = [replies[index] for index in sorted(replies)]
        answer = self._record(request, ordered, answer_id, created)
        await self._keep(caller, answer)
        _note(answer, record)
        if answer.answer_id != answer_id:
            raise ApiError(409, "answered_meanwhile", "another attempt of this request was answered: ask for it again")
        yield events.closing(answer)

    def _request(self, call: Call, caller: Caller, record: RequestRecord) -> GenerationRequest:
        prompt = _prompt(caller.conversation, call)
        sampling, read = call.sampling, len(prompt.token_ids)
        room = self._max_length - read
        max_tokens = max(room, 1) if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room:
            raise ApiError(
                400,
                "context_length_exceeded",
                # OpenAI's wording: some clients recognise a full context by this text, not by the code.
                f"This model's maximum context length is {self._max_length} tokens: {read} prompt tokens and "
                f"{max_tokens} to sample exceed it",
                param=_param(call),
            )
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_ids=self._sampler.chat.stop_ids,
            seed=sampling.seed,
            priority=PRIORITIES[caller.traffic],
            adapter=self._adapter(call, caller),
        )
        return GenerationRequest(
            call=call, caller=caller, prompt=prompt, params=self._sampler.recorder.params(params), record=record
        )

    def _adapter(self, call: Call, caller: Caller) -> str:
        """The adapter that the model name ``policy:NAME`` selects; empty for any other name.

        Calls that are trained on are sampled with the run's own weights: there, an adapter's name would be wrong.
        """
        policy, _, adapter = call.model.partition(":")
        if policy != MODEL or not adapter:
            return ""
        if caller.traffic is TrafficClass.ROLLOUT or self._live is not None:
            raise ApiError(
                400, "adapter_not_learnt", f"{call.model!r}: this session is learnt from, by {MODEL!r} alone"
            )
        return adapter

    async def _keep(self, caller: Caller, answer: Answer) -> None:
        """Wait until the answer is on disk, if its session is recorded. An answer that is repeated waits too, as the
        first write may still be in progress.
        """
        if self._live is not None:
            await self._live.keep(caller.conversation, answer)

    def _record(self, request: GenerationRequest, replies: Sequence[Reply], answer_id: str, created: int) -> Answer:
        answer = Answer(
            answer_id=answer_id,
            created=created,
            model=request.call.model,
            replies=tuple(replies),
            reused_tokens=request.prompt.reused,
        )
        return request.caller.conversation.record(request.call, answer, request.caller.request_id)


def _earlier_answer(call: Call, caller: Caller) -> Answer | None:
    """The answer that this request got before; ``None`` for a new request.

    A repeated request is recognised by its id, by the order of calls in a forked session, or because the caller says
    so. Raises :class:`~etude.gateway.api.calls.ApiError` if a forked session's next call differs from the recorded one.
    """
    if caller.request_id and (answer := caller.conversation.answered(caller.request_id, call)) is not None:
        return answer
    try:
        replayed = caller.conversation.replayed(call, caller.request_id)
    except ValueError as error:
        raise ApiError(409, "another_call", str(error)) from error
    if replayed is not None or caller.request_id:
        return replayed
    return caller.conversation.last_answer(call) if caller.retried else None


def _prompt(conversation: Conversation, call: Call) -> Prompt:
    try:
        return conversation.prompt(call)
    except SessionFull as error:
        raise ApiError(400, "session_full", str(error)) from error
    except UnreadKwargs as error:
        raise ApiError(400, "invalid_request", str(error), param="chat_template_kwargs") from error
    except ValueError as error:
        raise ApiError(400, "invalid_request", str(error), param=_param(call)) from error


def _param(call: Call) -> str:
    return "messages" if call.prompt is None else "prompt"


def _note(answer: Answer, record: RequestRecord) -> None:
    record.prompt_tokens = answer.prompt_tokens
    record.completion_tokens = answer.completion_tokens
    record.reused_tokens = answer.reused_tokens
    ends = (reply.turn.versions[edge] for reply in answer.replies for edge in (0, -1) if len(reply.turn.versions))
    record.versions = tuple(sorted({int(version) for version in ends}))


def _replayed(answer: Answer, events: EventEncoder) -> bytes:
    """The events of an answer that already exists."""
    parts = [events.opening(answer.answer_id, answer.created)]
    for index, reply in enumerate(answer.replies):
        turn = reply.turn
        chunk = TokenChunk(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
        parts.append(events.delta(index, _deltas(reply.message), chunk))
    return b"".join([*parts, events.closing(answer)])


def _deltas(message: ChatMessage) -> list[Delta]:
    deltas: list[Delta] = []
    if message.thinking:
        deltas.append(ThinkingDelta(message.thinking))
    if message.content:
        deltas.append(TextDelta(message.content))
    for index, call in enumerate(message.tool_calls):
        deltas.append(CallDelta(index, call_id=call.call_id, name=call.name))
        deltas.append(CallDelta(index, arguments=call.arguments))
    return deltas


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """A streamed part of a reply: its tokens, text and tool calls."""

    deltas: Sequence[Delta]
    chunk: TokenChunk


EMPTY_CHUNK = TokenChunk(
    token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32)
)
"""The chunk for text that was held back: its tokens were sent earlier."""


@final
class ReplySampler:
    """Samples the replies of generation requests."""

    def __init__(
        self,
        chat: ChatFormat,
        pool: EnginePool,
        admission: AdmissionQueue,
        recorder: "Recorder",
        clock: Clock,
        shadow: Shadow | None = None,
    ) -> None:
        """``shadow`` samples some users' prompts again, for comparison only."""
        self.chat = chat
        self.recorder = recorder
        self._pool = pool
        self._admission = admission
        self._clock = clock
        self._shadow = shadow

    async def sample(self, request: GenerationRequest) -> list[Reply]:
        """All replies that the call requests, in order, each complete."""
        if request.call.sampling.count == 1:
            return [await self._reply(request, 0)]
        return await gather_or_cancel(self._reply(request, index) for index in range(request.call.sampling.count))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, ReplyDelta | Reply], None]:
        """The parts of all replies with their numbers, as they arrive; the last part of each is the whole reply."""
        if request.call.sampling.count == 1:
            async with aclosing(self._parts(request, 0)) as parts:
                async for part in parts:
                    yield 0, part
            return
        streams = [self._parts(request, index) for index in range(request.call.sampling.count)]
        awaited = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
        try:
            while awaited:
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part, index = task.result(), awaited.pop(task)
                    yield index, part
                    if not isinstance(part, Reply):
                        awaited[asyncio.create_task(_next(streams[index]))] = index
        finally:
            for task in awaited:
                task.cancel()
            await asyncio.gather(*awaited, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

    async def _reply(self, request: GenerationRequest, index: int) -> Reply:
        """One complete reply."""
        if request.ends_early:
            async with aclosing(self._parts(request, index)) as parts:
                async for part in parts:
                    if isinstance(part, Reply):
                        return part
            raise AssertionError("the last part is the reply")
        async with self._permit(request):
            with self._counting_prompt(request):
                completion = await self._pool.generate(
                    request.prompt.token_ids,
                    request.params_of(index),
                    session=request.session,
                    options=self._options(request),
                )
        self._count_sampled(request, len(completion.token_ids))
        reader = self._reader(request)
        reader.feed(completion.token_ids.tolist())
        reader.finish()
        return await self._finished(request, index, reader, completion)

    def _permit(self, request: GenerationRequest) -> AbstractAsyncContextManager[None]:
        return self._admission.permit(request.caller.traffic, request.caller.deadline, request.caller.account)

    async def _parts(self, request: GenerationRequest, index: int) -> AsyncGenerator[ReplyDelta | Reply, None]:
        """One reply in parts as it is sampled, then the complete reply."""
        reader, chunks, sampled, whole = self._reader(request), list[TokenChunk](), 0, None
        async with (
            self._permit(request),
            aclosing(self._chunks(request, index)) as stream,
        ):
            async for chunk in stream:
                whole = chunk.completion
                self._count_sampled(request, len(chunk.token_ids))
                if reader.stopped_after is None:
                    deltas = reader.feed(chunk.token_ids.tolist())
                    chunks.append(_until(chunk, reader.stopped_after, sampled))
                    sampled += len(chunk.token_ids)
                    yield ReplyDelta(deltas=deltas, chunk=chunks[-1])
                if reader.stopped_after is not None and not request.has_payload:
                    break
        rest = reader.finish()
        if rest:
            yield ReplyDelta(deltas=rest, chunk=EMPTY_CHUNK)
        yield await self._finished(request, index, reader, whole or _joined(chunks))

    async def _chunks(self, request: GenerationRequest, index: int) -> AsyncGenerator[TokenChunk, None]:
        """The chunks that engines sample."""
        with self._counting_prompt(request):
            async with aclosing(
                self._pool.stream(
                    request.prompt.token_ids,
                    request.params_of(index),
                    session=request.session,
                    options=self._options(request),
                )
            ) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _finished(
        self, request: GenerationRequest, index: int, reader: ReplyReader, completion: Completion
    ) -> Reply:
        """The reply, after its checks, with its payload written."""
        end = reader.stopped_after
        if end is not None and end < len(completion.token_ids):
            completion = truncated(completion, end)
        message = reader.message()
        turn = await self.recorder.turn(
            request.prompt.token_ids,
            request.params_of(index),
            completion,
            request.caller.conversation.session_id,
            reused=request.prompt.reused,
            kind=request.caller.kind,
        )
        if self._shadow is not None and request.caller.arm is not None:
            began = request.record.dispatched
            seconds = 0.0 if began is None else self._clock.now() - began
            self._shadow.offer(request.prompt.token_ids, request.params_of(index), completion, request.session, seconds)
        return Reply(
            message=message,
            finish_reason=_finish_reason(message, reader, completion.finish),
            stop_text=reader.stop_text,
            turn=turn,
        )

    def _options(self, request: GenerationRequest) -> CallOptions:
        """The routing options of a call that has just got its permit."""
        deadline_s = request.caller.deadline - self._clock.now()
        return CallOptions(
            min_version=request.caller.min_version,
            wait_for_version=request.caller.wait_for_version,
            arm=request.caller.arm,
            deadline_s=deadline_s,
            dispatched=request.record.note_dispatched,
        )

    @contextmanager
    def _counting_prompt(self, request: GenerationRequest) -> Iterator[None]:
        """Count the prompt of a call that has just got its permit as read, unless the engines reject the call."""
        request.record.prompt_tokens = len(request.prompt.token_ids)
        request.record.reused_tokens = request.prompt.reused
        try:
            yield
        except ValueError as error:
            _reset_prompt_counts(request)
            raise ApiError(400, "invalid_request", f"the engine rejected the request: {error}") from error
        except (EngineUnavailable, VersionPending):
            if self._clock.now() < request.caller.deadline:
                _reset_prompt_counts(request)
            raise

    def _count_sampled(self, request: GenerationRequest, tokens: int) -> None:
        """Count tokens that have arrived."""
        request.record.first_token = request.record.first_token or self._clock.now()
        request.record.completion_tokens += tokens

    def _reader(self, request: GenerationRequest) -> ReplyReader:
        call = request.call
        return self.chat.reader(
            call.tools,
            prompt_ids=request.prompt.token_ids,
            stops=call.sampling.stops,
            single_call=call.single_call,
        )


async def _next(parts: AsyncGenerator[ReplyDelta | Reply, None]) -> ReplyDelta | Reply:
    return await anext(parts)


def _finish_reason(message: ChatMessage, reader: ReplyReader, finish: Finish) -> FinishReason:
    if reader.stop_text is not None:
        return FinishReason.STOP_TEXT
    if finish is Finish.LENGTH and reader.stopped_after is None:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP


def _reset_prompt_counts(request: GenerationRequest) -> None:
    """Set the counts of read and reused prompt tokens to 0 for a call that the engines rejected, unless part of a reply
    has arrived: then an engine has read the prompt.
    """
    if not request.record.completion_tokens:
        request.record.prompt_tokens = request.record.reused_tokens = 0


def _until(chunk: TokenChunk, end: int | None, before: int) -> TokenChunk:
    """The part of a chunk that belongs to a reply of ``end`` tokens, ``before`` of which came earlier."""
    if end is None or before + len(chunk.token_ids) <= end:
        return chunk
    tokens = end - before
    return replace(
        chunk, token_ids=chunk.token_ids[:tokens], logprobs=chunk.logprobs[:tokens], versions=chunk.versions[:tokens]
    )


def _joined(chunks: Sequence[TokenChunk]) -> Completion:
    """The completion made of a stream's chunks, for a reply that the gateway ended before the engine did.

    Its finish is ``LENGTH``; it has no routes and no sampling mask: a call that records these reads the stream to its
    end.
    """
    return Completion(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        finish=Finish.LENGTH,
    )


class Recorder:
    """Records completions as turns, and writes their payloads.

    ``space`` describes the model's routes if a trainer replays them; ``None``: no routes are requested. Without
    ``payloads`` no trainer uses the turns, so sampling masks are not recorded either. With ``sampled_only`` the routes
    of prompts are checked but not stored, as no trainer replays them.
    """

    def __init__(
        self, payloads: Payloads | None, space: RouteSpace | None = None, *, sampled_only: bool = False
    ) -> None:
        if payloads is None and space is not None:
            raise ValueError("routes are requested but there is no folder for them: give one for payloads")
        self._payloads = payloads
        self._space = space
        self._sampled_only = sampled_only

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same parameters, with a request for routes if routes are recorded."""
        has_routes = self._space is not None
        return params if params.want_routes is has_routes else replace(params, want_routes=has_routes)

    async def turn(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        completion: Completion,
        session_id: str,
        reused: int = 0,
        kind: TurnKind = TurnKind.ACT,
    ) -> Turn:
        """One turn, with its routes and sampling mask, if any, on disk.

        The first ``reused`` prompt tokens are an earlier turn of the session, prompt and completion. Its routes, which
        cover all of these tokens but the last, are not written again. Raises :class:`~etude.errors.CaptureError` for a
        record that is inconsistent.
        """
        routes = completion.routes if self._space is not None else None
        sampling_mask = completion.sampling_mask if self._payloads is not None else None
        if routes is not completion.routes or sampling_mask is not completion.sampling_mask:
            completion = replace(completion, routes=routes, sampling_mask=sampling_mask)
        if routes is None and sampling_mask is None:
            return self._checked(prompt_ids, params, completion, kind)
        # Checking megabytes of routes would block the event loop for too long.
        stored = max(reused - 1, 0)
        turn = partial(self._checked, prompt_ids, params, completion, kind)
        return await asyncio.to_thread(self._stored, turn, session_id, stored)

    def _stored(self, turn: Callable[[], Turn], session_id: str, stored: int) -> Turn:
        assert self._payloads is not None, "only a recorder with a folder requests them"
        return self._payloads.store(turn(), session_id, stored, sampled_only=self._sampled_only)

    def _checked(self, prompt_ids: TokenIds, params: SamplingParams, completion: Completion, kind: TurnKind) -> Turn:
        try:
            turn = turn_of(prompt_ids, params, completion, kind)
            self._check(turn, params)
        except ValueError as error:
            raise CaptureError(f"the engine's record of a turn is inconsistent: {error}") from error
        return turn

    def _check(self, turn: Turn, params: SamplingParams) -> None:
        if self._space is not None:
            if turn.routes is None:
                raise ValueError("it has no routes although they were requested; can the engine return them at all?")
            self._space.check(turn.routes, turn.length - 1)
        if params.truncates and turn.sampling_mask is None and self._payloads is not None:
            raise ValueError(
                f"it has no sampling mask although top_p={params.top_p:g} and top_k={params.top_k} truncate"
            )


def truncated(completion: Completion, tokens: int) -> Completion:
    """The first ``tokens`` sampled tokens of a completion, with their records.

    A reply that a caller's stop string ended has no stop token from the model: its finish is ``LENGTH``. Raises
    ``ValueError`` unless 0 ≤ ``tokens`` ≤ the number of sampled tokens.
    """
    lost = len(completion.token_ids) - tokens
    if not 0 <= lost <= len(completion.token_ids):
        raise ValueError(f"a completion of {len(completion.token_ids)} tokens cannot be truncated to {tokens}")
    if not lost:
        return completion
    routes, sampling_mask = completion.routes, completion.sampling_mask
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        versions=completion.versions[:tokens],
        finish=Finish.LENGTH,
        routes=None if routes is None else routes[: len(routes) - lost],  # one row per token except the last
        sampling_mask=None if sampling_mask is None else _first_sets(sampling_mask, tokens),
    )


def _first_sets(sampling_mask: SamplingMask, tokens: int) -> SamplingMask:
    offsets = sampling_mask.offsets[: tokens + 1]
    return SamplingMask(offsets=offsets, token_ids=sampling_mask.token_ids[: offsets[-1]])
