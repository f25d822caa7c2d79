"""Shared parts of OpenAI's APIs: sampling options, choice of tools, usage, events, errors, models.

Owns the options that several bodies share, the values of others that have no effect, and the common formats of answers.
The other fields of a body are in :mod:`.chat`, :mod:`.completions` and :mod:`.responses`.

Lists of tokens in a reply name a token ``token_id:123``, like vLLM's ``return_tokens_as_token_ids``: a token is not
always a text, two tokens may have the same text, and a caller that requests logprobs needs to know which token was
sampled.

There is one model, the newest weights. Model lists serve clients of both APIs: OpenAI's and Anthropic's fields side by
side. The model's date is the epoch, which Anthropic's reference specifies for unknown dates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import MODEL, Answer, ApiError, FinishReason, Sampling
from etude.gateway.api.fields import (
    FLAG,
    MAX_NAME_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP_K,
    TOP_P,
    JsonObject,
    any_of,
    array_schema,
    integer_schema,
    object_schema,
    short_text,
    temperature_schema,
)
from etude.tokens.messages import Tool
from etude.types import Ids, Json

INFORMATIVE = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt"})
"""Fields that identify the user or help a cache; they could never change the output."""

NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        # vLLM's, which clients send with their defaults:
        "min_p": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "stop_token_ids": ([],),
        "ignore_eos": (False,),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "return_tokens_as_token_ids": (True,),
    }
)
"""Fields of both bodies that are accepted only with values that have no effect here."""

STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})
"""Fields of ``stream_options``. The padding that OpenAI calls obfuscation is never added."""

MAX_TEMPERATURE = 2.0
"""OpenAI's limit."""
MAX_WHOLE = 2**63 - 1
"""The largest whole number that all random generators and counters of engines accept."""
MAX_COUNT = 128
"""Replies to one call: OpenAI's limit."""
LEAST_LOGPROB = -9999.0
"""OpenAI's number for the logprob of an impossible token; JSON has no infinity."""

ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        429: "rate_limit_error",
    }
)
"""HTTP status → OpenAI's error type; others are ``server_error`` from 500 and ``invalid_request_error`` below."""

DONE = b"data: [DONE]\n\n"
"""The last event of a complete stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Optional parts of an answer that a caller may request."""

    logprobs: bool = False
    token_ids: bool = False
    """Include prompt ids and sampled ids, to check what is captured."""
    usage_event: bool = False
    """True if a stream ends with the usage."""


DEFAULT_OUTPUT = OutputOptions()
"""The default options."""


def read_model(fields: JsonObject) -> str:
    """The model name in a request; any name is accepted, because harnesses hard-code names."""
    return fields.short_text("model", MODEL)


def read_sampling(fields: JsonObject, max_tokens: int | None) -> Sampling:
    """Parse sampling options; the token limit has a different name in each API."""
    return Sampling(
        temperature=fields.temperature(high=MAX_TEMPERATURE),
        top_p=fields.top_p(),
        top_k=max(fields.integer("top_k", low=-1, high=MAX_TOP_K) or 0, 0),  # −1 means off in vLLM
        max_tokens=max_tokens,
        stops=_read_stops(fields),
        seed=fields.integer("seed", low=0, high=MAX_WHOLE),
        count=fields.integer("n", low=1, high=MAX_COUNT) or 1,
    )


