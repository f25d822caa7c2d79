"""After any failures, as long as they stop, every step gets its batch, and nothing is left over."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn, TypeAlias, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.aio import never
from etude.config.rollouts import RolloutConfig
from etude.errors import EngineUnavailable, SandboxError, UserError
from etude.ledger.ledger import TRAIN, Ledger
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import FakeSandbox, FakeSessions, RolloutFakes, run_virtually
from etude.rollouts.sandbox import RolloutLimits
from etude.telemetry.log import EventLog
from etude.types import Finish, RolloutStatus, Task, Turn
from ledgers import new_task

ONE = np.ones(1, np.int32)
NEWEST = 99 * ONE
"""A weight version that is never too old."""
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=NEWEST, finish=Finish.STOP)
STEPS = 3
CONFIG = RolloutConfig(
    groups_per_step=2,
    group_size=3,
    max_staleness=1,
    concurrency=7,
    max_attempts=2,
    start_timeout_s=3.0,
    silence_timeout_s=4.0,
    grading_timeout_s=2.0,
)
WAIT_S = 2000.0
"""Virtual time within which any history must end: forty outages in a row are less."""

MEMORY = Path("/dev/shm")
"""Where a ledger is fastest; one is made for every example."""

Trouble: TypeAlias = Literal[
    "", "session", "world", "hung world", "agent", "silence", "grade", "hung grade", "forgotten", "kill"
]
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)


@dataclass
class Misery:
    """All parts of a context, which fail as a list says, one rollout after another, and then no more."""

    troubles: Iterator[Trouble]
    sessions: FakeSessions = field(default_factory=FakeSessions)
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    of_session: dict[str, Trouble] = field(default_factory=dict)
    opening: list[Trouble] = field(default_factory=list)

    async def open_session(self) -> Session:
        trouble: Trouble = next(self.troubles, "")
        if trouble == "session":
            raise EngineUnavailable("the gateway is down")
        session = await self.sessions.open()
        self.of_session[session.session_id] = trouble
        self.opening.append(trouble)
        return session

    async def open_environment(self, task: Task) -> Sandbox:
        trouble = self.opening.pop(0)
        if trouble == "world":
            raise SandboxError("no room")
        await asyncio.sleep(1e6 if trouble == "hung world" else 0.1)
        return FakeSandbox({}, lambda _: None)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        trouble = self.of_session[session.session_id]
        self.sessions.capture(session, TURN)
        await asyncio.sleep(1e6 if trouble == "silence" else 0.5)
        match trouble:
            case "agent":
                raise SandboxError("died")
            case "forgotten":
                self.sessions.forget()
            case "kill":
                self.killed.set()
        return HarnessResult(reason=trouble, counts={})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        if result.reason == "grade":
            raise SandboxError("died under the grader")
        await asyncio.sleep(1e6 if result.reason == "hung grade" else 0.1)
        return Grade(value=1.0, parts={})


@dataclass
class Gateways:
    """The sessions of :class:`Misery`."""

    misery: Misery

    async def open(self, *, min_version: int | None = None) -> Session:
        return await self.misery.open_session()

    async def fork(self, session_id: str) -> tuple[Session, int]:
        return await self.misery.sessions.fork(session_id)

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        return await self.misery.sessions.close(session_id)

    async def discard(self, session_id: str) -> None:
        await self.misery.sessions.discard(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        await never()


@dataclass
class Grounds:
    """The worlds of :class:`Misery`."""

    misery: Misery

    async def open(self, task: Task, *, gateway: str) -> Sandbox:
        return await self.misery.open_environment(task)


async def _unused(task: Task, session: Session) -> str:
    raise NotImplementedError


async def _train(ledger: Ledger, events: EventLog, troubles: Iterator[Trouble]) -> None:
    """The rollouts process, restarted when it is killed, and a trainer beside it."""
    misery = Misery(troubles)
    context = replace(
        RolloutFakes(_unused, lambda task: 0.0).context,
        sessions=Gateways(misery),
        sandboxes=Grounds(misery),
        harness=misery,
        grader=misery,
        limits=RolloutLimits.of(CONFIG),
    )
    dispatcher = Dispatcher(
        CONFIG,
        ledger=ledger,
        draw=new_task,
        context=context,
        events=events,
        serving_version=lambda: ledger.progress().steps_done,
    )
    trainer = asyncio.create_task(_consume(ledger))
    while await _is_killed(asyncio.create_task(dispatcher.train(STEPS)), misery.killed):
        misery.killed.clear()
        misery.opening.clear()
    await trainer
    assert len(misery.sessions) == 0


async def _is_killed(process: asyncio.Task[None], killed: asyncio.Event) -> bool:
    """Wait until a process has done its work, is killed, or gives up and is to be resumed; true unless it is done."""
    death = asyncio.create_task(killed.wait())
    await asyncio.wait([process, death], return_when=asyncio.FIRST_COMPLETED)
    death.cancel()
    if process.done() and not isinstance(process.exception(), UserError):
        process.result()
        return False
    process.cancel()
    await asyncio.wait([process])
    return True


async def _consume(ledger: Ledger) -> None:
    for step in range(1, STEPS + 1):
        while ledger.claim_batch(step, CONFIG.groups_per_step) is None:
            await asyncio.sleep(0.5)
        ledger.commit_step(step)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from(TROUBLES), max_size=40))
def test_after_any_finite_trouble_every_step_has_its_batch(troubles: list[Trouble]) -> None:
    place = MEMORY if MEMORY.is_dir() else None
    with TemporaryDirectory(dir=place) as folder, Ledger.open(Path(folder) / "ledger.db") as ledger:
        with EventLog(Path(folder) / "events", "rollouts") as events:
            run_virtually(asyncio.wait_for(_train(ledger, events, iter(troubles)), WAIT_S))
        progress = ledger.progress()
        assert (progress.steps_done, progress.consumed) == (STEPS, STEPS * CONFIG.groups_per_step)
        assert progress.open == progress.ready == 0
        counts = ledger.rollout_counts(TRAIN)
        assert counts[RolloutStatus.FAILED_INFRA] <= len(troubles) * CONFIG.concurrency  # all at once, if forgotten
        for group in ledger.groups(TRAIN):
            assert all(rollout.reason in ("", "kill") for rollout in group.rollouts)


def test_a_short_group_does_not_overtake_a_long_one() -> None:
    """Batches follow admission order: the first group trains first, however late it ends."""

    async def play(task: Task, session: Session) -> str:
        fakes.sessions.capture(session, TURN)
        await asyncio.sleep(100.0 if task.task_id == "0" else 1.0)
        return "submit"

    fakes = RolloutFakes(play, lambda task: 1.0)

    async def run(dispatcher: Dispatcher, ledger: Ledger) -> None:
        training = asyncio.create_task(dispatcher.train(2))
        await asyncio.sleep(50.0)
        assert (ledger.progress().ready, ledger.progress().open) == (1, 1)
        assert ledger.claim_batch(1, 2) is None
        await asyncio.sleep(60.0)
        claimed = ledger.claim_batch(1, 2)
        assert claimed
        assert [group.index for group in claimed] == [0, 1]
        training.cancel()

    config = CONFIG.model_copy(update={"max_staleness": 0, "concurrency": 6, "silence_timeout_s": 200.0})
    with (
        TemporaryDirectory() as folder,
        Ledger.open(Path(folder) / "ledger.db") as ledger,
        EventLog(Path(folder) / "events", "rollouts") as events,
    ):
        dispatcher = Dispatcher(
            config, ledger=ledger, draw=new_task, context=fakes.context, events=events, serving_version=lambda: 0
        )
        run_virtually(run(dispatcher, ledger))
