"""vLLM's wire format, from answers recorded of 0.32; routes and kept sets as its sources write them."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.engines.vllm.answers import (
    ServerFeatures,
    decode_routes,
    finish_of,
    mask_of,
    read_choice,
    request_body,
    tokens_of,
    versions_of,
)
from etude.engines.vllm.process import VllmServer
from etude.errors import EngineUnavailable
from etude.protocols import SamplingParams
from etude.types import Finish

RECORDED = {
    "index": 0,
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": [28, 37, 37, 73],
    "routed_experts": None,
    "sampling_mask": None,
    "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}],
    "logprobs": {
        "content": [
            {"token_id": 28, "logprob": -6.152432441711426, "rank": 93, "top_logprobs": []},
            {"token_id": 37, "logprob": -3.0890438556671143, "rank": 5, "top_logprobs": []},
            {"token_id": 37, "logprob": -5.350563049316406, "rank": 45, "top_logprobs": []},
            {"token_id": 73, "logprob": -1.25, "rank": 2, "top_logprobs": []},
        ]
    },
}


def test_an_answer_is_read() -> None:
    choice = read_choice({"request_id": "generate-tokens-1", "choices": [RECORDED]})
    token_ids, logprobs = tokens_of(choice, greedy=False)
    assert token_ids.tolist() == [28, 37, 37, 73]
    assert logprobs.dtype == np.float32 and logprobs[0] == np.float32(-6.152432441711426)
    assert not tokens_of(choice, greedy=True)[1].any()
    assert versions_of(choice, 4).tolist() == [3, 4, 4, 4]
    assert finish_of(choice) is Finish.LENGTH


@pytest.mark.parametrize("answer", [None, {}, {"choices": []}, {"error": {"message": "no"}}, {"choices": [1, 2]}])
def test_an_answer_without_its_choice_is_no_answer(answer: Any) -> None:
    with pytest.raises(EngineUnavailable):
        read_choice(answer)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [28, 37, 37]},
        {"token_ids": [28, 37, 37, 74]},
        {"logprobs": None},
        {"logprobs": {"content": [{"token_id": 28, "logprob": None}]}, "token_ids": [28]},
    ],
)
def test_tokens_without_their_logprobs_are_no_answer(change: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        tokens_of(RECORDED | change, greedy=False)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [{"version": "default", "start": 0, "end": 4}],
        [{"version": "3", "start": 0, "end": 3}],
        [{"version": "3", "start": 1, "end": 4}],
    ],
)
def test_a_token_of_unknown_weights_is_no_answer(spans: Any) -> None:
    with pytest.raises(EngineUnavailable):
        versions_of(RECORDED | {"weight_versions": spans}, 4)


@pytest.mark.parametrize("reason", ["abort", "error", None, "repetition"])
def test_a_completion_that_the_server_gave_up_is_no_answer(reason: str | None) -> None:
    with pytest.raises(EngineUnavailable):
        finish_of(RECORDED | {"finish_reason": reason})


def npy(array: np.ndarray[Any, Any]) -> str:
    """Encode an array like vLLM's ``numpy2base64``."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_routes_are_those_of_sparse_layers(kind: type[np.generic]) -> None:
    routes_TLK = np.arange(5 * 4 * 2).reshape(5, 4, 2).astype(kind)
    actual = decode_routes({"routed_experts": npy(routes_TLK)}, 6, (1, 3))
    assert actual.dtype == np.uint16
    np.testing.assert_array_equal(actual, routes_TLK[:, [1, 3]])


@pytest.mark.parametrize(
    "text",
    [
        None,
        "!",
        "AAAA",
        npy(np.zeros((4, 4, 2), np.uint8)),
        npy(np.zeros((5, 3, 2), np.uint8)),
        npy(np.zeros((5, 4), np.uint8)),
        npy(np.zeros((5, 4, 2), np.float32)),
        npy(np.full((5, 4, 2), -1, np.int32)),
    ],
)
def test_routes_of_another_shape_are_no_answer(text: str | None) -> None:
    with pytest.raises(EngineUnavailable):
        decode_routes({"routed_experts": text}, 6, (1, 3))


def test_each_token_has_a_sampling_mask_in_ascending_order() -> None:
    mask = mask_of([[5, 2], [], [9]], 3)
    assert mask.offsets.tolist() == [0, 2, 2, 3]
    assert mask.token_ids.tolist() == [2, 5, 9]
    with pytest.raises(EngineUnavailable):
        mask_of([[5, 2]], 2)


def test_wishes_that_would_be_ignored_are_refused() -> None:
    routes, filtered = SamplingParams(max_tokens=1, want_routes=True), SamplingParams(max_tokens=1, top_k=4)
    for params in (routes, filtered):
        with pytest.raises(ValueError, match="Model Runner V2"):
            ServerFeatures().check(params)
        ServerFeatures(sparse_layers=(0,), sampling_mask=True).check(params)
    greedy = SamplingParams(max_tokens=1, top_p=0.5, temperature=0.0)
    assert not greedy.truncates
    ServerFeatures().check(greedy)
    assert request_body([1], greedy, salt="s", stream=False)["sampling_params"]["top_p"] == 1.0


def test_a_server_on_a_cpu_offers_neither_routes_nor_sampling_masks() -> None:
    for routes in (True, False):
        with pytest.raises(ValueError, match="Triton"):
            VllmServer(python=Path("python"), model=Path("model"), port=1, routes=routes, sampling_mask=not routes)


def test_the_environment_of_a_gpu_server_is_the_users_but_for_what_is_ours() -> None:
    server = VllmServer(python=Path("p"), model=Path("m"), port=1, device="cuda", routes=True, sampling_mask=True)
    theirs = {"PYTHONHOME": "x", "VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_SERVER_DEV_MODE": "0", "PATH": "/bin"}
    variables = server.environment(theirs, Path("only"))
    assert variables["PATH"] == "/bin" and variables["PYTHONPATH"] == "only" and "PYTHONHOME" not in variables
    assert variables["VLLM_ATTENTION_BACKEND"] == "FLASHINFER" and variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert not any(name.startswith("VLLM_CPU") for name in variables)
    assert {"--enable-return-routed-experts", "--return-sampling-mask"} <= set(server.command())
    assert "--enforce-eager" not in server.command()