def read_tools(fields: JsonObject, read_tool: Callable[[JsonObject], Tool]) -> tuple[Tool, ...]:
    """Parse the tools of a request, none if ``tool_choice`` is none; the APIs encode a tool differently."""
    tools = tuple([read_tool(tool) for tool in fields.children("tools")])
    if len({tool.name for tool in tools}) < len(tools):
        raise fields.invalid("tools", "tools with names of their own")
    choice = fields.value("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.unsupported("tool_choice", 'nothing here constrains what is sampled, send "auto" or "none"')
    return () if choice == "none" else tools


def read_output_options(fields: JsonObject, *, logprobs: bool) -> OutputOptions:
    """Parse the requested parts of the answer; the APIs request logprobs differently."""
    options = fields.child("stream_options")
    token_ids = fields.flag("return_token_ids")
    if options is None and not logprobs and not token_ids:
        return DEFAULT_OUTPUT
    if options is not None:
        if not fields.flag("stream"):
            raise fields.invalid("stream_options", "it only together with stream=true")
        options.refuse_unknown(STREAM_OPTIONS, {"continuous_usage_stats": (False,)})
        options.flag("include_obfuscation")
    return OutputOptions(
        logprobs=logprobs,
        token_ids=token_ids,
        usage_event=options is not None and options.flag("include_usage"),
    )


def usage(answer: Answer) -> dict[str, Json]:
    """Token counts of an answer, as ``usage``. Reasoning tokens are not counted separately."""
    read, sampled = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def fingerprint(versions: Iterable[Ids]) -> str | None:
    """``system_fingerprint``: the weight versions of the tokens, ``v12`` or ``v12-v13``; ``None`` without tokens."""
    some = [array for array in versions if len(array)]
    if not some:
        return None
    low, high = min(int(array.min()) for array in some), max(int(array.max()) for array in some)
    return f"v{low}" if low == high else f"v{low}-v{high}"


def finish_reason_name(reason: FinishReason) -> str:
    """OpenAI's name of a finish reason; a stop string is also ``stop``."""
    return "stop" if reason is FinishReason.STOP_TEXT else reason.value


def token_name(token_id: int) -> str:
    """The name of a token in a list of logprobs."""
    return f"token_id:{token_id}"


def logprob(value: float) -> float:
    """A log-probability that JSON can represent."""
    return max(value, LEAST_LOGPROB)


def event(data: Mapping[str, object]) -> bytes:
    """Encode one server-sent event; numpy arrays become lists."""
    return b"data: %b\n\n" % orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)


def error_body(api_error: ApiError) -> bytes:
    """The response body of an error, in OpenAI's format."""
    return orjson.dumps({"error": _error(api_error)})


def failure_event(api_error: ApiError) -> bytes:
    """An error event inside a stream. No ``[DONE]`` follows: the answer is incomplete."""
    return event({"error": _error(api_error)})


STREAM_OPTIONS_SCHEMA = object_schema("", include_usage=FLAG, include_obfuscation=FLAG)
"""Schema of ``stream_options``."""

SAMPLING_SCHEMA: Mapping[str, Json] = MappingProxyType(
    {
        "model": short_text(MAX_NAME_CHARACTERS),
        "stream": FLAG,
        "stream_options": STREAM_OPTIONS_SCHEMA,
        "temperature": temperature_schema(MAX_TEMPERATURE),
        "top_p": TOP_P,
        "top_k": integer_schema(-1, MAX_TOP_K),
        "seed": integer_schema(0, MAX_WHOLE),
        "n": integer_schema(1, MAX_COUNT),
        "stop": any_of(short_text(MAX_STOP_CHARACTERS), array_schema(short_text(MAX_STOP_CHARACTERS), most=MAX_STOPS)),
        "return_token_ids": FLAG,
        **dict.fromkeys(INFORMATIVE, True),
    }
)
"""Schemas of the fields that both bodies share with the same format."""


def neutral_schema(neutral: Mapping[str, Sequence[Json]]) -> dict[str, Json]:
    """JSON schemas of fields that accept only values without effect."""
    return {name: {"enum": [*values, None]} for name, values in neutral.items()}


def _error(api_error: ApiError) -> dict[str, Json]:
    other = "invalid_request_error" if api_error.status < 500 else "server_error"
    return {
        "message": api_error.message,
        "type": ERROR_TYPES.get(api_error.status, other),
        "param": api_error.param,
        "code": api_error.code,
    }


def _read_stops(fields: JsonObject) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.invalid("stop", f"a string or a list of at most {MAX_STOPS}")
    read: list[str] = []
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            where = "stop" if isinstance(value, str) else f"stop[{index}]"
            raise fields.invalid(where, f"a string of 1 to {MAX_STOP_CHARACTERS} characters", stop)
        read.append(stop)
    return tuple(read)


EPOCH = "1970-01-01T00:00:00Z"
"""The date of a model with an unknown date."""


def list_body(names: Sequence[str]) -> bytes:
    """The response body of ``/v1/models``: all models on one page."""
    return orjson.dumps(
        {
            "object": "list",
            "data": [_model(name) for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    )


def one_body(name: str) -> bytes:
    """The response body of ``/v1/models/{model}``."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Json]:
    openai: dict[str, Json] = {"id": name, "object": "model", "created": 0, "owned_by": "etude"}
    return {**openai, "type": "model", "display_name": name, "created_at": EPOCH, "lifecycle": "active"}
