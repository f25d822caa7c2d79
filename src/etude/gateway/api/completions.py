"""OpenAI's completions, ``/v1/completions``: a raw prompt, as text or token ids, and its continuation.

Owns their format and the supported options; the rest is rejected by name. Pure. No chat template is applied to the
prompt, so this is the API for callers that manage tokens themselves: ids in, and with ``return_token_ids`` ids out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, ApiError, ApiProtocol, Call, FinishReason, Reply
from etude.gateway.api.fields import (
    JsonObject,
    any_of,
    array_schema,
    field_names,
    integer_schema,
    object_schema,
    read_object,
)
from etude.gateway.api.openai import (
    DONE,
    MAX_WHOLE,
    NEUTRAL,
    SAMPLING_SCHEMA,
    OutputOptions,
    error_body,
    event,
    failure_event,
    fingerprint,
    logprob,
    neutral_schema,
    read_model,
    read_output_options,
    read_sampling,
    token_name,
    usage,
)
from etude.protocols import TokenChunk
from etude.tokens.messages import Delta, TextDelta, ThinkingDelta
from etude.types import Floats, Ids, Json

COMPLETION_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType({**NEUTRAL, "best_of": (1,), "suffix": ("",)})
"""Fields of a body that are accepted only with values that have no effect."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_LOGPROBS = 1
"""Largest number of logprobs per token that a caller may request. Both 0 and 1 give those of the sampled tokens, which
are all that engines report: ``top_logprobs`` is null.
"""
MAX_TOKEN_ID = 2**31 - 1
"""The largest token id that is stored; the tokenizer, elsewhere, has its own limit."""


