"""An engine's record of a turn is checked and stored, or refused by name."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import CaptureError
from etude.gateway.service import Recorder, truncated
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore
from etude.protocols import Completion, SamplingParams, turn_of
from etude.types import Finish, Routes, RouteSpace, SamplingMask, Turn

PROMPT, SPACE = [7, 8], RouteSpace(layers=2, slots=2, experts=4)
GOOD = np.tile(np.array([[0, 3], [2, 1]], np.uint16), (4, 1, 1))
MASK = SamplingMask(offsets=np.array([0, 2, 2, 3], np.int64), token_ids=np.array([1, 4, 3], np.int32))


def completion_of(routes: Routes | None = None, sampling_mask: SamplingMask | None = None) -> Completion:
    ids = np.array([1, 2, 3], np.int32)
    return Completion(
        token_ids=ids,
        logprobs=-ids.astype(np.float32),
        versions=np.full(3, 5, np.int32),
        finish=Finish.STOP,
        routes=routes,
        sampling_mask=sampling_mask,
    )


def record(
    completion: Completion,
    folder: Path | None,
    *,
    space: RouteSpace | None = None,
    params: SamplingParams | None = None,
) -> Turn:
    recorder = Recorder(None if folder is None else Payloads(ObjectStore(str(folder))), space)
    params = params or SamplingParams(max_tokens=3, temperature=0.5)
    return asyncio.run(recorder.turn(PROMPT, recorder.params(params), completion, "s"))


def test_a_turn_is_what_the_engine_said(tmp_path: Path) -> None:
    turn = record(completion_of(), tmp_path)
    assert turn.prompt_ids.tolist() == PROMPT
    assert turn.completion_ids.tolist() == [1, 2, 3]
    assert turn.logprobs.tolist() == [-1, -2, -3]
    assert turn.versions.tolist() == [5, 5, 5]
    assert (turn.finish, turn.temperature, turn.payload) == (Finish.STOP, 0.5, None)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_an_array_is_not_copied() -> None:
    prompt_ids = np.array(PROMPT, np.int32)
    turn = asyncio.run(Recorder(None).turn(prompt_ids, SamplingParams(max_tokens=3), completion_of(), "s"))
    assert turn.prompt_ids is prompt_ids


def test_routes_are_asked_for_where_they_are_wanted(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3)
    assert Recorder(Payloads(ObjectStore(str(tmp_path))), SPACE).params(params).want_routes
    assert Recorder(Payloads(ObjectStore(str(tmp_path)))).params(params) == params


def test_routes_are_stored(tmp_path: Path) -> None:
    turn = record(completion_of(GOOD), tmp_path, space=SPACE)
    assert turn.payload is not None
    assert turn.routes is None
    back = Payloads(ObjectStore(str(tmp_path))).fetch([turn])[0].routes
    assert back is not None
    assert np.array_equal(back, GOOD)


def test_routes_that_an_earlier_turn_has_are_not_written_again(tmp_path: Path) -> None:
    first = record(completion_of(GOOD), tmp_path, space=SPACE)
    ids = [*PROMPT, 1, 2, 3, 9]
    routes = np.concatenate([GOOD, 3 - GOOD])
    recorder, params = (
        Recorder(Payloads(ObjectStore(str(tmp_path))), SPACE),
        SamplingParams(max_tokens=3, want_routes=True),
    )
    second = asyncio.run(recorder.turn(ids, params, completion_of(routes), "s", reused=5))
    assert first.payload is not None and second.payload is not None
    assert second.payload.size_bytes < first.payload.size_bytes + 20, "as many rows, compressed"
    whole, again = Payloads(ObjectStore(str(tmp_path))).fetch([first, second])
    assert whole.routes is not None and again.routes is not None
    assert np.array_equal(whole.routes, GOOD)
    assert np.array_equal(again.routes, routes)


def test_routes_that_are_not_asked_for_are_not_recorded(tmp_path: Path) -> None:
    assert record(completion_of(GOOD), tmp_path).payload is None


def test_routes_need_a_folder() -> None:
    with pytest.raises(ValueError, match="no folder"):
        Recorder(None, SPACE)


def test_sampling_masks_are_recorded_with_and_without_routes(tmp_path: Path) -> None:
    turn = record(completion_of(sampling_mask=MASK), tmp_path, params=SamplingParams(max_tokens=3, top_p=0.9))
    back = Payloads(ObjectStore(str(tmp_path))).fetch([turn])[0].sampling_mask
    assert back is not None
    assert back.sizes.tolist() == [2, 0, 1]


def test_without_a_folder_a_turn_is_for_no_trainer() -> None:
    turn = record(completion_of(GOOD, MASK), None, params=SamplingParams(max_tokens=3, top_p=0.9))
    assert (turn.routes, turn.sampling_mask, turn.payload) == (None, None, None)


def changed(at: tuple[int, int, int], expert: int) -> Routes:
    routes: npt.NDArray[np.uint16] = GOOD.copy()
    routes[at] = expert
    return routes


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (None, "no routes although they were requested"),
        (GOOD[:3], r"read 4 tokens has routes of shape \[3, 2, 2\]"),
        (GOOD[:, :1], r"uint16\[4, 1, 2\], expected uint16\[4, 2, 2\]"),
        (changed((1, 0, 1), 4), r"beyond the 4 there are, the first at token 1, sparse layer 0: \[0, 4\]"),
        (changed((2, 1, 0), 1), r"twice .* token 2, sparse layer 1: \[1, 1\]"),
    ],
)  # fmt: skip
def test_a_missing_or_misshapen_record_is_an_infrastructure_fault(
    tmp_path: Path, routes: Routes | None, named: str
) -> None:
    with pytest.raises(CaptureError, match=named):
        record(completion_of(routes), tmp_path, space=SPACE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=3, top_p=0.9), SamplingParams(max_tokens=3, top_k=5)])
def test_a_truncated_vocabulary_needs_its_sampling_masks(tmp_path: Path, params: SamplingParams) -> None:
    with pytest.raises(CaptureError, match="no sampling mask although top_p"):
        record(completion_of(), tmp_path, params=params)


def test_a_shortened_completion_keeps_the_record_of_what_is_left(tmp_path: Path) -> None:
    whole = completion_of(GOOD, MASK)
    short = truncated(whole, 2)
    assert truncated(whole, 3) is whole
    assert short.token_ids.tolist() == [1, 2]
    assert short.logprobs.tolist() == [-1, -2]
    assert short.versions.tolist() == [5, 5]
    assert short.finish is Finish.LENGTH
    assert short.sampling_mask is not None
    assert short.sampling_mask.sizes.tolist() == [2, 0]
    turn = record(short, tmp_path, space=SPACE, params=SamplingParams(max_tokens=3, top_p=0.9))
    (back,) = Payloads(ObjectStore(str(tmp_path))).fetch([turn])
    assert back.routes is not None
    assert np.array_equal(back.routes, GOOD[:3])  # of two prompt tokens and the first that was sampled


@pytest.mark.parametrize("tokens", [-1, 4])
def test_a_completion_cannot_be_cut_to_what_it_has_not(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"3 tokens cannot be truncated to {tokens}"):
        truncated(completion_of(), tokens)


@given(st.integers(0, 3))
def test_a_shortened_record_fits_its_turn(tokens: int) -> None:
    short = truncated(completion_of(GOOD, MASK), tokens)
    turn = turn_of(PROMPT, SamplingParams(max_tokens=3, top_p=0.9), short)
    assert turn.routes is not None
    assert len(turn.routes) == len(PROMPT) + tokens - 1
