"""The OpenAI chat-completions dialect: request bodies in, reply and error bodies out.

Owns the shapes and which options are understood. Everything that would change the output and is not understood is
refused by name, never ignored. Pure; tokens, sessions and HTTP are others' business.
"""

from dataclasses import dataclass

import orjson

from etude.errors import EtudeError
from etude.gateway.sessions import Message
from etude.types import Json, Turn

MODEL = "policy"
"""The one model of a gateway: whatever weights its engine serves now."""

UNDERSTOOD = frozenset(
    {"model", "messages", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "priority"}
)
"""Fields with an effect. ``top_k`` and ``priority`` are not OpenAI's; engines spell them like this."""

INFORMATIVE = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that could not change the output anywhere."""

NEUTRAL: dict[str, Json] = {
    "n": 1,
    "stream": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logprobs": False,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "stop": [],
    "tools": [],
    "tool_choice": "none",
    "store": False,
}
"""Fields that are accepted with the one value that asks for nothing."""

MAX_TEMPERATURE = 2.0
"""OpenAI's own bound."""
MAX_SEED = 2**63 - 1
"""What every random generator behind an engine takes."""
MAX_TOP_K = 2**31 - 1
"""Above any vocabulary."""
MAX_PRIORITY = 2**31 - 1
"""Of either sign; what engines keep it in."""
QUOTED_CHARACTERS = 80
"""How much of a refused value an error message repeats."""

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
"""HTTP status → OpenAI's error type; every other one is ``invalid_request_error``."""


class Refusal(EtudeError):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The JSON that OpenAI's clients understand."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a caller of ``/v1/chat/completions`` asked for."""

    messages: tuple[Message, ...]
    temperature: float
    top_p: float
    """1: off."""
    top_k: int
    """0: off."""
    max_tokens: int | None
    """``None``: as many as the context has room for."""
    seed: int | None
    priority: int
    """Lower is served first."""


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request body. Raises :class:`Refusal` naming the parameter at fault."""
    fields = _object(body)
    _refuse_unsupported(fields)
    return ChatRequest(
        messages=_messages(fields.get("messages")),
        temperature=_temperature(fields.get("temperature")),
        top_p=_top_p(fields.get("top_p")),
        top_k=_integer(fields, "top_k", low=0, high=MAX_TOP_K) or 0,
        max_tokens=_max_tokens(fields),
        seed=_integer(fields, "seed", low=0, high=MAX_SEED),
        priority=_integer(fields, "priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0,
    )


def chat_body(reply_id: str, created: int, turn: Turn, text: str) -> bytes:
    """The reply to a chat request; ``created`` is Unix time in seconds, ``text`` what the turn's sampled tokens say."""
    prompt_tokens, completion_tokens = len(turn.prompt_ids), len(turn.completion_ids)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": turn.finish.value,
    }
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
    )


def models_body() -> bytes:
    """The reply to ``GET /v1/models``."""
    return orjson.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "etude"}]}
    )


def _object(body: bytes) -> dict[str, Json]:
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_request", f"the body is not JSON: {error.msg} at {error.pos}") from error
    if not isinstance(value, dict):
        raise Refusal(400, "invalid_request", "the body must be a JSON object")
    return value


def _refuse_unsupported(fields: dict[str, Json]) -> None:
    for name, value in fields.items():
        if value is None or name in UNDERSTOOD or name in INFORMATIVE:
            continue
        if name not in NEUTRAL:
            raise _unsupported(name, f"{name!r} is not supported: leave it out")
        if value != NEUTRAL[name]:
            raise _unsupported(name, f"{name}={_quote(value)} is not supported: leave it out or send {NEUTRAL[name]!r}")
    model = fields.get("model", MODEL)
    if model != MODEL:
        raise Refusal(404, "model_not_found", f"no model {_quote(model)} here, only {MODEL!r}", param="model")


def _messages(value: Json) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", f"messages must be a list of at least one message, not {_quote(value)}")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Json, where: str) -> Message:
    if not isinstance(value, dict):
        raise _invalid(where, f"{where} must be an object with role and content, not {_quote(value)}")
    for name, extra in value.items():
        if name not in ("role", "content") and extra is not None:  # clients send the fields of a reply back as null
            raise _unsupported(f"{where}.{name}", f"{where}.{name} is not supported: a message is a role and a text")
    role = value.get("role")
    if not isinstance(role, str):
        raise _invalid(f"{where}.role", f"{where}.role must be a string, not {_quote(role)}")
    return Message(role=role, content=_text(value.get("content"), f"{where}.content"))


def _text(value: Json, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid(where, f"{where} must be a string or a list of text parts, not {_quote(value)}")
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _invalid(where, f'{where} may hold only parts {{"type": "text", "text": …}}, not {_quote(part)}')
        texts.append(text)
    return "".join(texts)


def _temperature(value: Json) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TEMPERATURE:
        raise _invalid("temperature", f"temperature={_quote(value)}: expected a number from 0 to {MAX_TEMPERATURE}")
    return float(value)


def _top_p(value: Json) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _invalid("top_p", f"top_p={_quote(value)}: expected a number above 0, at most 1")
    return float(value)


def _max_tokens(fields: dict[str, Json]) -> int | None:
    old, new = (_integer(fields, name, low=1, high=MAX_SEED) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise _invalid("max_tokens", f"max_tokens={old} and max_completion_tokens={new} disagree: send one of them")
    return old if new is None else new


def _integer(fields: dict[str, Json], name: str, *, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, f"{name}={_quote(value)}: expected a whole number from {low} to {high}")
    return value


def _invalid(param: str, message: str) -> Refusal:
    return Refusal(400, "invalid_request", message, param=param)


def _unsupported(param: str, message: str) -> Refusal:
    return Refusal(400, "unsupported_parameter", message, param=param)


def _quote(value: Json) -> str:
    quoted = repr(value)
    return quoted if len(quoted) <= QUOTED_CHARACTERS else quoted[:QUOTED_CHARACTERS] + "…"
