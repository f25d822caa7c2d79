"""Bundles of rollouts from launch to ledger: their shared turns, and their fate when machines fail."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from etude.config.credit import CreditConfig, SharedPrefixOptions
from etude.config.rollouts import RolloutConfig
from etude.errors import SandboxError
from etude.ledger.ledger import TRAIN, Ledger
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.rollouts.branching import Branching
from etude.rollouts.fake import FakeSandbox, RolloutFakes, run_virtually
from etude.rollouts.runner import RolloutRunner
from etude.telemetry.events import RolloutClosed
from etude.telemetry.log import EventLog, EventReader
from etude.trainer.batching.batch import build_batch
from etude.types import Branch, Finish, Group, Rollout, RolloutStatus, Task, Turn
from ledgers import task

SIZE, BRANCHES = 4, 2
GO_ON, SUBMIT = 1, 0
CREDIT = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=BRANCHES, branch_within=2))
CONFIG = RolloutConfig(group_size=SIZE, concurrency=SIZE, max_attempts=3)


def text_of(word: int, rollout: int) -> Turn:
    """A turn with one token, whose log probability identifies its rollout."""
    ids = np.array([word], np.int32)
    logprobs = np.array([-1 - rollout / 1000], np.float32)
    return Turn(
        prompt_ids=ids, completion_ids=ids, logprobs=logprobs, versions=np.zeros(1, np.int32), finish=Finish.STOP
    )


class Walkers:
    """Agents that write down a word a turn until they submit, and a world in which they do."""

    def __init__(self, lengths: Sequence[int], trouble: Callable[[int, int], None] = lambda run, turn: None) -> None:
        """Run number n, in order of start, submits in its turn ``lengths[n]``; later runs use the last entry.

        ``trouble`` is called with the run and the turn behind each that is the run's own, and may raise.
        """
        self.fakes = RolloutFakes(self._unused, lambda task: 1.0)
        self.context = replace(self.fakes.context, harness=self, grader=self, branching=Branching.of(CREDIT, 1))
        self.runs = 0
        self.left: list[str | None] = []
        self._lengths = lengths
        self._trouble = trouble

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        number, self.runs = self.runs, self.runs + 1
        length = self._lengths[min(number, len(self._lengths) - 1)]
        for turn in range(1, 100):
            await asyncio.sleep(0.1)
            own = text_of(SUBMIT if turn >= length else GO_ON, number)
            reply = self.fakes.sessions.capture(session, own)
            if reply.completion_ids[0] == SUBMIT:
                break
            if reply is own:
                self._trouble(number, turn)
            await sandbox.write_file("log", (await sandbox.read_file("log") or "") + f"{reply.logprobs[0]:.3f} ")
        return HarnessResult(reason="submit", counts={})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        self.left.append(await sandbox.read_file("log"))
        return Grade(value=1.0, parts={})

    async def _unused(self, task: Task, session: Session) -> str:
        raise NotImplementedError


@contextmanager
def runner_of(folder: Path, walkers: Walkers, purpose: str = TRAIN) -> Iterator[tuple[RolloutRunner, Ledger]]:
    with Ledger.open(folder / "ledger.db") as ledger, EventLog(folder / "events", "rollouts") as events:
        ledger.admit_group(task(0), purpose, SIZE, 0)
        yield (
            RolloutRunner(purpose, CONFIG, temperature=1.0, ledger=ledger, context=walkers.context, events=events),
            ledger,
        )


async def complete(runner: RolloutRunner, ledger: Ledger, purpose: str) -> None:
    async with runner:
        runner.launch(ledger.open_slots(purpose))
        assert len(runner) == SIZE
        assert all(slot in runner for slot in ledger.open_slots(purpose))
        while len(runner):
            await runner.turn(0.05)


def played(folder: Path, walkers: Walkers, purpose: str = TRAIN) -> Group:
    """The group, once all of its slots have ended."""
    with runner_of(folder, walkers, purpose) as (runner, ledger):
        run_virtually(complete(runner, ledger, purpose))
        assert walkers.fakes.is_tidy
        return ledger.group(purpose, 0)


def failed(folder: Path) -> list[RolloutClosed]:
    rows = [logged.event for logged in EventReader(folder / "events").new()]
    return [row for row in rows if isinstance(row, RolloutClosed) and row.status == RolloutStatus.FAILED_INFRA]


def walk(rollout: Rollout) -> list[float]:
    """The log probability of each turn: which run sampled it."""
    return [round(float(turn.logprobs[0]), 3) for turn in rollout.turns]


def test_branches_share_their_parents_turns_and_its_sandbox(tmp_path: Path) -> None:
    walkers = Walkers([4, 5, 4, 4])
    group = played(tmp_path, walkers)
    one, two, three, four = group.rollouts
    assert [rollout.slot for rollout in group.rollouts] == [0, 1, 2, 3]
    assert (one.branch, three.branch) == (None, None)
    assert two.branch is not None and two.branch.rollout_id == one.rollout_id
    assert four.branch is not None and four.branch.rollout_id == three.rollout_id
    assert walkers.runs == 4
    for parent, branch in ((one, two), (three, four)):
        assert branch.branch is not None
        shared = branch.branch.turns
        assert walk(branch)[:shared] == walk(parent)[:shared]
        assert not set(walk(branch)[shared:]) & set(walk(parent)[shared:])
        assert 0 < shared < len(parent.turns)
    logs = sorted(" ".join(f"{logprob:.3f}" for logprob in walk(rollout)[:-1]) + " " for rollout in group.rollouts)
    assert sorted(filter(None, walkers.left)) == logs


def test_a_parent_that_ends_before_it_forks_fills_its_bundle(tmp_path: Path) -> None:
    """No further rollouts are run, and the parent's turns are trained once."""
    walkers = Walkers([1])
    group = played(tmp_path, walkers)
    one, two, *_ = group.rollouts
    assert walkers.runs == 2
    assert two.branch == Branch(rollout_id=one.rollout_id, turns=1)
    assert (two.turns[0].logprobs, two.reward) == (one.turns[0].logprobs, one.reward)
    trained = build_batch(1, [group], "mean", {one.rollout_id: 1.0, two.rollout_id: 1.0}, CREDIT).trajectories
    assert [trajectory.rollout_id for trajectory in trained] == [one.rollout_id, group.rollouts[2].rollout_id]
    assert [float(trajectory.advantages[-1]) for trajectory in trained] == [-1.5, 1.5]


