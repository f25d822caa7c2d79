"""One model call from question to answer, in any dialect, whole or as a stream.

    known answer? ─▶ prompt ─▶ room in the context ─▶ replies ─▶ conversation ─▶ Answer

Owns the order of these. Owns no decision: conversations, admission, routing and what ends a reply are objects of their
own. Knows no HTTP, no key and no dialect.

A caller that hangs up cancels the call: up to the moment at which the turn is recorded, nothing of it remains.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import final

from etude.clock import unix_s
from etude.gateway.api.calls import Answer, Call, Events, Refusal, Reply
from etude.gateway.capture.conversations import Conversation, Prompt
from etude.gateway.capture.generation_request import Caller, Job
from etude.gateway.capture.replies import Parts, Replies
from etude.gateway.capture.token_buffer import SessionFull
from etude.gateway.http.request_ids import Serials
from etude.gateway.http.request_log import Visit
from etude.gateway.routing.admission import PRIORITIES
from etude.protocols import SamplingParams, TokenChunk
from etude.tokens.messages import CallDelta, Delta, Message, TextDelta, ThinkingDelta, UnreadKwargs


@final
class Service:
    """Answers calls. ``max_length`` is the engines' bound on prompt and completion together, in tokens."""

    def __init__(self, parts: Parts, *, max_length: int) -> None:
        self._stop_ids = parts.chat.stop_ids
        self._recorder = parts.recorder
        self._replies = Replies(parts)
        self._max_length = max_length
        self._serials = Serials()

    def count(self, call: Call, conversation: Conversation) -> int:
        """How many tokens the prompt of a call has. Raises :class:`~etude.gateway.api.calls.Refusal`."""
        return len(_prompt(conversation, call).token_ids)

    async def answer(self, call: Call, caller: Caller, visit: Visit) -> Answer:
        """The recorded answer; what it took is noted in ``visit``.

        Raises :class:`~etude.gateway.api.calls.Refusal` and what conversation, line, pool and recorder raise.
        """
        answer = _known(call, caller)
        if answer is None:
            job = self._job(call, caller, visit)
            replies = await self._replies.whole(job)
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
        async with aclosing(self._replies.spoken(job)) as parts:
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

    def _job(self, call: Call, caller: Caller, visit: Visit) -> Job:
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
            stop_ids=self._stop_ids,
            seed=sampling.seed,
            priority=PRIORITIES[caller.traffic],
        )
        return Job(call=call, caller=caller, prompt=prompt, params=self._recorder.params(params), visit=visit)

    def _record(self, job: Job, replies: Sequence[Reply], answer_id: str, created: int) -> Answer:
        answer = Answer(
            answer_id=answer_id,
            created=created,
            model=job.call.model,
            replies=tuple(replies),
            reused_tokens=job.prompt.reused,
        )
        return job.caller.conversation.record(job.call, answer, job.caller.request_id)


def _known(call: Call, caller: Caller) -> Answer | None:
    """The answer that this request had before; ``None`` for a new one.

    It is the same request by its id, by the order of calls in a forked session, or by its caller's word. Raises
    :class:`~etude.gateway.api.calls.Refusal` where the caller of a forked session asks something else.
    """
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
    except UnreadKwargs as error:
        raise Refusal(400, "invalid_request", str(error), param="chat_template_kwargs") from error
    except ValueError as error:
        raise Refusal(400, "invalid_request", str(error), param=_param(call)) from error


def _param(call: Call) -> str:
    return "messages" if call.prompt is None else "prompt"


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
        piece = TokenChunk(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
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
