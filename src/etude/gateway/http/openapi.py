"""The OpenAPI 3.1 document of the gateway: its requests, responses and errors.

Owns the paths, and the schemas of admin requests. The schema of a model call is next to the parser of its API protocol.
The parsers are authoritative; this document is for authors of clients, and for tests that send valid and invalid
requests.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from etude.gateway.api import chat, completions, messages, responses
from etude.gateway.api.calls import KINDS, MODEL
from etude.gateway.api.fields import (
    FLAG,
    TEXT,
    any_of,
    array_schema,
    enum_schema,
    integer_schema,
    nullable,
    object_schema,
)
from etude.gateway.http.auth import MAX_AGE_S, MAX_BUDGET, MAX_TEXT
from etude.types import Json, SignalKind

STATUS_DESCRIPTIONS: Mapping[int, str] = MappingProxyType(
    {
        400: "The request cannot be read, or asks for what is not understood; the message names the field.",
        401: "No key, or none that is known.",
        403: "The key does not allow this.",
        404: "There is nothing of this name, or it is another key's.",
        408: "The body did not arrive in time.",
        409: "The name is taken; or the weight version is not served yet: see Retry-After; or a forked session's next "
        "call is another one than before.",
        413: "The body is too large.",
        429: "Too much at a time: try again after Retry-After seconds.",
        500: "The gateway failed, or an engine's record of its completion does not fit; a retry need not help.",
        503: "No engine can answer now: try again after Retry-After seconds.",
        504: "No answer before the deadline of the call.",
        529: "Anthropic's number for 503.",
    }
)
"""Status → its meaning."""
READING = (400, 401, 403, 404, 429, 500, 503)
"""Errors of a request without a body."""
WRITING = (*READING, 408, 409, 413)
"""Errors of a request with a body."""
CALLING = (*WRITING, 504, 529)
"""Errors of a model call."""

OPENAI: Json = {"$ref": "#/components/schemas/OpenAIError"}
ANTHROPIC: Json = {"$ref": "#/components/schemas/AnthropicError"}

OPENAI_ERROR = object_schema(
    "error", error=object_schema("message type code", message=TEXT, type=TEXT, param=nullable(TEXT), code=TEXT)
)
"""An error of OpenAI's APIs, and of admin requests."""
ANTHROPIC_ERROR = object_schema(
    "type error",
    type=enum_schema("error"),
    error=object_schema("type message", type=TEXT, message=TEXT),
    request_id=nullable(TEXT),
)
"""An error of Anthropic's API."""

COUNT: Json = {"type": "integer", "minimum": 0}
LABEL: Json = {"type": "string", "maxLength": MAX_TEXT}
NAME: Json = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]*$"}
"""A name that needs no escaping in a path."""
URL: Json = {"type": "string", "maxLength": MAX_TEXT, "pattern": "^https?://[A-Za-z0-9_.:/-]+$"}
BUDGET = nullable(integer_schema(1, MAX_BUDGET))