def fail_in(run: int, turn: int) -> Callable[[int, int], None]:
    def trouble(number: int, now: int) -> None:
        if (number, now) == (run, turn):
            raise SandboxError("the machine is gone")

    return trouble


def test_a_parent_that_fails_before_it_forks_is_tried_again_with_its_bundle(tmp_path: Path) -> None:
    walkers = Walkers([4], fail_in(0, 1))
    group = played(tmp_path, walkers)
    assert [rollout.attempt for rollout in group.rollouts] == [1, 0, 0, 0]
    assert group.rollouts[1].branch is not None
    assert group.rollouts[1].branch.rollout_id == group.rollouts[0].rollout_id
    assert (walkers.runs, len(failed(tmp_path))) == (5, 1)


def test_a_parent_that_fails_after_it_forked_leaves_its_branches_alone(tmp_path: Path) -> None:
    walkers = Walkers([4], fail_in(0, 3))
    group = played(tmp_path, walkers)
    first, second, *_ = group.rollouts
    assert (first.attempt, first.branch) == (1, None)
    assert second.branch is not None and second.branch.rollout_id != first.rollout_id
    assert not set(walk(first)) & set(walk(second))


def test_a_branch_that_fails_is_tried_again_as_a_rollout_of_its_own(tmp_path: Path) -> None:
    walkers = Walkers([4], fail_in(3, 3))
    group = played(tmp_path, walkers)
    (again,) = [rollout for rollout in group.rollouts if rollout.attempt]
    assert (again.slot % BRANCHES, again.branch) == (1, None)
    assert len(failed(tmp_path)) == 1


def test_a_parent_without_attempts_left_lets_its_bundle_start_by_itself(tmp_path: Path) -> None:
    left = [CONFIG.max_attempts]

    def trouble(number: int, turn: int) -> None:
        if number != 1 and turn == 1 and left[0]:  # run 1 is the other parent
            left[0] -= 1
            raise SandboxError("always")

    group = played(tmp_path, Walkers([4], trouble))
    assert group.lost == 1
    assert [(rollout.slot, rollout.branch is None) for rollout in group.rollouts] == [(1, True), (2, True), (3, False)]


def test_a_fork_that_fails_is_the_parents_failure(tmp_path: Path) -> None:
    walkers = Walkers([4])
    real, broken = FakeSandbox.fork, [True]

    class Unforkable(FakeSandbox):
        async def fork(self, count: int = 1) -> Sequence[FakeSandbox]:
            if broken.pop() if broken else False:
                raise SandboxError("no memory left")
            return await real(self, count)

    class Sandboxes:
        async def open(self, task: Task, *, gateway: str) -> FakeSandbox:
            return Unforkable({}, lambda _: None)

    walkers.context = replace(walkers.context, sandboxes=Sandboxes())
    group = played(tmp_path, walkers)
    (row,) = failed(tmp_path)
    assert row.reason == "SandboxError: no memory left"
    assert sorted(rollout.attempt for rollout in group.rollouts) == [0, 0, 0, 1]
    assert sum(rollout.branch is not None for rollout in group.rollouts) == 2


def test_a_runner_left_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    walkers = Walkers([50])

    async def leave(runner: RolloutRunner, ledger: Ledger, after_s: float) -> None:
        async with runner:
            runner.launch(ledger.open_slots(TRAIN))
            deadline = asyncio.get_running_loop().time() + after_s
            while asyncio.get_running_loop().time() < deadline:
                await runner.turn(0.01)

    for number, after_s in enumerate((0.05, 0.1, 0.15, 0.2, 0.25, 0.3)):
        (tmp_path / str(number)).mkdir()
        with runner_of(tmp_path / str(number), walkers) as (runner, ledger):
            run_virtually(leave(runner, ledger, after_s))
            assert walkers.fakes.is_tidy


def test_an_evaluation_does_not_branch(tmp_path: Path) -> None:
    group = played(tmp_path, Walkers([4]), "eval-first")
    assert [rollout.branch for rollout in group.rollouts] == [None] * SIZE
