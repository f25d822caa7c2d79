"""The native engine's scheduler: nothing lost, nothing computed twice, prefixes never across versions."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.engines.scheduler import Request, Scheduler
from etude.protocols import SamplingParams


def make_request(prompt: Sequence[int], max_tokens: int = 4, session: str = "s", stop: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_ids=stop)
    return Request(session=session, params=params, token_ids=list(prompt), prompt_length=len(prompt))


def make_scheduler(slots: int = 2, max_length: int = 64, prefill_tokens: int = 8) -> Scheduler:
    return Scheduler(slots=slots, max_length=max_length, prefill_tokens=prefill_tokens)


def finish_all(scheduler: Scheduler, version: int, token: int = 1) -> int:
    """Run to the end, sampling the same token always; returns the steps it took."""
    steps = 0
    while plan := scheduler.plan(version):
        steps += 1
        samplers = [work.request for work in plan if work.samples]
        for work in plan:
            scheduler.advance(work)
        for request in samplers:
            scheduler.append(request, token, -0.5, version)
            if request.finished:
                scheduler.finish(request)
    return steps


def test_a_long_prompt_is_read_in_chunks_before_it_samples() -> None:
    scheduler = make_scheduler(prefill_tokens=8)
    request = make_request(range(20), max_tokens=1)
    scheduler.add(request)
    chunks = []
    while not request.sampled:
        (work,) = scheduler.plan(0)
        chunks.append((work.start, work.count, work.samples))
        scheduler.advance(work)
        if work.samples:
            scheduler.append(request, 1, -0.1, 0)
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_decoding_goes_on_while_another_prompt_is_read() -> None:
    scheduler = make_scheduler(prefill_tokens=4)
    first, second = make_request([1, 2], session="a"), make_request(range(12), session="b")
    scheduler.add(first)
    for work in scheduler.plan(0):
        scheduler.advance(work)
    scheduler.append(first, 7, -0.1, 0)
    scheduler.add(second)
    assert [(work.request, work.count) for work in scheduler.plan(0)] == [(first, 1), (second, 4)]


def test_the_next_turn_of_a_session_starts_behind_what_is_cached() -> None:
    scheduler = make_scheduler(prefill_tokens=64)
    first = make_request(range(10), max_tokens=3)
    scheduler.add(first)
    finish_all(scheduler, version=0)
    scheduler.add(make_request([*first.token_ids, 5, 6, 7]))
    (work,) = scheduler.plan(0)
    # Everything but the last sampled token is in the cache: that one was never fed back.
    assert (work.start, work.count) == (12, 4)
    assert scheduler.counters.reused_tokens == 12


def test_a_new_version_never_reuses_an_old_prefix() -> None:
    scheduler = make_scheduler(prefill_tokens=64)
    first = make_request(range(10))
    scheduler.add(first)
    finish_all(scheduler, version=0)
    scheduler.add(make_request([*first.token_ids, 5]))
    (work,) = scheduler.plan(1)
    assert work.start == 0


def test_a_turn_during_a_swap_leaves_no_prefix_to_reuse() -> None:
    scheduler = make_scheduler(prefill_tokens=64)
    request = make_request([1, 2, 3], max_tokens=2)
    scheduler.add(request)
    for version in (0, 1):
        (work,) = scheduler.plan(version)
        scheduler.advance(work)
        scheduler.append(request, 9, -0.1, version)
    scheduler.finish(request)
    scheduler.add(make_request([*request.token_ids, 5]))
    (work,) = scheduler.plan(1)
    assert (request.versions, work.start) == ([0, 1], 0)


def test_a_prompt_that_was_half_read_at_a_swap_is_read_again() -> None:
    scheduler = make_scheduler(prefill_tokens=4)
    scheduler.add(make_request(range(10)))
    (work,) = scheduler.plan(0)
    scheduler.advance(work)
    (work,) = scheduler.plan(1)
    assert work.start == 0


def test_an_edited_history_reuses_only_the_common_part() -> None:
    scheduler = make_scheduler(prefill_tokens=64)
    scheduler.add(make_request([1, 2, 3, 4, 5, 6]))
    finish_all(scheduler, version=0)
    scheduler.add(make_request([1, 2, 3, 9, 9, 9]))
    (work,) = scheduler.plan(0)
    assert work.start == 3


@pytest.mark.parametrize(("prompt", "max_tokens"), [(60, 5), (1, 64), (3, 0)])
def test_a_request_that_never_fits_is_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        make_scheduler(max_length=64).add(make_request(range(prompt), max_tokens=max_tokens))


def test_a_cancelled_request_frees_its_slot() -> None:
    scheduler = make_scheduler(slots=1)
    running, waiting = make_request([1, 2]), make_request([3, 4], session="t")
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.plan(0)
    scheduler.cancel(running)
    assert [work.request for work in scheduler.plan(0)] == [waiting]
    scheduler.cancel(waiting)
    assert scheduler.plan(0) == []


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12),
    sessions=st.lists(st.sampled_from("abc"), min_size=12, max_size=12),
    slots=st.integers(1, 4),
    budget=st.integers(1, 40),
    swap_every=st.integers(1, 5),
)
def test_every_request_finishes_and_each_token_is_cached_once(
    prompts: list[list[int]], sessions: list[str], slots: int, budget: int, swap_every: int
) -> None:
    scheduler = make_scheduler(slots=slots, prefill_tokens=budget)
    requests = [make_request(p, 3, s) for p, s in zip(prompts, sessions, strict=False)]
    for request in requests:
        scheduler.add(request)
    step = 0
    while plan := scheduler.plan(version := step // swap_every):
        step += 1
        assert len({work.request.slot for work in plan}) == len(plan) <= slots
        assert sum(work.count for work in plan if work.count > 1) <= budget
        for work in plan:
            assert work.start == work.request.cached
        samplers = [work.request for work in plan if work.samples]
        for work in plan:
            scheduler.advance(work)
        for request in samplers:
            scheduler.append(request, 1, -0.5, version)
            if request.finished:
                scheduler.finish(request)
        assert step < 2_000
    assert all(request.sampled == 3 for request in requests)
    assert scheduler.running == scheduler.waiting == 0
