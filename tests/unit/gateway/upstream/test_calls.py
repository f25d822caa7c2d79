"""Calls to external APIs: their address, changes on the way, and the counted tokens."""

import orjson
import pytest

from etude.errors import ConfigError
from etude.gateway.upstream.calls import TokenUsage, Upstream, read_usage


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://api.example/v1", "https://api.example/v1/messages"),
        ("https://api.example/v1/", "https://api.example/v1/messages"),
        ("https://api.example", "https://api.example/v1/messages"),
        ("http://127.0.0.1:8000/llm", "http://127.0.0.1:8000/llm/v1/messages"),
    ],
)
def test_paths_are_behind_v1(url: str, place: str) -> None:
    assert Upstream(url=url, model="m").place("messages") == place


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--url 'api\.example'"):
        Upstream(url="api.example", model="m")


def test_the_model_and_extra_fields_replace_those_of_the_harness() -> None:
    upstream = Upstream(url="http://x", model="m", extra={"max_tokens": None, "reasoning_effort": "low"})
    sent = upstream.request("chat/completions", {"model": "policy", "max_tokens": 9, "messages": []})
    assert sent == {"model": "m", "reasoning_effort": "low", "messages": []}


def test_a_stream_is_asked_for_its_usage() -> None:
    sent = Upstream(url="http://x", model="m").request("chat/completions", {"stream": True})
    assert sent["stream_options"] == {"include_usage": True}


def test_each_api_has_its_own_header_for_the_key() -> None:
    assert Upstream(url="http://x", model="m", key="k").headers == {"Authorization": "Bearer k"}
    assert Upstream(url="http://x", model="m", key="k", api="anthropic").headers["x-api-key"] == "k"
    assert "k-secret" not in repr(Upstream(url="http://x", model="m", key="k-secret"))


CHAT = {"usage": {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}}
RESPONSES = {"usage": {"input_tokens": 10, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 6}}}
MESSAGE = {
    "usage": {"input_tokens": 3, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 1, "output_tokens": 4}
}
STREAM = (
    b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 6, '
    b'"output_tokens": 1}}}\n\nevent: message_delta\ndata: {"usage": {"output_tokens": 4}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("answer", [orjson.dumps(CHAT), orjson.dumps(RESPONSES), orjson.dumps(MESSAGE), STREAM])
def test_usage_is_read_in_every_form(answer: bytes) -> None:
    assert read_usage(answer) == TokenUsage(prompt_tokens=10, cached_tokens=6, sampled_tokens=4)


def test_an_answer_without_usage_counts_nothing() -> None:
    assert read_usage(b"<html>") == TokenUsage()
