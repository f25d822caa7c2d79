"""A hung machine's rollout is retried; a rollout whose model takes too long is graded as it is, never the reverse."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from command_results import ended
from etude.config.loading import parse_config
from etude.errors import InfrastructureError, OutOfTime
from etude.ledger.ledger import OpenSlot
from etude.protocols import ExecResult, Grade, HarnessResult, Sandbox, Session
from etude.rollouts.fake import FakeSandbox, RolloutFakes, run_virtually
from etude.rollouts.sandbox import COPIES_S, FILES_S, GRACE_S, BoundedSandbox, RolloutLimits, within
from etude.rollouts.worker import run_rollout
from etude.types import Finish, Rollout, RolloutStatus, Task, Turn
from records import TASK

ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)
SLOT = OpenSlot(task=TASK, group_index=0, slot=0, attempt=0)
LIMITS = RolloutLimits(commands_s=100.0, silence_s=50.0)
NEVER_S = 1e7


class SlowSandbox(FakeSandbox):
    """Commands run for ``takes_s`` or until their limit; with ``hangs``, commands never answer."""

    def __init__(self) -> None:
        super().__init__({}, lambda _: None)
        self.takes_s = 0.0
        self.hangs = False

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 5.0, **_: object) -> ExecResult:
        seconds = min(self.takes_s, timeout_s)
        await asyncio.sleep(NEVER_S if self.hangs else seconds)
        return ended(timed_out=self.takes_s > timeout_s, seconds=seconds)

    async def read_file(self, path: str) -> str | None:
        await asyncio.sleep(NEVER_S if self.hangs else 0.0)
        return None

    async def fork(self, count: int = 1) -> Sequence[FakeSandbox]:
        await asyncio.sleep(NEVER_S if self.hangs else 0.0)
        return [self] * count


Act = Callable[[Sandbox], Awaitable[None]]


@dataclass
class Agent:
    """A harness that does one thing, after its first model call."""

    fakes: RolloutFakes
    act: Act

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        self.fakes.sessions.capture(session, TURN)
        await self.act(sandbox)
        return HarnessResult(reason="submit", counts={})


@dataclass
class Ground:
    """One world that a test slows down."""

    sandbox: SlowSandbox

    async def open(self, task: Task, *, gateway: str) -> Sandbox:
        return self.sandbox


class TestingGrader:
    """Runs a command of its own."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        assert not (await sandbox.exec(["true"], timeout_s=60.0)).timed_out
        return Grade(value=float(result.reason == "submit"), parts={})


def rollout(sandbox: SlowSandbox, act: Act, limits: RolloutLimits = LIMITS) -> Rollout:
    async def play(task: Task, session: Session) -> str:
        raise NotImplementedError

    fakes = RolloutFakes(play, lambda task: 1.0)
    context = replace(
        fakes.context, harness=Agent(fakes, act), sandboxes=Ground(sandbox), grader=TestingGrader(), limits=limits
    )
    ended = run_virtually(run_rollout(SLOT, context, rollout_id="r", temperature=1.0))
    assert len(fakes.sessions) == 0
    return ended


def test_commands_that_take_all_the_time_there_is_are_graded_as_they_stand() -> None:
    sandbox, done = SlowSandbox(), Counter[str]()

    async def act(hands: Sandbox) -> None:
        sandbox.takes_s = 30.0
        for _ in range(10):
            await hands.exec(["sleep"], timeout_s=60.0)
            done["whole"] += 1

    ended = rollout(sandbox, act)
    assert (ended.status, ended.reward, ended.reason) == (RolloutStatus.GRADED, 0.0, OutOfTime.REASON)
    assert done["whole"] == 3
    assert ended.seconds == pytest.approx(LIMITS.commands_s + 30.0)  # the grader's own command, as slow
    assert len(ended.turns) == 1


def test_a_command_that_ends_just_in_time_leaves_none_for_the_next() -> None:
    sandbox = SlowSandbox()

    async def act(hands: Sandbox) -> None:
        sandbox.takes_s = 100.0
        assert not (await hands.exec(["sleep"], timeout_s=200.0)).timed_out
        sandbox.takes_s = 0.0
        await hands.exec(["true"])
        raise AssertionError

    assert rollout(sandbox, act).reason == OutOfTime.REASON