def parse(body: bytes) -> "CompletionRequest":
    """Parse a request body. Raises :class:`ApiError` naming the invalid field."""
    fields = read_object(body)
    fields.refuse_unknown(COMPLETION_FIELDS, COMPLETION_NEUTRAL)
    max_tokens = fields.integer("max_tokens", low=1, high=MAX_WHOLE)
    output = read_output_options(fields, logprobs=fields.integer("logprobs", low=0, high=MAX_LOGPROBS) is not None)
    call = Call(
        prompt=_read_prompt(fields),
        sampling=read_sampling(fields, DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens),
        stream=fields.flag("stream"),
        model=read_model(fields),
    )
    return CompletionRequest(call=call, output=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request to ``/v1/completions``."""

    call: Call
    output: OutputOptions

    def body(self, answer: Answer) -> bytes:
        """The answer as a ``text_completion``."""
        data = {
            **_head(answer.answer_id, answer.created, self.call.model),
            "system_fingerprint": fingerprint(reply.turn.versions for reply in answer.replies),
            "choices": [self._choice(index, reply) for index, reply in enumerate(answer.replies)],
            "usage": usage(answer),
        }
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)

    def events(self) -> "CompletionEventEncoder":
        """The answer as a stream of ``text_completion``."""
        return CompletionEventEncoder(self.call, self.output)

    def _choice(self, index: int, reply: Reply) -> dict[str, object]:
        text = reply.message.thinking + reply.message.content  # a raw text has no separate field for thinking
        shown: dict[str, object] = {"index": index, "text": text, **_finish(reply)}
        shown["logprobs"] = _logprobs(reply.turn.completion_ids, reply.turn.logprobs) if self.output.logprobs else None
        if self.output.token_ids:
            shown |= {"prompt_token_ids": reply.turn.prompt_ids, "token_ids": reply.turn.completion_ids}
        return shown


class CompletionEventEncoder:
    """Encodes one answer as chunks; see :class:`~etude.gateway.api.calls.EventEncoder`."""

    def __init__(self, call: Call, output: OutputOptions) -> None:
        self._call = call
        self._output = output
        self._head: dict[str, object] = {}

    def opening(self, answer_id: str, created: int) -> bytes:
        """Nothing: a completion has no role to announce."""
        self._head = _head(answer_id, created, self._call.model)
        if self._output.usage_event:
            self._head["usage"] = None
        return b""

    def delta(self, index: int, deltas: Sequence[Delta], chunk: TokenChunk) -> bytes:
        """One chunk with everything that some tokens add; none if the caller requested none of it."""
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta | ThinkingDelta))
        if not text and not (self._output.logprobs or self._output.token_ids):
            return b""
        shown: dict[str, object] = {"text": text}
        if self._output.logprobs:
            shown["logprobs"] = _logprobs(chunk.token_ids, chunk.logprobs)
        if self._output.token_ids:
            shown["token_ids"] = chunk.token_ids
        return self._chunk(index, shown, fingerprint([chunk.versions]))

    def closing(self, answer: Answer) -> bytes:
        """The finish reason of each reply, the usage if requested, and the end mark."""
        whole = fingerprint(reply.turn.versions for reply in answer.replies)
        events: list[bytes] = []
        for index, reply in enumerate(answer.replies):
            shown = {"text": "", **_finish(reply)}
            if self._output.token_ids:
                shown["prompt_token_ids"] = reply.turn.prompt_ids
            events.append(self._chunk(index, shown, whole))
        if self._output.usage_event:
            events.append(event({**self._head, "system_fingerprint": whole, "choices": [], "usage": usage(answer)}))
        return b"".join([*events, DONE])

    def failure(self, api_error: ApiError) -> bytes:
        """An error in the middle of a stream."""
        return failure_event(api_error)

    def _chunk(self, index: int, shown: Mapping[str, object], versions: str | None) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **shown}
        return event({**self._head, "system_fingerprint": versions, "choices": [choice]})


def _head(answer_id: str, created: int, model: str) -> dict[str, object]:
    return {"id": f"cmpl-{answer_id}", "object": "text_completion", "created": created, "model": model}


def _finish(reply: Reply) -> dict[str, object]:
    """``stop_reason`` is vLLM's extension: the stop string that ended the reply. A raw prompt has no tool calls."""
    reason = "length" if reply.finish_reason is FinishReason.LENGTH else "stop"
    return {"finish_reason": reason, "stop_reason": reply.stop_text}


def _logprobs(token_ids: Ids, logprobs: Floats) -> dict[str, object]:
    """Token offsets in the text are omitted: a token is not always a text by itself."""
    return {
        "tokens": [token_name(token_id) for token_id in token_ids.tolist()],
        "token_logprobs": [logprob(value) for value in logprobs.tolist()],
        "top_logprobs": None,
        "text_offset": None,
    }


def _read_prompt(fields: JsonObject) -> str | tuple[int, ...]:
    prompt = fields.value("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise fields.unsupported("prompt", "a request has one prompt, send one request for each")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and set(map(type, prompt)) == {int}:  # bool is excluded
        ids: tuple[int, ...] = tuple(prompt)  # type: ignore[arg-type]  # all of them are, the line above says
        if min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
            return ids
    raise fields.invalid("prompt", "a text or a list of token ids, not empty")


TEXT_PROMPT: Json = {"type": "string", "minLength": 1}
"""Schema of a prompt that is text."""
IDS_PROMPT = array_schema(integer_schema(0, MAX_TOKEN_ID), least=1)
"""Schema of a prompt of token ids; ids beyond the vocabulary are rejected later."""
SCHEMA = object_schema(
    "prompt",
    **neutral_schema(COMPLETION_NEUTRAL),
    **SAMPLING_SCHEMA,
    prompt=any_of(
        TEXT_PROMPT, IDS_PROMPT, array_schema(TEXT_PROMPT, least=1, most=1), array_schema(IDS_PROMPT, least=1, most=1)
    ),
    max_tokens=integer_schema(1, MAX_WHOLE),
    logprobs=integer_schema(0, MAX_LOGPROBS),
)
"""JSON schema of the body. Additionally, ``stream_options`` requires ``stream``."""
COMPLETION_FIELDS = field_names(SCHEMA) - COMPLETION_NEUTRAL.keys()
"""Fields of a body that are used, or could not change the output."""

PROTOCOL = ApiProtocol(path="/v1/completions", parse=parse, error_body=error_body, request_id_header="x-request-id")
"""OpenAI's completions."""
