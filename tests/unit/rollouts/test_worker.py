"""Ends of a rollout, and that it always cleans up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import aiohttp
import numpy as np
import pytest

from etude.errors import EngineUnavailable, JudgeUnavailable, SandboxError
from etude.harnesses.actions import Finding
from etude.ledger.ledger import OpenSlot
from etude.protocols import Grade, HarnessResult, Sandbox, Score, Session
from etude.rollouts.fake import RolloutFakes, run_virtually
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.worker import GradedRollout, ScoredRollout, run_rollout
from etude.types import Disposition, Finish, Rollout, RolloutStatus, ScriptChecks, Split, Task, Turn, Verdict
from records import CHECKS

ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)
TASK = Task(task_id="a", family="f", template="t", split=Split.TRAIN, prompt="", files={"a.py": ""}, checks=CHECKS)
SLOT = OpenSlot(task=TASK, group_index=3, slot=1, attempt=2)
LIMITS = RolloutLimits()


class Fakes(RolloutFakes):
    """Fakes with a session of one turn, after which the test decides."""

    def __init__(
        self, after: Callable[["Fakes"], Awaitable[str]], judge: Callable[[Task], float] = lambda task: 1.0
    ) -> None:
        async def play(task: Task, session: Session) -> str:
            self.sessions.capture(session, TURN)
            return await after(self)

        super().__init__(play, judge)

    async def attempt(self) -> Rollout:
        return await run_rollout(SLOT, self.context, rollout_id="r", temperature=1.0)


async def submit(fakes: Fakes) -> str:
    await asyncio.sleep(2.5)
    return "submit"


def test_a_played_and_judged_rollout_is_graded() -> None:
    fakes = Fakes(submit, judge=lambda task: 0.25)
    rollout = run_virtually(fakes.attempt())
    assert rollout == Rollout(
        rollout_id="r",
        group_index=3,
        slot=1,
        attempt=2,
        status=RolloutStatus.GRADED,
        reward=0.25,
        reward_parts={"judge": 0.25},
        reason="submit",
        turns=(TURN,),
        seconds=2.5,
        session_id="session-0",
        stage_s={"session": 0, "sandbox": 0, "model": 2.5, "tools": 0, "grading": 0, "scoring": 0},
    )
    assert fakes.is_tidy


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineUnavailable("no engine"), "EngineUnavailable: no engine"),
        (SandboxError("died"), "SandboxError: died"),
        (aiohttp.ServerDisconnectedError(), "ServerDisconnectedError: Server disconnected"),
        (ConnectionResetError("reset"), "ConnectionResetError: reset"),
        (TimeoutError("a call took too long"), "TimeoutError: a call took too long"),
    ],
)
def test_trouble_with_machines_is_no_reward(error: Exception, reason: str) -> None:
    async def fail(fakes: Fakes) -> str:
        raise error

    fakes = Fakes(fail)
    rollout = run_virtually(fakes.attempt())
    assert (rollout.status, rollout.reward, rollout.reason) == (RolloutStatus.FAILED_INFRA, None, reason)
    assert fakes.is_tidy


def test_a_harness_that_falls_silent_is_infrastructure() -> None:
    async def hang(fakes: Fakes) -> str:
        await asyncio.sleep(1e6)
        return "submit"

    fakes = Fakes(hang)
    rollout = run_virtually(fakes.attempt())
    assert rollout.status is RolloutStatus.FAILED_INFRA
    assert rollout.reason == "InfrastructureError: the agent: no sign of life within 600 s"
    assert rollout.seconds == pytest.approx(LIMITS.silence_s)
    assert fakes.is_tidy


def test_a_sandbox_that_does_not_start_closes_the_session() -> None:
    fakes = Fakes(submit)
    fakes.sandboxes.broken = "no namespaces"
    rollout = run_virtually(fakes.attempt())
    assert (rollout.status, rollout.reason) == (RolloutStatus.FAILED_INFRA, "SandboxError: no namespaces")
    assert fakes.is_tidy


def test_trouble_while_grading_is_infrastructure() -> None:
    tries: list[str] = []

    def judge(task: Task) -> float:
        tries.append(task.task_id)
        raise SandboxError("died under the grader")

    fakes = Fakes(submit, judge)
    assert run_virtually(fakes.attempt()).reason == "SandboxError: died under the grader"
    assert len(tries) == LIMITS.gradings
    assert fakes.is_tidy


def test_work_whose_grading_failed_once_is_graded_again_not_done_again() -> None:
    troubles = iter([SandboxError("died under the grader")])
    plays: list[Fakes] = []

    async def play(fakes: Fakes) -> str:
        plays.append(fakes)
        return "submit"

    def judge(task: Task) -> float:
        for trouble in troubles:
            raise trouble
        return 1.0

    rollout = run_virtually(Fakes(play, judge).attempt())
    assert (rollout.status, rollout.reward, len(plays)) == (RolloutStatus.GRADED, 1.0, 1)


class SlowGrader:
    """A grader whose runs take all the time that the task's checks allow."""

    def __init__(self, runs: int) -> None:
        self._runs = runs

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        assert isinstance(task.checks, ScriptChecks)
        await asyncio.sleep(self._runs * task.checks.timeout_s)
        return Grade(value=0.0, parts={})