NEW_SESSION = object_schema(
    "session_id api_key base_url turns", session_id=TEXT, api_key=TEXT, base_url=TEXT, turns=COUNT
)
"""A new session, its only key, and its number of initial turns."""
SESSION_REQUEST: Json = {"anyOf": [object_schema("", min_version=COUNT), object_schema("fork_of", fork_of=TEXT)]}
"""A request for a session: one whose calls wait for an engine with that weight version or a later one, or a fork of
another session, whose calls are repeated and answered from the record.
"""
KEY = object_schema(
    "key_id scope",
    key_id=TEXT,
    scope=enum_schema("production", "rollout", "feedback", "admin"),
    label=TEXT,
    created=TEXT,
    expires_s=nullable({"type": "number"}),
    session_id=nullable(TEXT),
    requests_per_minute=BUDGET,
    tokens_per_minute=BUDGET,
    product=nullable(TEXT),
    consent=enum_schema("train", "none"),
    api_key=TEXT,
)
"""A key; its secret is present only once, when it is created."""
KEY_REQUEST = object_schema(
    "scope",
    scope=enum_schema("production", "feedback", "admin"),
    product=nullable(LABEL),
    consent=nullable(enum_schema("train", "none")),
    label=nullable(LABEL),
    expires_s=nullable({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_AGE_S}),
    requests_per_minute=BUDGET,
    tokens_per_minute=BUDGET,
)
"""A request for a key. Keys of rollouts are made with their sessions."""
ENGINE = object_schema(
    "name url region is_lent state reason inflight version digest running waiting",
    name=TEXT,
    url=TEXT,
    region=TEXT,
    is_lent={"type": "boolean"},
    state=enum_schema("healthy", "suspect", "stale", "dead"),
    reason=TEXT,
    inflight=COUNT,
    version=nullable(COUNT),
    digest=nullable(TEXT),
    running=nullable(COUNT),
    waiting=nullable(COUNT),
)
"""An engine, as the gateway sees it."""
ENGINES = object_schema("engines", engines=array_schema(ENGINE))
ENGINE_REQUEST = object_schema(
    "name url", name=NAME, url=URL, region=nullable(LABEL), is_lent=nullable({"type": "boolean"})
)
"""A request to add an engine."""
EVENT = object_schema(
    "event_id kind",
    event_id={"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    kind=enum_schema(*SignalKind),
    value={"type": "number"},
    session=LABEL,
    completion=LABEL,
    turn=nullable(COUNT),
    span=nullable(array_schema(COUNT)),
    user=LABEL,
    sent_at=nullable({"type": "number"}),
)
"""A signal about a session, or about the answer with the id ``completion``; parsed by :mod:`etude.feedback.signals`."""
REPORT: Json = {"anyOf": [EVENT, array_schema(EVENT)]}
RESULTS = object_schema(
    "results",
    results=array_schema(object_schema("event_id result", event_id=TEXT, result=TEXT, why=TEXT)),
)
"""The result for each event of a report, in order."""
HEALTH = object_schema(
    "engine engines draining inflight sessions",
    engine=nullable(object_schema("version digest", version=COUNT, digest=TEXT)),
    engines={"type": "object", "additionalProperties": COUNT},
    draining=FLAG,
    inflight=COUNT,
    sessions=COUNT,
)
"""The oldest weights of a healthy engine, engines by state, calls in progress, open sessions."""


def document(*, takes_feedback: bool = False) -> dict[str, Json]:
    """The OpenAPI document, as a JSON object."""
    calls = _call_paths()
    feedback = _feedback_paths() if takes_feedback else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "étude gateway",
            "version": "1",
            "description": "A model behind the APIs of OpenAI and Anthropic; every sampled token is kept for training.",
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
        "paths": {**calls, **_below_session(calls), **_control_paths(), **feedback, **_open_paths()},
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {"OpenAIError": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR},
        },
    }


def _call_paths() -> dict[str, dict[str, Json]]:
    """Requests of harnesses."""
    chosen = _shape("id object created model choices usage")
    responded = _shape("id object created_at status model output usage")
    message = _shape("id type role content model stop_reason usage")
    either_error = any_of(OPENAI, ANTHROPIC)  # depends on the client
    tokens = _content(object_schema("input_tokens", input_tokens=COUNT))
    counted = _operation("The number of tokens of a prompt", tokens, (*WRITING, 529), ANTHROPIC)
    models = _operation("The models there are", _content(_shape("object data has_more")), READING, either_error)
    times = _content(object_schema("calls waited_s unserved", calls=COUNT, waited_s={"type": "number"}, unserved=FLAG))
    queue_time = _operation("The time that the calls of a session waited for engines", times, READING, either_error)
    model = _operation("One model", _content(_shape("id object created type display_name")), READING, either_error)
    return {
        chat.PROTOCOL.path: _call("OpenAI's chat completions", chat.SCHEMA, chosen),
        completions.PROTOCOL.path: _call("OpenAI's completions of a raw prompt", completions.SCHEMA, chosen),
        responses.PROTOCOL.path: _call("OpenAI's responses", responses.SCHEMA, responded),
        messages.PROTOCOL.path: _call("Anthropic's messages", messages.SCHEMA, message, ANTHROPIC),
        messages.COUNT_PATH: {"post": {**counted, "requestBody": _body(messages.COUNT_SCHEMA)}},
        "/v1/models": {"get": models},
        "/v1/models/{model}": {"parameters": [_in_path("model", enum_schema(MODEL))], "get": model},
        "/v1/queue_time": {"get": queue_time},
    }


