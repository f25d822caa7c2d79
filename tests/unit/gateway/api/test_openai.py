"""The common part of OpenAI's APIs: sampling options, fingerprints, the shape of errors, the list of models."""

import anthropic.pagination
import anthropic.types
import numpy as np
import openai.pagination
import openai.types
import orjson
import pytest

from etude.gateway.api.calls import ApiError, FinishReason
from etude.gateway.api.fields import MAX_STOPS, JsonObject
from etude.gateway.api.openai import (
    DEFAULT_OUTPUT,
    OutputOptions,
    error_body,
    failure_event,
    fingerprint,
    finish_reason_name,
    list_body,
    logprob,
    one_body,
    read_model,
    read_output_options,
    read_sampling,
)
from etude.types import Json


def test_nothing_said_is_the_models_own_distribution() -> None:
    sampling = read_sampling(JsonObject({}), None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, None)
    assert (sampling.stops, sampling.seed, sampling.count) == ((), None, 1)


def test_every_option_is_read() -> None:
    body: dict[str, Json] = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": 0, "n": 128, "stop": ["a", "b"]}
    sampling = read_sampling(JsonObject(body), 9)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 0.5, 7, 9)
    assert (sampling.stops, sampling.seed, sampling.count) == (("a", "b"), 0, 128)
    assert read_sampling(JsonObject({"stop": "x", "top_k": -1}), None).stops == ("x",)
    assert read_sampling(JsonObject({"top_k": -1}), None).top_k == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e-38}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": ["x" * 1001]}, "stop[0]"),
    ],
)
def test_options_out_of_bounds_are_refused(body: dict[str, Json], param: str) -> None:
    with pytest.raises(ApiError) as error:
        read_sampling(JsonObject(body), None)
    assert (error.value.status, error.value.param) == (400, param)


def test_any_model_has_its_callers_name() -> None:
    assert read_model(JsonObject({})) == "policy"
    assert read_model(JsonObject({"model": "openai/gpt-9"})) == "openai/gpt-9"
    for wrong in ("", "x" * 257, 3):
        with pytest.raises(ApiError):
            read_model(JsonObject({"model": wrong}))


def test_the_view_is_what_was_asked_for() -> None:
    assert read_output_options(JsonObject({"stream": True}), logprobs=False) == DEFAULT_OUTPUT
    options: Json = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False}
    body: dict[str, Json] = {"stream": True, "stream_options": options, "return_token_ids": True}
    assert read_output_options(JsonObject(body), logprobs=True) == OutputOptions(
        logprobs=True, token_ids=True, usage_event=True
    )
    for wrong, param in (
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
    ):
        with pytest.raises(ApiError) as error:
            read_output_options(JsonObject(wrong), logprobs=False)  # type: ignore[arg-type]  # dicts of different values
        assert error.value.param == param


def test_a_fingerprint_names_the_weights() -> None:
    one, two, none = np.array([12, 12], np.int32), np.array([13], np.int32), np.array([], np.int32)
    assert [fingerprint(arrays) for arrays in ([one], [two, one], [none], [], [none, two])] == [
        *("v12", "v12-v13", None, None, "v13"),
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (409, "conflict_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_openais_shape(status: int, kind: str) -> None:
    api_error = ApiError(status, "some_code", "why", param="where")
    error = {"message": "why", "type": kind, "param": "where", "code": "some_code"}
    assert orjson.loads(error_body(api_error)) == {"error": error}
    event = failure_event(api_error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert orjson.loads(event[6:]) == {"error": error}


def test_words_and_numbers_are_openais() -> None:
    assert [finish_reason_name(reason) for reason in FinishReason] == [
        "stop",
        "stop",
        "tool_calls",
        "length",
    ]
    assert (logprob(-0.5), logprob(float("-inf"))) == (-0.5, -9999.0)


def test_both_sdks_read_the_list() -> None:
    body = orjson.loads(list_body(["policy", "other"]))
    theirs = openai.pagination.SyncPage[openai.types.Model].model_validate(body)
    assert [(model.id, model.object) for model in theirs.data] == [("policy", "model"), ("other", "model")]
    page = anthropic.pagination.SyncPage[anthropic.types.ModelInfo].model_validate(body)
    assert [(model.id, model.type, model.display_name) for model in page.data] == [
        ("policy", "model", "policy"),
        ("other", "model", "other"),
    ]
    assert (page.first_id, page.last_id, page.has_next_page()) == ("policy", "other", False)


def test_both_sdks_read_one() -> None:
    body = one_body("policy")
    assert openai.types.Model.model_validate_json(body).id == "policy"
    assert anthropic.types.ModelInfo.model_validate_json(body).created_at.year == 1970


def test_a_gateway_without_models_has_an_empty_page() -> None:
    assert anthropic.pagination.SyncPage[anthropic.types.ModelInfo].model_validate_json(list_body([])).data == []
