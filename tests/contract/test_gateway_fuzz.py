"""A gateway answers any input in time, with a status of its OpenAPI document, and continues to serve."""

from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any, TypeAlias

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.http.openapi import document
from etude.tokens.chat import ChatTemplate
from gateways import gateway_in_a_thread

ADMIN_KEY, PRODUCT_KEY = "the admin key", "a product's key"
EXAMPLES, EXAMPLES_AGAIN = 12, 3
"""Of each operation and mode; of the same operation below a session."""
ANSWER_S = 60.0
"""Longest time of one answer: the fake engine takes no time, so anything longer hangs."""
PRIVILEGED = ("/sessions", "/keys", "/engines", "/metrics")
SCHEMA = schemathesis.openapi.from_dict(document())
Operation: TypeAlias = schemathesis.APIOperation[Any, Any, Any, Any]
OPERATIONS = [operation.ok() for operation in SCHEMA.get_all_operations() if isinstance(operation, Ok)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a gateway that runs in its own thread."""
    chat = ChatTemplate.train(["return total\n"] * 4, vocab_size=300)
    keys = (
        Key(key_id="admin", digest=digest_of(ADMIN_KEY), scope=Scope.ADMIN),
        Key(key_id="product", digest=digest_of(PRODUCT_KEY), scope=Scope.PRODUCTION),
    )
    with gateway_in_a_thread(chat, FakeEngine(SystemClock(), vocab_size=300, max_length=256), keys, 256) as url:
        yield url


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}")
def test_every_operation_answers_as_documented(operation: Operation, mode: GenerationMode, url: str) -> None:
    """Generates both requests that the schema allows and requests that it does not."""
    key = ADMIN_KEY if operation.path.startswith(PRIVILEGED) else PRODUCT_KEY
    documented = {int(status) for status in operation.definition.raw["responses"]}

    @settings(
        max_examples=EXAMPLES_AGAIN if operation.path.startswith("/s/") else EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case[Any]) -> None:
        headers = {"Authorization": f"Bearer {key}", "X-Etude-Deadline-S": str(ANSWER_S)}
        answer = case.call(base_url=url, headers=headers, timeout=2 * ANSWER_S)
        assert answer.status_code < 500, answer.text
        assert answer.status_code in documented, answer.text

    with suppress(Unsatisfiable):  # nothing can be wrong with a request that has no part
        fuzz()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    scheme=st.sampled_from(["http://", "https://", "http:", "HTTP://"]),
    host=st.sampled_from(["127.0.0.1", "[::1]", "[::1", "", "x", "a..b", "x" * 64, "ü", "u:p@x", "x y", "%00", "1.2"]),
    port=st.sampled_from(["", ":", ":9", ":0", ":port", ":-1", ":65536", ":1:2", ":٣"]),
    path=st.sampled_from(["", "/", "/a/../b", "/%ff", "?q", "#f"]),
)
def test_an_address_of_an_engine_is_at_most_an_api_error(
    scheme: str, host: str, port: str, path: str, url: str
) -> None:
    """Generates near-valid addresses, which cause errors; random strings of a schema are hardly ever addresses."""
    reply = {"name": "second", "url": scheme + host + port + path}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=ANSWER_S) as admin:
        assert admin.post("/engines", json=reply).status_code in (200, 400)
        assert admin.post("/engines", json=reply).status_code in (400, 409)
        admin.delete("/engines/second")
        assert "second" not in [engine["name"] for engine in admin.get("/engines").json()["engines"]]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(st.sampled_from(["s", "v1", "keys", "..", "%2e%2e", "%00", "%ff", "", "etude-x", "messages"])),
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"]),
)
def test_a_path_is_at_most_an_api_error(parts: list[str], method: str, url: str) -> None:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    connection.request(method, "/" + "/".join(parts), headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert connection.getresponse().status < 500
    connection.close()
