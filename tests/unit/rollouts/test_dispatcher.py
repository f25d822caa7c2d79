"""Rollouts, ledger and a fake trainer: which groups are trained, what is retried, and the state after a restart."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Protocol, TypeAlias

import numpy as np
import pytest

from etude.config.rollouts import RolloutConfig
from etude.config.tasks import SelectionConfig, ThompsonOptions
from etude.errors import SandboxError, UserError
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.protocols import Session
from etude.rollouts.breaker import FIRST_OUTAGE_S
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import RolloutFakes, run_virtually
from etude.rollouts.schedule import PAUSES
from etude.rollouts.task_history import SelectedTasks
from etude.rollouts.task_order import TaskOrder
from etude.rollouts.task_selection import TaskSelection
from etude.rollouts.worker import RolloutContext
from etude.sandboxes.remote.hosts import SandboxLoad
from etude.telemetry.events import Outage, RolloutClosed, RolloutsStats
from etude.telemetry.log import EventLog, EventReader
from etude.trainer.batching.batch import build_batch
from etude.types import Finish, Rollout, RolloutStatus, Split, Task, Turn
from records import CHECKS

Play: TypeAlias = Callable[[Task], Awaitable[None]]


@dataclass(frozen=True)
class Numbers:
    """A family whose tasks are numbers; every third task repeats the one before, up to a last one."""

    different: int = 10**9
    tasks: int | None = None
    """Indices that it has; ``None``: any number of them."""

    def size(self, split: Split) -> int | None:
        return self.tasks

    def task(self, split: Split, index: int) -> Task:
        number = min(index - index // 3, self.different - 1)
        return Task(
            task_id=f"{split}-{number}",
            family="numbers",
            template="t",
            split=split,
            prompt=str(number),
            files={},
            checks=CHECKS,
        )


ALL_NUMBERS = Numbers()


@dataclass
class Bench:
    """A dispatcher with everything it needs, in one folder."""

    folder: Path
    config: RolloutConfig
    family: Numbers
    play: Play | None
    ledger: Ledger = field(init=False)
    log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger.open(self.folder / "ledger.db")
        self.log = EventLog(self.folder / "events", "rollouts")
        self.random = Random(0)
        self.most_in_flight = 0
        self.fakes = RolloutFakes(self._play, lambda task: self.random.choice([0.0, 1.0]))
        self.dispatcher = self.new_dispatcher()

    def new_dispatcher(
        self, *, context: RolloutContext | None = None, draw: Callable[[int], TaskDraw] | None = None
    ) -> Dispatcher:
        """A dispatcher of what is here, with ``context`` or ``draw`` instead of its own."""
        return Dispatcher(
            self.config,
            ledger=self.ledger,
            draw=draw or TaskOrder(self.family, seed=0).draw,
            context=context or self.fakes.context,
            events=self.log,
            serving_version=self.version,
        )

    def version(self) -> int:
        return self.ledger.progress().steps_done

    async def _play(self, task: Task, session: Session) -> str:
        for _ in range(self.random.randint(1, 3)):
            self.fakes.sessions.capture(session, self.turn())
            self.most_in_flight = max(self.most_in_flight, len(self.fakes.sessions))
            await asyncio.sleep(self.random.random() * 0.004)
        if self.play:
            await self.play(task)
        return "submit"

    def turn(self) -> Turn:
        ids = np.ones(2, np.int32)
        versions = np.full(2, self.version(), np.int32)
        return Turn(
            prompt_ids=ids,
            completion_ids=ids,
            logprobs=-ids.astype(np.float32),
            versions=versions,
            finish=Finish.STOP,
        )

    async def trainer(self, steps: int) -> list[int]:
        """Pretend to train; the highest staleness of each step."""
        staleness = []
        for step in range(self.ledger.progress().steps_done + 1, steps + 1):
            while (groups := self.ledger.claim_batch(step, self.config.groups_per_step)) is None:
                await asyncio.sleep(0.02)
            batch = build_batch(step, groups)
            staleness.append(int(batch.staleness.max()))
            await asyncio.sleep(0.005)
            self.ledger.commit_step(step)
        return staleness

    def closed(self) -> list[RolloutClosed]:
        events = [logged.event for logged in EventReader(self.folder / "events").new()]
        return [event for event in events if isinstance(event, RolloutClosed)]

    def close(self) -> None:
        self.ledger.close()
        self.log.close()


class MakeBench(Protocol):
    """Makes benches in the test's folder and closes them after the test."""

    def __call__(self, config: RolloutConfig, *, play: Play | None = None, family: Numbers = ...) -> Bench: ...


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MakeBench]:
    with ExitStack() as stack:

        def make(config: RolloutConfig, *, play: Play | None = None, family: Numbers = ALL_NUMBERS) -> Bench:
            made = Bench(tmp_path, config, family, play)
            stack.callback(made.close)
            return made

        yield make