@pytest.mark.parametrize(("runs", "status"), [(3, RolloutStatus.GRADED), (5, RolloutStatus.FAILED_INFRA)])
def test_every_run_of_a_verifier_has_its_whole_time(runs: int, status: RolloutStatus) -> None:
    slot = replace(SLOT, task=replace(TASK, checks=ScriptChecks(files={})))
    context = replace(Fakes(submit).context, grader=SlowGrader(runs))
    rollout = run_virtually(run_rollout(slot, context, rollout_id="r", temperature=1.0))
    assert rollout.status is status
    if status is RolloutStatus.FAILED_INFRA:
        assert rollout.reason == "InfrastructureError: grading: no end within 2700 s"


def test_a_gateway_that_forgot_the_session_is_infrastructure() -> None:
    async def restart(fakes: Fakes) -> str:
        fakes.sessions.forget()
        return "submit"

    fakes = Fakes(restart)
    rollout = run_virtually(fakes.attempt())
    assert (rollout.status, rollout.turns) == (RolloutStatus.FAILED_INFRA, ())
    assert rollout.reason.startswith("SessionLost: ")


def test_tokens_of_older_weights_than_the_group_was_admitted_at_are_infrastructure() -> None:
    for admitted_version, status in ((1, RolloutStatus.GRADED), (2, RolloutStatus.FAILED_INFRA)):
        fakes, slot = Fakes(submit), replace(SLOT, admitted_version=admitted_version)
        rollout = run_virtually(run_rollout(slot, fakes.context, rollout_id="r", temperature=1.0))
        assert rollout.status is status
    assert "sampled with weight version 1; every engine had served 2" in rollout.reason
    assert fakes.is_tidy


def test_the_first_failure_is_reported_not_what_it_broke() -> None:
    async def fail(fakes: Fakes) -> str:
        fakes.sessions.forget()
        raise EngineUnavailable("no engine")

    assert run_virtually(Fakes(fail).attempt()).reason == "EngineUnavailable: no engine"


def test_a_session_without_a_turn_is_infrastructure() -> None:
    async def play(task: Task, session: Session) -> str:
        return "submit"

    fakes = RolloutFakes(play, lambda task: 1.0)
    rollout = run_virtually(run_rollout(SLOT, fakes.context, rollout_id="r", temperature=1.0))
    assert rollout.status is RolloutStatus.FAILED_INFRA
    assert rollout.reason.endswith(
        "no turn: the harness never reached the gateway (submit); it printed: the end is submit"
    )
    assert fakes.is_tidy


def test_a_bug_is_raised_and_cleans_up() -> None:
    async def fail(fakes: Fakes) -> str:
        raise KeyError("a bug")

    fakes = Fakes(fail)
    with pytest.raises(KeyError, match="a bug"):
        run_virtually(fakes.attempt())
    assert fakes.is_tidy