def _below_session(paths: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """The same paths in a session: named by its id, or by its key, in which case no other key is needed."""
    below: dict[str, Json] = {}
    for path, item in paths.items():
        parameters = item.get("parameters", [])
        assert isinstance(parameters, list), "the parameters of a path are a list"
        operations = {name: value for name, value in item.items() if name != "parameters"}
        below[f"/s/{{session}}{path}"] = {**operations, "parameters": [_in_path("session", NAME), *parameters]}
    return below


def _control_paths() -> dict[str, Json]:
    """Requests of admins."""
    opened = _operation("Open a session", _content(NEW_SESSION), WRITING)
    closed = _operation("Close a session, for its turns", _content({}, "application/octet-stream"), READING)
    made = _operation("Make a key; its secret is shown this once", _content(KEY), WRITING)
    added = _operation("Add an engine", _content(ENGINE), WRITING)
    removed = _operation(
        "Take an engine out: it gets no new calls; those of a lent one continue in others", _content(ENGINES), READING
    )
    return {
        "/sessions": {"post": {**opened, "requestBody": _body(SESSION_REQUEST, required=False)}},
        "/sessions/{id}": {"parameters": [_in_path("id", NAME)], "delete": closed},
        "/keys": {
            "get": _operation("All keys", _content(object_schema("keys", keys=array_schema(KEY))), READING),
            "post": {**made, "requestBody": _body(KEY_REQUEST)},
        },
        "/keys/{id}": {
            "parameters": [_in_path("id", NAME)],
            "delete": _operation("Revoke a key", _content(KEY), READING),
        },
        "/engines": {
            "get": _operation("All engines", _content(ENGINES), READING),
            "post": {**added, "requestBody": _body(ENGINE_REQUEST)},
        },
        "/engines/{name}": {"parameters": [_in_path("name", NAME)], "delete": removed},
        "/metrics": {"get": _operation("For Prometheus", _content(TEXT, "text/plain"), READING)},
    }


def _feedback_paths() -> dict[str, Json]:
    """Requests of products and their users' clients, if live sessions are recorded."""
    taken = _operation("Report signals: one event, or a list", _content(RESULTS), WRITING, status=202)
    status = _operation("What is kept of a live session", _content(_shape("session_id turns result signals")), READING)
    return {
        "/feedback": {"post": {**taken, "requestBody": _body(REPORT)}},
        "/feedback/sessions/{id}": {"parameters": [_in_path("id", NAME)], "get": status},
    }


def _open_paths() -> dict[str, Json]:
    """Requests that need no key."""
    well, sick = _response("Calls are answered", _content(HEALTH)), _response("They are not", _content(HEALTH))
    described = _operation("The requests that this gateway understands", _content(_shape("openapi info paths")), (500,))
    return {
        "/healthz": {
            "get": {"summary": "The state of the gateway", "responses": {"200": well, "503": sick}, "security": []},
        },
        "/openapi.json": {"get": {**described, "security": []}},
    }


def _call(summary: str, request: Json, answer: Json, error: Json = OPENAI) -> dict[str, Json]:
    """A model call: a conversation in, an answer out, whole or as events."""
    operation = _operation(summary, {**_content(answer), **_content(TEXT, "text/event-stream")}, CALLING, error)
    return {"post": {**operation, "parameters": _headers(), "requestBody": _body(request)}}


def _operation(
    summary: str, content: Json, errors: Sequence[int], error: Json = OPENAI, *, status: int = 200
) -> dict[str, Json]:
    answers: dict[str, Json] = {str(status): _response("As asked", content)}
    answers |= {str(status): _response(STATUS_DESCRIPTIONS[status], _content(error)) for status in errors}
    return {"summary": summary, "responses": answers}


def _response(description: str, content: Json) -> Json:
    return {"description": description, "content": content}


def _content(schema: Json, media: str = "application/json") -> dict[str, Json]:
    return {media: {"schema": schema}}


def _body(schema: Json, *, required: bool = True) -> Json:
    return {"required": required, "content": _content(schema)}


def _shape(fields: str) -> Json:
    """An object with these fields and possibly others, which are described in their API's reference."""
    required: list[Json] = [*fields.split()]
    return {"type": "object", "required": required}


def _in_path(name: str, schema: Json) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _headers() -> list[Json]:
    """Headers of a model call, all of them optional."""
    digits, visible = "[0-9]{1,9}", "[!-~]+"
    return [
        _header("X-Etude-Session", "A session of this key, by a name of the caller's.", NAME),
        _header("X-Etude-User", "Who asks, in the product's words: a user meets one version.", _pattern(visible)),
        _header("X-Etude-Min-Version", "The oldest weight version that may answer.", _pattern(digits)),
        _header("X-Etude-Deadline-S", "Seconds until an answer is of no use.", _pattern(f"{digits}(\\.{digits})?")),
        _header("X-Etude-Turn", "The kind of the call; a summary is recorded as one.", enum_schema(*KINDS)),
        _header("X-Request-Id", "Random, the same with each retry; it gets the recorded answer.", _pattern(visible)),
    ]


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _pattern(spelt: str) -> Json:
    return {"type": "string", "pattern": f"^{spelt}$", "maxLength": MAX_TEXT}