def test_the_graders_commands_are_not_the_agents_time() -> None:
    sandbox = SlowSandbox()

    async def act(hands: Sandbox) -> None:
        sandbox.takes_s = 99.0
        await hands.exec(["sleep"], timeout_s=200.0)
        sandbox.takes_s = 59.0

    ended = rollout(sandbox, act)
    assert (ended.status, ended.reward, ended.reason) == (RolloutStatus.GRADED, 1.0, "submit")


def test_waiting_for_the_model_takes_nothing_off_its_time() -> None:
    async def act(hands: Sandbox) -> None:
        for _ in range(40):
            await asyncio.sleep(45.0)  # an engine that is slow, but alive
            await hands.read_file("a.py")

    ended = rollout(SlowSandbox(), act)
    assert (ended.status, ended.reward) == (RolloutStatus.GRADED, 1.0)
    assert ended.seconds == pytest.approx(40 * 45.0)


@pytest.mark.parametrize(
    ("call", "bound_s"),
    [
        (lambda hands: hands.exec(["true"], timeout_s=7.0), 7.0 + GRACE_S),
        (lambda hands: hands.read_file("a.py"), FILES_S),
        (lambda hands: hands.fork(), COPIES_S),
    ],
)
def test_a_hung_sandbox_is_given_up_and_is_no_reward(
    call: Callable[[Sandbox], Awaitable[object]], bound_s: float
) -> None:
    sandbox = SlowSandbox()

    async def act(hands: Sandbox) -> None:
        sandbox.hangs = True
        await call(hands)

    ended = rollout(sandbox, act)
    assert (ended.status, ended.reward) == (RolloutStatus.FAILED_INFRA, None)
    assert f"no end within {bound_s:g} s" in ended.reason
    assert ended.seconds == pytest.approx(bound_s)


def test_a_long_command_is_a_sign_of_life_until_its_limit() -> None:
    sandbox = SlowSandbox()

    async def act(hands: Sandbox) -> None:
        sandbox.takes_s = 90.0  # longer than a harness may be silent
        await hands.exec(["make"], timeout_s=95.0)
        sandbox.takes_s = 0.0
        await asyncio.sleep(45.0)

    assert rollout(sandbox, act).reason == "submit"


def test_a_harness_that_times_out_by_itself_is_not_mistaken_for_silence() -> None:
    async def act(hands: Sandbox) -> None:
        async with asyncio.timeout(1.0):
            await asyncio.sleep(2.0)

    ended = rollout(SlowSandbox(), act)
    assert (ended.status, ended.reason) == (RolloutStatus.FAILED_INFRA, "TimeoutError: ")


def test_copies_of_a_bounded_sandbox_are_bounded() -> None:
    async def run() -> None:
        sandbox = SlowSandbox()
        (copy,) = await BoundedSandbox(sandbox).fork()
        sandbox.hangs = True
        with pytest.raises(InfrastructureError, match="reading a file"):
            await copy.read_file("a.py")

    run_virtually(run())


def test_what_ends_in_time_is_handed_on() -> None:
    async def work() -> int:
        await asyncio.sleep(3.0)
        return 7

    assert run_virtually(within(4.0, "work", work())) == 7
    with pytest.raises(InfrastructureError, match="work: no end within 2 s"):
        run_virtually(within(2.0, "work", work()))


def test_limits_are_those_of_a_recipe() -> None:
    rollouts = {"timeout_s": 1.0, "start_timeout_s": 2.0, "silence_timeout_s": 300.0, "grading_timeout_s": 4.0}
    config = parse_config({"rollouts": rollouts}, source="t").rollouts
    assert RolloutLimits.of(config) == RolloutLimits(start_s=2.0, commands_s=1.0, silence_s=300.0, grading_s=4.0)


def test_turns_that_touch_no_sandbox_are_no_silence() -> None:
    for harness, expected_s in (({"max_turns": 19, "turn_timeout_s": 60.0}, 1200.0), ({"max_turns": 2}, 600.0)):
        config = parse_config({"harness": {"options": harness}}, source="t")
        assert RolloutLimits.of(config.rollouts, config.harness).silence_s == expected_s