def config(*, max_staleness: int = 1, concurrency: int = 8, max_attempts: int = 3) -> RolloutConfig:
    return RolloutConfig(
        groups_per_step=2,
        group_size=2,
        max_staleness=max_staleness,
        concurrency=concurrency,
        max_attempts=max_attempts,
        timeout_s=5.0,
    )


def failed(group_index: int, slot: int) -> Rollout:
    return Rollout(
        rollout_id=f"{group_index}.{slot}",
        group_index=group_index,
        slot=slot,
        attempt=0,
        status=RolloutStatus.FAILED_INFRA,
        reward=None,
        reason="the process was killed before it gave up",
    )


def replace_size(config: RolloutConfig, group_size: int) -> RolloutConfig:
    return config.model_copy(update={"group_size": group_size, "concurrency": 2 * group_size * config.groups_per_step})


@pytest.mark.parametrize(("max_staleness", "concurrency"), [(0, 4), (1, 8), (2, 5)])
def test_training_gets_its_batches_and_no_token_is_too_stale(
    bench: MakeBench, max_staleness: int, concurrency: int
) -> None:
    steps = 6
    here = bench(config(max_staleness=max_staleness, concurrency=concurrency))

    async def run() -> list[int]:
        _, staleness = await asyncio.gather(here.dispatcher.train(steps), here.trainer(steps))
        return staleness

    staleness = run_virtually(run())
    assert max(staleness) <= max_staleness
    assert here.most_in_flight <= concurrency
    progress = here.ledger.progress()
    assert (progress.consumed, progress.admitted, progress.steps_done) == (12, 12, 6)
    assert [group.task.task_id for group in here.ledger.groups(TRAIN)] == [f"train-{n}" for n in range(12)]
    assert len({event.rollout_id for event in here.closed()}) == 24
    assert here.fakes.is_tidy


def test_a_group_is_announced_before_it_asks_for_its_sandboxes(bench: MakeBench) -> None:
    announced: list[tuple[str, int]] = []

    async def play(task: Task) -> None:
        assert (task.task_id, 2) in announced

    here = bench(config(), play=play)
    context = replace(here.fakes.context, announce=lambda task, count: announced.append((task.task_id, count)))
    here.dispatcher = here.new_dispatcher(context=context)

    async def run() -> None:
        await asyncio.gather(here.dispatcher.train(2), here.trainer(2))

    run_virtually(run())
    assert sorted(announced) == [(f"train-{n}", 2) for n in range(len(announced))]
    assert len(announced) == here.ledger.progress().admitted


