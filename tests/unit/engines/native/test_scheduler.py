"""The native engine's scheduler: nothing is lost, computed twice or starved, and no prefix is shared across versions.

A :class:`Machine` replaces the runner. Instead of keys, its cache holds what keys depend on: the whole history of a
position, and the version that wrote it. This reveals every page that was reused, shared or freed wrongly.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import (
    MAX_REREADS,
    EngineRequest,
    RequestState,
    ScheduledTokens,
    Scheduler,
    SwapMode,
)
from etude.errors import EngineBusy
from etude.protocols import SamplingParams

MIXED = -1
"""The version of a key that was computed from keys of several versions."""
CONTINUING = (SwapMode.KEEP, SwapMode.RECOMPUTE)


def make_request(
    prompt: Sequence[int], max_tokens: int = 4, priority: int = 0, stop: tuple[int, ...] = ()
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, priority=priority, stop_ids=stop)
    return EngineRequest(session="s", params=params, token_ids=list(prompt), prompt_length=len(prompt))


def make_scheduler(
    pages: int = 32, max_running: int = 4, max_waiting: int = 100, max_length: int = 256, step_tokens: int = 64
) -> Scheduler:
    return Scheduler(
        pages=pages,
        max_running=max_running,
        max_waiting=max_waiting,
        max_length=max_length,
        step_tokens=step_tokens,
    )


class Machine:
    """Computes plans as an engine does, and checks the context of every token."""

    def __init__(self, scheduler: Scheduler, step_tokens: int = 64) -> None:
        self.scheduler = scheduler
        self.step_tokens = step_tokens
        self.version = 0
        self.mixing = False
        """Whether keys of several versions may meet: some weights were exchanged in mode keep."""
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        """(page, offset) → (history of the position, version)."""

    def step(self) -> list[ScheduledTokens]:
        plan = self.scheduler.plan(self.version)
        self.scheduler.check()
        self._check_plan(plan)
        samplers = [work.request for work in plan if work.samples]
        for work in plan:
            self._compute(work)
        for work in plan:
            self.scheduler.advance(work)
            self.scheduler.check()
        for request in samplers:
            self.scheduler.append(request, 1000 + request.sampled % 3, -0.5, self.version)
            if request.finished:
                self.scheduler.finish(request)
        self.scheduler.check()
        return plan

    def run(self, steps: int = 10_000) -> int:
        """Step until there is nothing to do; returns the number of steps."""
        for step in range(steps):
            if not self.step():
                return step
        raise AssertionError(f"not done after {steps} steps")

    def swap(self, mode: SwapMode) -> None:
        self.version += 1
        self.mixing |= mode is SwapMode.KEEP
        self.scheduler.swapped(mode)

    def _check_plan(self, plan: list[ScheduledTokens]) -> None:
        assert sum(work.count for work in plan) <= self.step_tokens
        assert len({id(work.request) for work in plan}) == len(plan) <= self.scheduler.max_running
        ready = [work.start == len(work.request.token_ids) - 1 for work in plan]
        assert ready == sorted(ready, reverse=True), "decoding comes first"
        assert plan or not self.scheduler.running, "requests run, but nothing is computed"
        pages = [page for work in plan for page in self._written(work)]
        assert len(pages) == len(set(pages)), "two works write one page"

    def _written(self, work: ScheduledTokens) -> list[int]:
        assert work.start == work.request.cached
        return work.request.pages[work.start // PAGE : (work.start + work.count - 1) // PAGE + 1]

    def _compute(self, work: ScheduledTokens) -> None:
        request = work.request
        history, version = 0, self.version
        for position, token_id in enumerate(request.token_ids[: work.start + work.count]):
            history = hash((history, token_id))
            place = (request.pages[position // PAGE], position % PAGE)
            if position >= work.start:
                self.cells[place] = (history, version)
            seen, wrote = self.cells[place]
            assert seen == history, f"position {position} sees keys of other tokens"
            version = version if wrote == version else MIXED
        pure = version == self.version
        assert pure or (self.mixing and request.leaf is None), "keys of several versions meet or are indexed"


def start(scheduler: Scheduler, *requests: EngineRequest) -> Machine:
    machine = Machine(scheduler)
    for request in requests:
        scheduler.add(request)
    return machine


# Steps


def test_a_long_prompt_is_read_in_chunks_before_it_samples() -> None:
    request = make_request(range(20), max_tokens=1)
    machine = start(make_scheduler(step_tokens=8), request)
    machine.step_tokens = 8
    chunks = [(work.start, work.count) for _ in range(3) for work in machine.step()]
    assert (chunks, request.state) == ([(0, 8), (8, 8), (16, 4)], RequestState.DONE)


def test_decoding_goes_on_while_another_prompt_is_read() -> None:
    first, second = make_request([1, 2]), make_request(range(30))
    machine = start(make_scheduler(step_tokens=8), first)
    machine.step()
    machine.scheduler.add(second)
    assert [(work.request, work.count) for work in machine.step()] == [(first, 1), (second, 7)]


def test_sampled_tokens_are_kept_with_what_was_said_of_them() -> None:
    scheduler, request = make_scheduler(), make_request([1, 2], stop=(9,))
    scheduler.add(request)
    for token_id, version in ((7, 3), (9, 4)):
        (work,) = scheduler.plan(version)
        scheduler.advance(work)
        scheduler.append(request, token_id, -0.25, version)
    assert (request.token_ids, request.logprobs, request.versions) == ([1, 2, 7, 9], [-0.25, -0.25], [3, 4])
    assert (request.sampled, request.finished) == (2, True)


def test_a_plan_that_was_not_computed_is_made_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(range(20)))
    assert scheduler.plan(0) == scheduler.plan(0) != []


def test_a_step_too_small_for_the_running_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens is 3, less than max_running 4"):
        make_scheduler(max_running=4, step_tokens=3)


# Taking and giving up requests


@pytest.mark.parametrize(("prompt", "max_tokens"), [(250, 7), (1, 256), (3, 0), (0, 3)])
def test_a_request_that_never_fits_its_length_is_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        make_scheduler(max_length=256).add(make_request(range(prompt), max_tokens=max_tokens))


def test_a_request_that_never_fits_the_cache_is_refused() -> None:
    scheduler = make_scheduler(pages=2)
    with pytest.raises(ValueError, match="2 pages of 16"):
        scheduler.add(make_request(range(30), max_tokens=3))
    scheduler.add(make_request(range(30), max_tokens=2))


def test_one_more_than_may_wait_is_refused() -> None:
    scheduler = make_scheduler(max_waiting=2, max_running=1)
    machine = start(scheduler, make_request([1]), make_request([2]))
    with pytest.raises(EngineBusy, match="2 requests are waiting"):
        scheduler.add(make_request([3]))
    machine.step()
    scheduler.add(make_request([3]))


def test_cancelling_frees_everything_wherever_the_request_is() -> None:
    scheduler = make_scheduler(max_running=1)
    running, waiting, unknown = make_request(range(40)), make_request([3, 4]), make_request([5])
    machine = start(scheduler, running, waiting)
    machine.step()
    for request in (running, waiting, unknown, running):
        scheduler.cancel(request)
        scheduler.check()
    assert (scheduler.running, scheduler.waiting, scheduler.free_pages) == (0, 0, 32)
    assert machine.step() == []


def test_a_step_passes_by_what_was_cancelled_inside_it() -> None:
    scheduler, request = make_scheduler(), make_request(range(40))
    scheduler.add(request)
    (work,) = scheduler.plan(0)
    scheduler.cancel(request)
    scheduler.advance(work)
    scheduler.append(request, 1, -0.1, 0)
    scheduler.finish(request)
    scheduler.check()
    assert (request.cached, request.sampled, scheduler.free_pages) == (0, 0, 32)


# Reuse


def test_the_next_turn_starts_behind_the_full_pages_of_the_last_one() -> None:
    first = make_request(range(40), max_tokens=10)
    machine = start(make_scheduler(), first)
    machine.run()
    machine.scheduler.add(make_request([*first.token_ids, 5, 6]))
    (work,) = machine.step()
    assert (work.start, work.count) == (48, 4)
    assert machine.scheduler.counters.reused_tokens == 48


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    machine = start(make_scheduler(), make_request(range(32), max_tokens=1))
    machine.run()
    machine.scheduler.add(make_request(range(32), max_tokens=1))
    (work,) = machine.step()
    assert (work.start, work.count) == (16, 16)


def test_an_edited_history_reuses_only_the_common_part() -> None:
    machine = start(make_scheduler(), make_request(range(64)))
    machine.run()
    machine.scheduler.add(make_request([*range(40), 99, *range(41, 64)]))
    (work,) = machine.step()
    assert work.start == 32


def test_a_new_version_never_reuses_an_old_prefix() -> None:
    machine = start(make_scheduler(), make_request(range(40)))
    machine.run()
    machine.version = 1
    machine.scheduler.add(make_request(range(40)))
    (work,) = machine.step()
    assert work.start == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(4, 12),
    max_running=st.integers(1, 4),
    step_tokens=st.integers(4, 40),
)
def test_no_request_starves_among_equals_however_many_come(
    seed: int, pages: int, max_running: int, step_tokens: int
) -> None:
    """Each accepted request ends within the time that all before it would take one after the other."""
    scheduler = make_scheduler(pages=pages, max_running=max_running, max_waiting=6, step_tokens=step_tokens)
    machine, random_ = Machine(scheduler, step_tokens), random.Random(seed)
    accepted = dict[EngineRequest, int]()
    for step in range(250):
        prefix = [random_.randrange(2)] * random_.randrange(1, 40)
        request = make_request([*prefix, random_.randrange(3)], max_tokens=random_.randrange(1, 8))
        if scheduler.waiting < 6 and request.prompt_length + 8 <= pages * PAGE:
            scheduler.add(request)
            accepted[request] = step
        machine.step()
        slowest = 40 // min(step_tokens, 4) + 8
        assert all(step - arrived <= slowest * (6 + 2 * max_running) for arrived in accepted.values())
        accepted = {request: arrived for request, arrived in accepted.items() if request.state is not RequestState.DONE}


# Weights change


def test_a_prompt_that_was_half_read_is_read_again_but_not_for_ever() -> None:
    request = make_request(range(200))
    machine = start(make_scheduler(step_tokens=32), request)
    machine.mixing = True
    starts = list[int]()
    for _ in range(MAX_REREADS + 2):
        machine.version += 1
        starts += [work.start for work in machine.step()]
    assert starts == [0, 0, 0, 32]
    assert machine.scheduler.counters.rereads == MAX_REREADS


def test_keep_goes_on_with_old_keys_and_leaves_no_prefix_of_them() -> None:
    request = make_request(range(20), max_tokens=30)
    machine = start(make_scheduler(), request)
    machine.step()
    machine.swap(SwapMode.KEEP)
    (work,) = machine.step()
    assert work.start == 20
    machine.run()
    assert request.versions == [0] + [1] * 29
    for version in (0, 1):
        machine.version = version
        request = make_request(request.token_ids)
        machine.scheduler.add(request)
        (work,) = machine.step()
        # Of version 0 there is the page that was full before the exchange; of version 1 there is none.
        assert work.start == (PAGE if version == 0 else 0)
        machine.scheduler.cancel(request)


def test_recompute_reads_prompt_and_sampled_tokens_again() -> None:
    request = make_request(range(20), max_tokens=30)
    machine = start(make_scheduler(), request)
    for _ in range(5):
        machine.step()
    machine.swap(SwapMode.RECOMPUTE)
    (work,) = machine.step()
    assert (work.start, work.count) == (0, 25)
    machine.run()
    assert machine.scheduler.counters.rereads == 1
    # All its keys are of version 1 now: its next turn finds them.
    machine.scheduler.add(make_request(request.token_ids))
    (work,) = machine.step()
    assert work.start == 48


def test_what_was_not_yet_read_is_not_read_again() -> None:
    scheduler = make_scheduler(step_tokens=8)
    machine = start(scheduler, make_request(range(20)), make_request(range(100, 120)))
    machine.step()
    assert scheduler.running == 2
    machine.swap(SwapMode.RECOMPUTE)
    assert scheduler.counters.rereads == 1


def test_samples_that_are_read_again_share_that_too() -> None:
    scheduler = make_scheduler(pages=100, max_running=8, step_tokens=64)
    requests = [make_request(range(150), max_tokens=4) for _ in range(8)]
    machine = start(scheduler, *requests)
    for _ in range(4):
        machine.step()
    assert scheduler.running == 8
    before = scheduler.counters.prefill_tokens
    machine.swap(SwapMode.RECOMPUTE)
    machine.run()
    assert scheduler.counters.prefill_tokens - before <= 150 + 8 * (PAGE + 4)


def test_drain_ends_what_is_in_progress_and_begins_nothing() -> None:
    scheduler = make_scheduler(max_running=1)
    first, second = make_request([1], max_tokens=3), make_request([2], max_tokens=3)
    machine = start(scheduler, first, second)
    machine.step()
    scheduler.begin_drain()
    assert not scheduler.drained
    with pytest.raises(ValueError, match="drain while 1 requests run"):
        scheduler.swapped(SwapMode.DRAIN)
    machine.run()
    assert scheduler.drained and second.state is RequestState.WAITING
    machine.swap(SwapMode.DRAIN)
    scheduler.end_drain()
    machine.run()
    assert (first.versions, second.versions) == ([0, 0, 0], [1, 1, 1])


def test_drain_waits_for_a_preempted_request_too() -> None:
    scheduler = make_scheduler(max_running=1)
    victim = make_request([1], max_tokens=9, priority=1)
    machine = start(scheduler, victim)
    machine.step()
    scheduler.add(make_request([2], max_tokens=2))
    machine.step()
    scheduler.begin_drain()
    machine.step()
    assert (victim.state, scheduler.running, scheduler.drained) == (RequestState.WAITING, 0, False)
    machine.run()
    assert scheduler.drained and victim.finished


# Anything


prompts = st.tuples(st.integers(0, 2), st.integers(0, 70), st.lists(st.integers(0, 1), min_size=1, max_size=4))


class Anything(RuleBasedStateMachine):
    """All operations in random order: nothing is lost, and no request reads wrong keys or keys of mixed versions."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = list[EngineRequest]()
        self.create(pages=8, max_running=2, step_tokens=16)

    @initialize(pages=st.integers(6, 24), max_running=st.integers(1, 5), step_tokens=st.integers(5, 48))
    def create(self, pages: int, max_running: int, step_tokens: int) -> None:
        self.pages = pages
        scheduler = make_scheduler(pages=pages, max_running=max_running, max_waiting=12, step_tokens=step_tokens)
        self.machine = Machine(scheduler, step_tokens)

    @rule(prompt=prompts, max_tokens=st.integers(1, 20), priority=st.integers(0, 2), copies=st.integers(1, 3))
    def add(self, prompt: tuple[int, int, list[int]], max_tokens: int, priority: int, copies: int) -> None:
        letter, length, end = prompt
        for _ in range(copies):
            request = make_request([*([letter] * length), *end], max_tokens, priority)
            full = self.machine.scheduler.waiting >= 12
            try:
                self.machine.scheduler.add(request)
            except EngineBusy:
                assert full
            else:
                assert not full
                self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def continue_or_cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.state is RequestState.DONE and len(request.token_ids) < 80 and self.machine.scheduler.waiting < 12:
            self.requests.append(make_request([*request.token_ids, 5], 3))
            self.machine.scheduler.add(self.requests[-1])
        else:
            self.machine.scheduler.cancel(request)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.machine.step()

    @rule(mode=st.sampled_from(CONTINUING))
    def swap(self, mode: SwapMode) -> None:
        self.machine.swap(mode)

    @rule()
    def begin_drain(self) -> None:
        self.machine.scheduler.begin_drain()

    @rule()
    def end_drain(self) -> None:
        if self.machine.scheduler.drained:
            self.machine.swap(SwapMode.DRAIN)
        self.machine.scheduler.end_drain()

    @invariant()
    def holds(self) -> None:
        self.machine.scheduler.check()

    def teardown(self) -> None:
        scheduler = self.machine.scheduler
        scheduler.end_drain()
        self.machine.run()
        assert all(request.state is RequestState.DONE for request in self.requests)
        assert (scheduler.running, scheduler.waiting, scheduler.free_pages) == (0, 0, self.pages)


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_ten_thousand_operations_leave_nothing_behind() -> None:
    random_ = random.Random(4)
    scheduler = make_scheduler(pages=40, max_running=6, max_waiting=20, step_tokens=48)
    machine = Machine(scheduler, 48)
    requests = list[EngineRequest]()
    for _ in range(10_000):
        draw = random_.random()
        if draw < 0.25 and scheduler.waiting < 20:
            prompt = [random_.randrange(3)] * random_.randrange(60) + [random_.randrange(2) for _ in range(5)]
            requests.append(make_request(prompt, random_.randrange(1, 30), random_.randrange(3)))
            scheduler.add(requests[-1])
        elif draw < 0.30 and requests:
            scheduler.cancel(random_.choice(requests[-20:]))
        elif draw < 0.31:
            machine.swap(random_.choice(CONTINUING))
        else:
            machine.step()
    machine.run()
    assert all(request.state is RequestState.DONE for request in requests)
    assert (scheduler.running, scheduler.waiting, scheduler.free_pages) == (0, 0, 40)
    counters = scheduler.counters
    assert min(counters.preempted, counters.evicted_pages, counters.rereads, counters.reused_tokens) > 50
