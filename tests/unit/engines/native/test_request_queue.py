"""The request queue: prefills are shared, higher priority runs first, and takes from lower only what it needs.

The queue is tested through the scheduler, its only user.
"""

from collections.abc import Sequence

import pytest

from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import EngineRequest, RequestState, ScheduledTokens, Scheduler, SwapMode
from etude.protocols import SamplingParams

WAITING, RUNNING = RequestState.WAITING, RequestState.RUNNING


def make_request(prompt: Sequence[int], max_tokens: int = 4, priority: int = 0) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, priority=priority)
    return EngineRequest(session="s", params=params, token_ids=list(prompt), prompt_length=len(prompt))


def make_scheduler(pages: int = 32, max_running: int = 4, step_tokens: int = 64) -> Scheduler:
    return Scheduler(pages=pages, max_running=max_running, max_waiting=100, max_length=2000, step_tokens=step_tokens)


def add(scheduler: Scheduler, *requests: EngineRequest) -> None:
    for request in requests:
        scheduler.add(request)


def step(scheduler: Scheduler) -> list[ScheduledTokens]:
    plan = scheduler.plan(0)
    samplers = [work.request for work in plan if work.samples]
    for work in plan:
        scheduler.advance(work)
    for request in samplers:
        scheduler.append(request, 1000, -0.5, 0)
        if request.finished:
            scheduler.finish(request)
    scheduler.check()
    return plan


def run(scheduler: Scheduler) -> int:
    """Step until there is nothing to do; returns the number of steps."""
    for count in range(1_000):
        if not step(scheduler):
            return count
    raise AssertionError("not done after 1,000 steps")


# A prefill in progress is shared


@pytest.mark.parametrize("length", [1000, 1008])
def test_samples_of_one_prompt_share_its_prefill(length: int) -> None:
    n = 64
    scheduler = make_scheduler(pages=400, max_running=n, step_tokens=256)
    requests = [make_request(range(length), max_tokens=3) for _ in range(n)]
    add(scheduler, *requests)
    steps = run(scheduler)
    assert scheduler.counters.prefill_tokens <= length + n * PAGE
    assert scheduler.counters.prefill_tokens + scheduler.counters.reused_tokens == n * length
    assert steps < 15
    assert all(request.sampled == 3 for request in requests)


def test_who_shares_only_a_beginning_goes_on_when_that_is_computed() -> None:
    first, second = make_request(range(200)), make_request([*range(48), *range(500, 600)])
    scheduler = make_scheduler(step_tokens=64)
    add(scheduler, first, second)
    assert [(work.request, work.count) for work in step(scheduler)] == [(first, 64)]
    step(scheduler)
    assert (second.state, second.cached) == (RUNNING, 48)


def test_others_are_not_held_up_by_one_that_waits_for_a_prefill() -> None:
    reader, follower, other = make_request(range(100)), make_request(range(100)), make_request([7, 8])
    scheduler = make_scheduler(step_tokens=64)
    add(scheduler, reader, follower, other)
    step(scheduler)
    assert (reader.state, follower.state, other.state) == (RUNNING, WAITING, RUNNING)


@pytest.mark.parametrize("why", ["cancel", "swap", "preempt"])
def test_who_waits_for_a_prefill_that_stops_goes_on_alone(why: str) -> None:
    scheduler = make_scheduler(max_running=2, step_tokens=32)
    reader, follower = make_request(range(100), priority=1), make_request(range(100), priority=1)
    add(scheduler, reader, follower)
    step(scheduler)
    if why == "cancel":
        scheduler.cancel(reader)
    elif why == "swap":
        scheduler.swapped(SwapMode.RECOMPUTE)
    else:
        for letter in (500, 600):
            scheduler.add(make_request(range(letter, letter + 40), max_tokens=30))
        step(scheduler)
        assert (reader.state, scheduler.counters.preempted) == (WAITING, 1)
    run(scheduler)
    assert follower.finished


def test_no_request_waits_for_the_prefill_of_a_worse_priority() -> None:
    worse, better = make_request(range(200), priority=1), make_request(range(200))
    scheduler = make_scheduler()
    add(scheduler, worse)
    step(scheduler)
    scheduler.add(better)
    step(scheduler)
    assert better.state is RUNNING


# Priorities and room


def test_lower_priority_numbers_go_first_then_earlier_arrivals() -> None:
    scheduler = make_scheduler(max_running=1)
    requests = [make_request([i], max_tokens=1, priority=priority) for i, priority in enumerate((2, 1, 2, 0))]
    add(scheduler, *requests)
    order = [requests.index(work.request) for _ in requests for work in step(scheduler)]
    assert order == [3, 1, 0, 2]