def test_another_version_wakes_the_dispatcher_at_once(bench: MakeBench) -> None:
    """Neither the end of a rollout nor the next look at slots is waited for."""
    here, served, changed, admitted_s = bench(config()), [0], asyncio.Event(), list[float]()
    clock = here.fakes.context.clock

    async def version_changed(version: int) -> None:
        while served[0] == version:
            await changed.wait()
            changed.clear()

    here.dispatcher = Dispatcher(
        here.config,
        ledger=here.ledger,
        draw=TaskOrder(here.family, seed=0).draw,
        context=replace(
            here.fakes.context,
            announce=lambda task, count: admitted_s.append(clock.now()),
            version_changed=version_changed,
        ),
        events=here.log,
        serving_version=lambda: served[0],
    )

    async def run() -> float:
        rolling = asyncio.create_task(here.dispatcher.train(20))
        await asyncio.sleep(1.2345)
        served[0] = 1
        changed.set()
        await asyncio.sleep(0.5)
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)
        return clock.now()

    assert run_virtually(run()) < 2.0, "before the next look"
    late = [at for at in admitted_s if at > 1.0]
    assert len(late) == here.config.groups_per_step
    assert late == pytest.approx([1.2345] * len(late))


def test_a_failed_slot_is_tried_again_after_a_pause(bench: MakeBench) -> None:
    failures = iter([SandboxError("died"), SandboxError("died again")])

    async def fail_twice(task: Task) -> None:
        for error in failures:
            raise error

    here = bench(config(), play=fail_twice)

    async def run() -> float:
        await here.dispatcher.train(1)
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) >= PAUSES.delay_s(1)
    assert here.ledger.rollout_counts(TRAIN) == {"graded": 4, "failed_infra": 2, "dropped": 0}
    assert here.ledger.progress().dropped == 0
    assert sorted(event.reason for event in here.closed() if event.status == "failed_infra") == [
        "SandboxError: died",
        "SandboxError: died again",
    ]


def test_a_group_out_of_attempts_is_dropped_and_replaced(bench: MakeBench) -> None:
    async def fail_for_first(task: Task) -> None:
        if task.prompt == "0":
            raise SandboxError("died")

    here = bench(config(), play=fail_for_first)
    run_virtually(here.dispatcher.train(1))
    progress = here.ledger.progress()
    assert (progress.dropped, progress.ready, progress.admitted) == (1, 2, 3)
    claimed = here.ledger.claim_batch(1, 2)
    assert claimed
    assert [group.task.prompt for group in claimed] == ["1", "2"]
    assert here.fakes.is_tidy


def test_a_dropped_group_cancels_its_other_rollouts(bench: MakeBench) -> None:
    slots = iter(range(2))

    async def one_fails_one_hangs(task: Task) -> None:
        if task.prompt != "0":
            return
        if next(slots, 1) == 0:
            await asyncio.sleep(60)
        raise SandboxError("died")

    here = bench(config(), play=one_fails_one_hangs)
    run_virtually(here.dispatcher.train(1))
    counts = here.ledger.rollout_counts(TRAIN)
    assert (counts[RolloutStatus.FAILED_INFRA], counts[RolloutStatus.DROPPED]) == (3, 1)
    assert here.fakes.is_tidy


def test_training_stops_when_nothing_succeeds(bench: MakeBench) -> None:
    here = bench(config())
    here.fakes.sandboxes.broken = "no namespaces on this machine"

    async def run() -> float:
        with pytest.raises(UserError, match="no namespaces on this machine"):
            await here.dispatcher.train(1)
        return asyncio.get_running_loop().time()

    assert FIRST_OUTAGE_S <= run_virtually(run()) <= 2 * FIRST_OUTAGE_S
    assert here.fakes.is_tidy


def test_an_outage_costs_no_slot_its_attempts(bench: MakeBench) -> None:
    here = bench(config(max_attempts=3))

    async def run() -> None:
        training = asyncio.create_task(here.dispatcher.train(2))
        trainer = asyncio.create_task(here.trainer(2))
        here.fakes.sandboxes.broken = "the machine is down"
        await asyncio.sleep(40.0)
        here.fakes.sandboxes.broken = ""
        await asyncio.gather(training, trainer)

    run_virtually(run())
    progress = here.ledger.progress()
    assert (progress.consumed, progress.dropped) == (4, 0)
    failed = [event for event in here.closed() if event.status == "failed_infra"]
    assert 8 <= len(failed) <= 16


