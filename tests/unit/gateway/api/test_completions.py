"""OpenAI's legacy completions: prompts of text or token ids, and answers as its own SDK reads them."""

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from etude.gateway.api.calls import Answer, ApiError, FinishReason, Reply
from etude.gateway.api.completions import COMPLETION_FIELDS, COMPLETION_NEUTRAL, PROTOCOL, parse
from etude.protocols import TokenChunk
from etude.tokens.messages import ChatMessage, Delta, TextDelta, ThinkingDelta
from etude.types import Finish, Json, Turn

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
BODY = st.fixed_dictionaries(
    {"prompt": st.text() | st.lists(st.integers(-5, 5)) | JSON},
    optional=dict.fromkeys(sorted((COMPLETION_FIELDS | COMPLETION_NEUTRAL.keys()) - {"prompt"}), JSON),
)


def body_of(prompt: Json = "def", **fields: Json) -> bytes:
    return orjson.dumps({"prompt": prompt, **fields})


def answer_of(text: str = "done", finish_reason: FinishReason = FinishReason.STOP) -> Answer:
    turn = Turn(
        prompt_ids=np.array([7, 8], np.int32),
        completion_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.5, -1.0, -np.inf], np.float32),
        versions=np.array([4, 4, 4], np.int32),
        finish=Finish.STOP,
    )
    scripted = ChatMessage(role="assistant", content=text, thinking="hm, ")
    reply = Reply(message=scripted, finish_reason=finish_reason, stop_text=None, turn=turn)
    return Answer(answer_id="a" * 24, created=5, model="policy", replies=(reply,), reused_tokens=0)


def test_a_prompt_is_text_or_token_ids() -> None:
    assert parse(body_of("x")).call.prompt == "x"
    assert parse(body_of([3, 0, 2])).call.prompt == (3, 0, 2)
    assert parse(body_of(["x"])).call.prompt == "x"
    assert parse(body_of([[3]])).call.prompt == (3,)
    assert parse(body_of()).call.messages == ()


def test_openais_allowance_is_the_default() -> None:
    assert parse(body_of()).call.sampling.max_tokens == 16
    assert parse(body_of(max_tokens=3)).call.sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [[]]}, "invalid_request", "prompt"),
        ({"prompt": [True]}, "invalid_request", "prompt"),
        ({"prompt": [1, "x"]}, "invalid_request", "prompt"),
        ({"prompt": [1.0]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": [2**31]}, "invalid_request", "prompt"),
        ({"prompt": {"ids": [1]}}, "invalid_request", "prompt"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt"),
        ({"prompt": [[1], [2]]}, "unsupported_parameter", "prompt"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"logprobs": 2}, "invalid_request", "logprobs"),
        ({"logprobs": True}, "invalid_request", "logprobs"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"tools": []}, "unsupported_parameter", "tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Json], code: str, param: str) -> None:
    with pytest.raises(ApiError) as error:
        PROTOCOL.parse(orjson.dumps({"prompt": "x", **fields}))
    assert (error.value.status, error.value.code, error.value.param) == (400, code, param)


def test_what_asks_for_nothing_is_accepted() -> None:
    for name, values in COMPLETION_NEUTRAL.items():
        for value in values:
            assert parse(body_of(**{name: value})).call == parse(body_of()).call


@given(BODY)
def test_any_json_is_read_or_refused(body: dict[str, Json]) -> None:
    try:
        call = parse(orjson.dumps(body)).call
    except ApiError as api_error:
        assert api_error.status == 400
    else:
        assert call.prompt


def test_the_body_is_openais() -> None:
    body = parse(body_of(model="davinci", logprobs=0, return_token_ids=True)).body(answer_of())
    completion = Completion.model_validate_json(body)
    assert (completion.id, completion.model, completion.system_fingerprint) == ("cmpl-" + "a" * 24, "davinci", "v4")
    assert completion.usage is not None
    assert completion.usage.total_tokens == 5
    choice = completion.choices[0]
    assert (choice.text, choice.finish_reason) == ("hm, done", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["token_id:1", "token_id:2", "token_id:3"]
    assert choice.logprobs.token_logprobs == [-0.5, -1.0, -9999.0]
    assert choice.model_extra == {"stop_reason": None, "prompt_token_ids": [7, 8], "token_ids": [1, 2, 3]}
    assert Completion.model_validate_json(parse(body_of()).body(answer_of())).choices[0].logprobs is None


def test_a_stream_adds_up_to_the_body() -> None:
    body = body_of(stream=True, logprobs=1, return_token_ids=True, stream_options={"include_usage": True})
    answer, events = answer_of(finish_reason=FinishReason.LENGTH), parse(body).events()
    turn = answer.replies[0].turn
    data = events.opening(answer.answer_id, answer.created)
    assert data == b""
    scripted: list[list[Delta]] = [[ThinkingDelta("hm, "), TextDelta("do")], [], [TextDelta("ne")]]
    for token, deltas in enumerate(scripted):
        one = slice(token, token + 1)
        chunk = TokenChunk(token_ids=turn.completion_ids[one], logprobs=turn.logprobs[one], versions=turn.versions[one])
        data += events.delta(0, deltas, chunk)
    *lines, done, end = (data + events.closing(answer)).decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [Completion.construct(**orjson.loads(line[6:])) for line in lines]  # as the SDK: null reasons are usual
    *chunks, last, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hm, done"
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    assert [extra["token_ids"] for extra in extras] == [[1], [2], [3]]
    assert (last.choices[0].text, last.choices[0].finish_reason, usage.choices) == ("", "length", [])
    assert (last.choices[0].model_extra or {})["prompt_token_ids"] == [7, 8]
    assert usage.usage == Completion.model_validate_json(parse(body).body(answer)).usage
    assert {chunk.id for chunk in chunks} == {"cmpl-" + "a" * 24}


def test_tokens_without_text_are_no_chunk_by_default() -> None:
    answer, events = answer_of(), parse(body_of(stream=True)).events()
    events.opening(answer.answer_id, answer.created)
    turn = answer.replies[0].turn
    chunk = TokenChunk(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
    assert events.delta(0, [], chunk) == b""


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    event = parse(body_of(stream=True)).events().failure(ApiError(429, "busy", "later"))
    assert orjson.loads(event[6:])["error"]["type"] == "rate_limit_error"