def test_a_better_request_preempts_the_worst() -> None:
    scheduler = make_scheduler(max_running=2)
    early, late = make_request([1], priority=1, max_tokens=50), make_request([2], priority=1, max_tokens=50)
    add(scheduler, early, late)
    step(scheduler)
    same, better = make_request([3], priority=1), make_request([4])
    add(scheduler, same, better)
    step(scheduler)
    assert (early.state, late.state, same.state, better.state) == (RUNNING, WAITING, WAITING, RUNNING)
    assert scheduler.counters.preempted == 1
    run(scheduler)
    assert [request.sampled for request in (early, late, same, better)] == [50, 50, 4, 4]


def test_a_preempted_request_finds_its_full_pages_again() -> None:
    scheduler = make_scheduler(max_running=1)
    victim = make_request(range(40), priority=1, max_tokens=20)
    add(scheduler, victim)
    for _ in range(12):
        step(scheduler)
    scheduler.add(make_request([1, 2]))
    for _ in range(4):
        step(scheduler)
    (work,) = step(scheduler)
    assert (work.request, work.start, work.count) == (victim, 48, 4)


def test_the_latest_of_equals_makes_room_when_pages_run_out() -> None:
    scheduler = make_scheduler(pages=6)
    first, second = make_request(range(30), max_tokens=50), make_request(range(100, 130), max_tokens=50)
    add(scheduler, first, second)
    while not scheduler.counters.preempted:
        step(scheduler)
    assert (first.state, second.state) == (RUNNING, WAITING)
    run(scheduler)
    assert first.finished and second.finished


def test_the_worst_keeps_its_pages_while_it_waits_for_another() -> None:
    scheduler = make_scheduler(pages=5)
    long, short = make_request(range(40), max_tokens=6), make_request(range(100, 130), max_tokens=40)
    add(scheduler, long, short)
    while len(step(scheduler)) == 2:
        pass
    assert (short.state, short.cached, scheduler.counters.preempted) == (RUNNING, 32, 0)
    run(scheduler)
    assert short.finished and scheduler.counters.preempted == 0


def test_who_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(pages=8)
    add(scheduler, make_request(range(60), max_tokens=40))
    step(scheduler)
    large, small = make_request(range(100, 180)), make_request([1])
    add(scheduler, large, small)
    while large.state is WAITING:
        assert small.state is WAITING
        step(scheduler)
    assert small.state is RUNNING


def test_a_request_that_was_passed_over_preempts_no_later_one() -> None:
    scheduler = make_scheduler(max_running=2, step_tokens=16)
    reader, follower, later = make_request(range(40)), make_request(range(40)), make_request([7], max_tokens=30)
    add(scheduler, reader, follower, later)
    while reader.state is not RequestState.DONE:
        step(scheduler)
        assert follower.state is WAITING
    step(scheduler)
    assert (follower.state, later.state, scheduler.counters.preempted) == (RUNNING, RUNNING, 0)


def test_no_request_is_preempted_in_vain() -> None:
    scheduler = make_scheduler(pages=8)
    add(scheduler, make_request(range(70), max_tokens=30), make_request(range(100, 117), priority=1, max_tokens=20))
    step(scheduler)
    step(scheduler)
    assert (scheduler.running, scheduler.free_pages) == (2, 1)
    add(scheduler, make_request(range(200, 290)))
    step(scheduler)
    assert (scheduler.running, scheduler.waiting, scheduler.counters.preempted) == (2, 1, 0)
    run(scheduler)


def test_room_that_was_missing_once_is_not_asked_for_again() -> None:
    scheduler = make_scheduler(pages=12, max_running=2, step_tokens=256)
    short, victim = make_request(range(300, 370), max_tokens=2), make_request(range(120), max_tokens=60, priority=1)
    add(scheduler, short, victim)
    step(scheduler)
    assert victim.state is WAITING
    while victim.state is WAITING:
        step(scheduler)
    twin, other = make_request(range(120), max_tokens=60), make_request([1], max_tokens=2)
    add(scheduler, twin, other)
    while other.state is not RequestState.DONE:
        step(scheduler)
    assert (victim.state, twin.state) == (WAITING, RUNNING)
    step(scheduler)
    # Most of its pages are held by its twin: few are missing.
    assert (victim.state, victim.cached > 100, scheduler.free_pages < 8) == (RUNNING, True, True)