def test_machines_that_stay_away_are_waited_for_and_told_of(bench: MakeBench) -> None:
    """Regression: nothing was reported while a region was away, until the whole run ended."""
    plays = count()

    async def away_for_long(task: Task) -> None:
        if next(plays) >= 4 and asyncio.get_running_loop().time() < 100.0:
            raise SandboxError("the region is away")

    here = bench(config(max_attempts=3), play=away_for_long)

    async def run() -> None:
        await asyncio.gather(here.dispatcher.train(3), here.trainer(3))

    run_virtually(run())
    assert here.ledger.progress().steps_done == 3
    message = [one.event for one in EventReader(here.folder / "events").new() if isinstance(one.event, Outage)]
    assert "the region is away" in message[0].reason
    assert max(event.seconds for event in message) > 60.0
    assert message[-1].seconds == 0.0, "it is over"


def test_a_group_is_complete_without_the_slots_it_lost(bench: MakeBench) -> None:
    calls = Counter[str]()

    async def fail_in_one_slot(task: Task) -> None:
        calls[task.prompt] += 1
        if task.prompt == "0" and (calls["0"] == 1 or calls["0"] > 4):
            raise SandboxError("died")

    here = bench(replace_size(config(), 4), play=fail_in_one_slot)
    run_virtually(here.dispatcher.train(1))
    progress = here.ledger.progress()
    assert (progress.ready, progress.dropped) == (2, 0)
    claimed = here.ledger.claim_batch(1, 2)
    assert claimed
    assert [len(group.rollouts) for group in claimed] == [3, 4]
    assert here.ledger.open_slots(TRAIN) == []


def test_a_group_of_which_too_few_are_left_is_dropped_at_once(bench: MakeBench) -> None:
    calls = Counter[str]()

    async def one_hangs_and_three_fail(task: Task) -> None:
        calls[task.prompt] += 1
        if task.prompt == "0" and calls["0"] == 1:
            await asyncio.sleep(5000.0)
        if task.prompt == "0":
            raise SandboxError("died")

    here = bench(replace_size(config(), 4), play=one_hangs_and_three_fail)

    async def run() -> float:
        await here.dispatcher.train(1)
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) < 100.0
    assert here.ledger.progress().dropped == 1
    assert here.ledger.rollout_counts(TRAIN)[RolloutStatus.DROPPED] == 1
    assert here.fakes.is_tidy


def test_a_restart_gives_up_slots_whose_attempts_were_used_up(bench: MakeBench) -> None:
    here = bench(replace_size(config(max_attempts=1), 4))
    for number, failures in enumerate([1, 3]):
        assert here.ledger.admit_group(ALL_NUMBERS.task(Split.TRAIN, 1000 + 3 * number), TRAIN, 4, 0) == number
        for slot in range(failures):
            here.ledger.record(failed(number, slot), TRAIN)
    run_virtually(here.dispatcher.train(1))
    assert [len(here.ledger.group(TRAIN, index).rollouts) for index in range(3)] == [3, 0, 4]
    assert here.ledger.progress().dropped == 1
    assert here.fakes.is_tidy


def test_slots_that_another_process_left_behind_are_taken_over(bench: MakeBench) -> None:
    here = bench(config(max_staleness=0, concurrency=4))

    async def run() -> None:
        training = asyncio.create_task(here.dispatcher.train(2))
        trainer = asyncio.create_task(here.trainer(2))
        await asyncio.sleep(0)
        assert here.ledger.admit_group(ALL_NUMBERS.task(Split.TRAIN, 1000), TRAIN, 2, 0) == 2
        await asyncio.gather(training, trainer)

    run_virtually(run())
    assert here.ledger.progress().consumed == 4
    assert len(here.ledger.group(TRAIN, 2).rollouts) == 2


