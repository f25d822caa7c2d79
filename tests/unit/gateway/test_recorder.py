"""What an engine says of a turn is proven, stowed, or refused by name."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from etude.errors import CaptureError
from etude.gateway.recorder import Recorder
from etude.ledger.payloads import Payloads
from etude.protocols import Completion, EngineHealth, Piece, SamplingParams
from etude.types import Finish, KeptSets, Routes, RouteSpace, Turn

PROMPT, SPACE = [7, 8], RouteSpace(layers=2, slots=2, experts=4)
GOOD = np.tile(np.array([[0, 3], [2, 1]], np.uint16), (4, 1, 1))
KEPT = KeptSets(offsets=np.array([0, 2, 2, 3], np.int64), token_ids=np.array([1, 4, 3], np.int32))


class RecordedEngine:
    """Always samples 1, 2, 3 and says of it what it was told to say."""

    def __init__(self, routes: Routes | None = None, kept: KeptSets | None = None) -> None:
        self.asked: list[SamplingParams] = []
        self._routes, self._kept = routes, kept

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.asked.append(params)
        ids = np.array([1, 2, 3], np.int32)
        return Completion(
            token_ids=ids,
            logprobs=-ids.astype(np.float32),
            versions=np.full(3, 5, np.int32),
            finish=Finish.LENGTH,
            routes=self._routes,
            kept=self._kept,
        )

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str
    ) -> AsyncGenerator[Piece, None]:
        completion = await self.generate(prompt_ids, params, session=session)
        yield Piece(token_ids=completion.token_ids, logprobs=completion.logprobs, versions=completion.versions)

    async def health(self) -> EngineHealth:
        return EngineHealth(version=5, digest="d", running=0, waiting=0)


def record(
    engine: RecordedEngine, folder: Path, *, space: RouteSpace | None = None, params: SamplingParams | None = None
) -> Turn:
    recorder = Recorder(engine, Payloads(folder), space)
    return asyncio.run(recorder.sample(PROMPT, params or SamplingParams(max_tokens=3, temperature=0.5), "s"))


def test_a_turn_is_what_the_engine_said(tmp_path: Path) -> None:
    engine = RecordedEngine()
    turn = record(engine, tmp_path)
    assert turn.prompt_ids.tolist() == PROMPT
    assert turn.completion_ids.tolist() == [1, 2, 3]
    assert turn.logprobs.tolist() == [-1, -2, -3]
    assert turn.versions.tolist() == [5, 5, 5]
    assert (turn.finish, turn.temperature, turn.payload) == (Finish.LENGTH, 0.5, None)
    assert [params.want_routes for params in engine.asked] == [False]
    assert list(tmp_path.iterdir()) == []


def test_routes_are_asked_for_and_stowed(tmp_path: Path) -> None:
    engine = RecordedEngine(GOOD)
    turn = record(engine, tmp_path, space=SPACE)
    assert [params.want_routes for params in engine.asked] == [True]
    assert turn.payload is not None
    assert turn.routes is None
    back = Payloads(tmp_path).fetch(turn).routes
    assert back is not None
    assert np.array_equal(back, GOOD)


def test_routes_that_nobody_wants_are_not_kept(tmp_path: Path) -> None:
    assert record(RecordedEngine(GOOD), tmp_path).payload is None


def test_kept_sets_are_stowed_whether_or_not_routes_are_wanted(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3, top_p=0.9)
    turn = record(RecordedEngine(kept=KEPT), tmp_path, params=params)
    back = Payloads(tmp_path).fetch(turn).kept
    assert back is not None
    assert back.sizes.tolist() == [2, 0, 1]


def changed(at: tuple[int, int, int], expert: int) -> Routes:
    routes: npt.NDArray[np.uint16] = GOOD.copy()
    routes[at] = expert
    return routes


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (None, "no routes although they were asked for"),
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
        record(RecordedEngine(routes), tmp_path, space=SPACE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=3, top_p=0.9), SamplingParams(max_tokens=3, top_k=5)])
def test_a_cut_vocabulary_needs_its_kept_sets(tmp_path: Path, params: SamplingParams) -> None:
    with pytest.raises(CaptureError, match="no kept sets although top_p"):
        record(RecordedEngine(), tmp_path, params=params)