def test_a_cancelled_rollout_cleans_up() -> None:
    async def hang(fakes: Fakes) -> str:
        await asyncio.sleep(60)
        return "submit"

    async def cancel(fakes: Fakes) -> None:
        rollout = asyncio.create_task(fakes.attempt())
        await asyncio.sleep(0.01)
        assert not fakes.is_tidy
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    fakes = Fakes(hang)
    run_virtually(cancel(fakes))
    assert fakes.is_tidy


class Lookout:
    """A monitor that records its calls and finds nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def begin(self, task: Task, sandbox: Sandbox) -> "Lookout":
        self.seen.append(f"begin {task.task_id}")
        return self

    async def look(self) -> None:
        self.seen.append("look")

    def fork(self, sandbox: Sandbox) -> "Lookout":
        return self

    def findings(self, turns: Sequence[Turn]) -> Sequence[Finding]:
        self.seen.append(f"findings in {len(turns)} turn")
        return ()


class FixedScorer:
    """Gives every rollout the same score, after ``seconds``."""

    def __init__(self, score: Score | Exception, seconds: float = 0.0) -> None:
        self._score = score
        self._seconds = seconds
        self.rollouts: list[GradedRollout] = []

    async def score(self, rollout: GradedRollout) -> ScoredRollout:
        await asyncio.sleep(self._seconds)
        self.rollouts.append(rollout)
        if isinstance(self._score, Exception):
            raise self._score
        return ScoredRollout(score=self._score, turn_rewards=(0.5,))


VERDICT = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy",), hacked=True, graded=1.0)


def scored(scorer: FixedScorer, lookout: Lookout | None = None) -> Rollout:
    """A rollout with a grade of 1."""
    context = replace(Fakes(submit).context, scorer=scorer, monitor=lookout)
    return run_virtually(run_rollout(SLOT, context, rollout_id="r", temperature=1.0))


def test_a_rollout_is_worth_its_score_decided_when_all_is_known() -> None:
    scorer, lookout = FixedScorer(Score(value=0.0, parts={"style": 0.5}, verdict=VERDICT)), Lookout()
    rollout = scored(scorer, lookout)
    assert lookout.seen == ["begin a", "look", "findings in 1 turn"]
    assert (rollout.status, rollout.reward, rollout.is_quarantined) == (RolloutStatus.GRADED, 0.0, True)
    assert (dict(rollout.reward_parts), rollout.verdict, rollout.turn_rewards) == ({"style": 0.5}, VERDICT, (0.5,))
    (graded,) = scorer.rollouts
    assert (graded.grade.value, graded.turns, graded.findings) == (1.0, (TURN,), ())
    unmonitored = FixedScorer(Score(value=-0.5, parts={}))
    assert scored(unmonitored).reward == -0.5
    assert unmonitored.rollouts[0].findings is None


def test_where_nothing_is_trained_a_masked_rollout_has_failed() -> None:
    """A measurement would take its 0 for a failure of the model."""
    scorer = FixedScorer(Score(value=0.0, parts={}, verdict=VERDICT, masked="no judge"))
    assert scored(scorer).is_quarantined
    context = replace(Fakes(submit).context, scorer=scorer).for_eval()
    rollout = run_virtually(run_rollout(SLOT, context, rollout_id="r", temperature=1.0))
    assert (rollout.status, rollout.reason) == (RolloutStatus.FAILED_INFRA, "InfrastructureError: no judge")


def test_a_scoring_may_take_longer_than_a_grading() -> None:
    """The judge has its own deadlines, one for each aspect."""
    assert scored(FixedScorer(Score(value=0.5, parts={}), 1.5 * LIMITS.grading_s)).reward == 0.5


def test_a_scorer_that_cannot_is_infrastructure() -> None:
    rollout = scored(FixedScorer(JudgeUnavailable("down")))
    assert (rollout.status, rollout.reason) == (RolloutStatus.FAILED_INFRA, "JudgeUnavailable: down")