def test_a_bug_in_a_rollout_stops_training_at_once(bench: MakeBench) -> None:
    async def fail(task: Task) -> None:
        raise KeyError("a bug")

    here = bench(config(), play=fail)
    with pytest.raises(KeyError, match="a bug"):
        run_virtually(here.dispatcher.train(1))
    assert here.fakes.is_tidy


def test_a_rollout_that_was_cancelled_from_outside_stops_training(bench: MakeBench) -> None:
    async def cancelled(task: Task) -> None:
        raise asyncio.CancelledError

    here = bench(config(), play=cancelled)

    async def run() -> None:
        async with asyncio.timeout(5):
            await here.dispatcher.train(1)

    with pytest.raises(RuntimeError, match="group 0 was cancelled"):
        run_virtually(run())
    assert len(here.ledger.open_slots(TRAIN)) == 4
    assert here.fakes.is_tidy


def test_epochs_go_on_over_a_restart_and_each_task_is_trained_on_once_in_each(bench: MakeBench) -> None:
    few, steps = Numbers(tasks=7), 9  # five different tasks, two groups a step: three epochs and more

    async def interrupted(here: Bench, after: int) -> None:
        running = [asyncio.create_task(here.dispatcher.train(steps)), asyncio.create_task(here.trainer(steps))]
        while here.ledger.progress().steps_done < after:
            await asyncio.sleep(0.001)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    first, second = bench(config(), family=few), bench(config(), family=few)
    run_virtually(interrupted(first, after=4))
    run_virtually(interrupted(second, after=steps))
    trained = [(group.epoch, group.task.task_id) for group in second.ledger.groups(TRAIN)]
    assert len(set(trained)) == len(trained) == 2 * steps
    assert [epoch for epoch, _ in trained] == sorted(1 + number // 5 for number in range(2 * steps))
    assert all(len({name for epoch, name in trained if epoch == number}) == 5 for number in (1, 2, 3))


def test_tasks_that_are_chosen_and_groups_that_are_sampled_again_fill_every_step(tmp_path: Path) -> None:
    """Task 0 is solved, task 1 is hopeless, the others are random; groups left out are counted and bounded."""
    steps, most = 12, 2
    here = Bench(tmp_path, config().model_copy(update={"max_resamples": most}), Numbers(tasks=7), None)
    here.fakes = RolloutFakes(
        here._play, lambda task: {"0": 1.0, "1": 0.0}.get(task.prompt, here.random.choice([0.0, 1.0]))
    )
    selection = TaskSelection(SelectionConfig(kind="thompson", options=ThompsonOptions()), size=7, seed=0)
    here.dispatcher = here.new_dispatcher(draw=SelectedTasks(here.family, selection, here.ledger).draw)

    async def run() -> list[int]:
        _, staleness = await asyncio.gather(here.dispatcher.train(steps), here.trainer(steps))
        return staleness

    assert max(run_virtually(run())) <= here.config.max_staleness
    left_out = [here.ledger.resampled(step) for step in range(1, steps + 1)]
    progress = here.ledger.progress()
    assert progress.consumed == 2 * steps
    assert 0 < sum(left_out) <= progress.dropped
    assert max(left_out) <= 2 * most  # what was left out before a claim may lie behind the batch that was claimed
    groups = list(here.ledger.groups(TRAIN))
    assert len({(group.task.task_id, group.epoch) for group in groups}) == len(groups)
    here.close()


def test_places_in_use_are_reported_with_those_of_sandboxes(tmp_path: Path) -> None:
    async def slow(task: Task) -> None:
        await asyncio.sleep(1.0)

    here = Bench(tmp_path, config(concurrency=4), ALL_NUMBERS, slow)
    context = replace(here.fakes.context, sandbox_load=lambda: SandboxLoad(demand=7, capacity=5))
    here.dispatcher = here.new_dispatcher(context=context)

    async def run() -> None:
        await asyncio.gather(here.dispatcher.train(6), here.trainer(6))

    run_virtually(run())
    reports = [logged.event for logged in EventReader(tmp_path / "events").new()
               if isinstance(logged.event, RolloutsStats)]  # fmt: skip
    assert {(each.capacity, each.sandboxes, each.sandbox_room) for each in reports} == {(4, 7, 0)}
    assert reports[0].running == 0 and max(each.running for each in reports) == 4
    here.close()


def test_a_restart_fills_the_slots_that_were_open(bench: MakeBench) -> None:
    async def hang_on_second(task: Task) -> None:
        if task.prompt == "1":
            await asyncio.sleep(60)

    first = bench(config(max_staleness=0, concurrency=4), play=hang_on_second)

    async def interrupted() -> None:
        training = asyncio.create_task(first.dispatcher.train(1))
        while not first.ledger.progress().ready:
            await asyncio.sleep(0.001)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    run_virtually(interrupted())
    assert first.fakes.is_tidy
    assert [(slot.group_index, slot.attempt) for slot in first.ledger.open_slots(TRAIN)] == [(1, 0), (1, 0)]
    second = bench(config(max_staleness=0, concurrency=4))
    run_virtually(second.dispatcher.train(1))
    assert second.ledger.rollout_counts(TRAIN) == {"graded": 4, "failed_infra": 0, "dropped": 0}
    assert second.ledger.progress().admitted == 2


@pytest.mark.parametrize(("pass_at", "passed"), [(1.0, False), (0.4, True)])
def test_a_fraction_is_a_pass_where_the_recipe_says_so(bench: MakeBench, pass_at: float, passed: bool) -> None:
    here = bench(config())
    here.fakes = RolloutFakes(here._play, lambda task: 0.405)
    dispatcher = Dispatcher(
        here.config,
        ledger=here.ledger,
        draw=TaskOrder(here.family, seed=0).draw,
        context=replace(here.fakes.context, pass_at=pass_at),
        events=here.log,
        serving_version=lambda: 0,
    )
    run_virtually(dispatcher.evaluate("before", [ALL_NUMBERS.task(Split.HELDOUT, 0)], temperature=0.0))
    assert [event.passed for event in here.closed()] == [passed]


def test_an_evaluation_may_have_fewer_tries_at_a_time_than_the_run(bench: MakeBench) -> None:
    tasks, at_a_time = [ALL_NUMBERS.task(Split.HELDOUT, index) for index in range(9)], []
    for number, concurrency in enumerate((1, 3, None)):
        here = bench(config(concurrency=8))
        here.most_in_flight = 0
        run_virtually(here.dispatcher.evaluate(f"try-{number}", tasks, temperature=0.0, concurrency=concurrency))
        at_a_time.append(here.most_in_flight)
    assert at_a_time == [1, 3, 8]


def test_an_evaluation_goes_on_where_it_was_interrupted(bench: MakeBench) -> None:
    tasks = [ALL_NUMBERS.task(Split.HELDOUT, index) for index in range(9)]
    played: list[str] = []

    async def stop_at_fifth(task: Task) -> None:
        played.append(task.prompt)
        if len(played) == 5:
            raise KeyError("killed")

    here = bench(config(concurrency=2), play=stop_at_fifth)
    with pytest.raises(KeyError):
        run_virtually(here.dispatcher.evaluate("before", tasks, temperature=0.0))
    done = here.ledger.rollout_counts("before")
    rewards = run_virtually(here.dispatcher.evaluate("before", tasks, temperature=0.0))
    assert len(rewards) == 9
    assert rewards == [group.rollouts[0].reward for group in here.ledger.groups("before")]
    assert [group.task for group in here.ledger.groups("before")] == tasks
    assert len(here.closed()) == 9
    assert 3 <= sum(done.values()) <= 5
    assert run_virtually(here.dispatcher.evaluate("before", tasks, temperature=0.0)) == rewards
    assert here.ledger.progress().admitted == 0
