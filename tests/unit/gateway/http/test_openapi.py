"""The OpenAPI document: tools can read it, and it matches the gateway."""

from collections.abc import Iterator

import jsonschema_rs
import orjson
import pytest
import schemathesis
from schemathesis.core.result import Ok

from etude.gateway.api import chat, completions, messages, responses
from etude.gateway.api.calls import ApiError
from etude.gateway.api.openai import error_body
from etude.gateway.http import openapi
from etude.gateway.routing.router import EngineState
from etude.types import Json

QUESTION: dict[str, Json] = {"messages": [{"role": "user", "content": "go"}]}
CALL: dict[str, Json] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nodes(value: Json) -> Iterator[dict[str, Json]]:
    """Every object of a document."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def at(value: Json, *path: str) -> Json:
    for name in path:
        assert isinstance(value, dict)
        value = value[name]
    return value


def operations() -> list[tuple[str, str, Json]]:
    paths = at(openapi.document(), "paths")
    assert isinstance(paths, dict)
    return [
        (path, method, operation)
        for path, item in paths.items()
        if isinstance(item, dict)
        for method, operation in item.items()
        if method != "parameters"
    ]


def test_the_document_is_one_that_tools_read() -> None:
    schema = schemathesis.openapi.from_dict(orjson.loads(orjson.dumps(openapi.document())))
    paths: set[tuple[str, str]] = set()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        paths.add((result.ok().path, result.ok().method.lower()))
    assert paths == {(path, method) for path, method, _ in operations()}


def test_every_schema_is_one() -> None:
    for node in nodes(openapi.document()):
        schema = node.get("schema")
        assert not isinstance(schema, dict) or jsonschema_rs.meta.is_valid(schema)


def test_every_path_of_the_gateway_is_there() -> None:
    calls = {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/models", "/v1/models/{model}", "/v1/queue_time"),
    }
    assert {path for path, _, _ in operations()} == calls | {f"/s/{{session}}{path}" for path in calls} | {
        *("/sessions", "/sessions/{id}", "/keys", "/keys/{id}", "/engines", "/engines/{name}"),
        *("/healthz", "/metrics", "/openapi.json"),
    }


def test_only_two_routes_need_no_key() -> None:
    open_routes = {
        path for path, _, operation in operations() if isinstance(operation, dict) and "security" in operation
    }
    assert open_routes == {"/healthz", "/openapi.json"}


def test_errors_look_as_the_document_says() -> None:
    openai = jsonschema_rs.Draft202012Validator(openapi.OPENAI_ERROR)
    anthropic = jsonschema_rs.Draft202012Validator(openapi.ANTHROPIC_ERROR)
    for api_error in (ApiError(400, "invalid_request", "no", param="n"), ApiError(503, "engine_unavailable", "gone")):
        openai.validate(orjson.loads(error_body(api_error)))
        anthropic.validate(orjson.loads(messages.PROTOCOL.error_body(api_error)))
        assert not anthropic.is_valid(orjson.loads(error_body(api_error)))


def test_engine_states_are_those_there_are() -> None:
    assert at(openapi.ENGINE, "properties", "state", "enum") == [state.value for state in EngineState]


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (chat.SCHEMA, QUESTION),
        (chat.SCHEMA, {**QUESTION, "model": "x", "stop": ["a"], "n": 2, "logit_bias": {}, "user": "me", "seed": None}),
        (
            chat.SCHEMA,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}],
                    },
                    {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "a"},
                ],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "auto",
            },
        ),
        (completions.SCHEMA, {"prompt": "x", "logprobs": 1, "echo": False}),
        (completions.SCHEMA, {"prompt": [1, 2]}),
        (completions.SCHEMA, {"prompt": [[1, 2]]}),
    ],
)
def test_what_is_understood_fits_the_schema(schema: dict[str, Json], body: dict[str, Json]) -> None:
    jsonschema_rs.Draft202012Validator(schema).validate(body)
    api = completions.PROTOCOL if "prompt" in body else chat.PROTOCOL
    api.parse(orjson.dumps(body))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {**QUESTION, "n": 0},
        {**QUESTION, "n": True},
        {**QUESTION, "temperature": 3},
        {**QUESTION, "tool_choice": "required"},
        {**QUESTION, "logit_bias": {"1": 2}},
        {**QUESTION, "priority": 1},
        {**QUESTION, "stop": [""]},
    ],
)
def test_what_does_not_fit_the_schema_is_refused(body: dict[str, Json]) -> None:
    assert not jsonschema_rs.Draft202012Validator(chat.SCHEMA).is_valid(body)
    with pytest.raises(ApiError):
        chat.PROTOCOL.parse(orjson.dumps(body))


def test_every_api_has_a_schema_of_its_body() -> None:
    for api, schema in (
        (chat.PROTOCOL, chat.SCHEMA),
        (completions.PROTOCOL, completions.SCHEMA),
        (responses.PROTOCOL, responses.SCHEMA),
        (messages.PROTOCOL, messages.SCHEMA),
    ):
        path = at(openapi.document(), "paths", api.path)
        assert at(path, "post", "requestBody", "content", "application/json", "schema") == schema
