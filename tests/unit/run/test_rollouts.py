"""Requirements that a run checks before its rollouts start, and what an external harness gets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.aio import background_task
from etude.config.loading import default_recipe
from etude.config.recipe import EvalConfig
from etude.dashboard.statistics import mean_of
from etude.errors import ConfigError, UserError
from etude.ledger.ledger import Ledger
from etude.protocols import Session
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import FakeSandboxes, RolloutFakes
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.task_order import TaskOrder
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.process_name import ROLLOUTS
from etude.run.rollouts import (
    RolloutParts,
    ServedVersion,
    check_sandboxes,
    evaluate_on_the_way,
    evaluation_done,
    evaluations_due,
    harness_mounts,
    heldout_tasks,
    lost_all,
    train_and_evaluate,
    write_harness,
)
from etude.sandbox_spec import Capability
from etude.telemetry.events import EvalDone, EvalFailed, Event
from etude.telemetry.log import EventReader
from etude.types import AnswerChecks, Finish, Group, Split, Task, Turn
from ledgers import rollout, task
from waiting import WAIT_S, until

TURN = Turn(
    prompt_ids=np.ones(2, np.int32),
    completion_ids=np.ones(1, np.int32),
    logprobs=-np.ones(1, np.float32),
    versions=np.zeros(1, np.int32),
    finish=Finish.STOP,
)
"""A turn of one sampled token."""


def test_a_harness_gets_its_files_and_nothing_else_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    place = write_harness(folder.path, {"a.yaml": "x: 1\n"})
    assert write_harness(folder.path, {"a.yaml": "x: 2\n"}) == place
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("a.yaml", "x: 2\n")]
    assert place.stat().st_mode & 0o005 == 0o005
    assert place.parent.stat().st_mode & 0o077 == 0


def test_mounts_are_folders_of_this_machine(tmp_path: Path) -> None:
    assert harness_mounts([str(tmp_path)]) == {str(tmp_path): tmp_path}
    with pytest.raises(ConfigError, match="no-such-folder"):
        harness_mounts([str(tmp_path / "no-such-folder")])


def test_who_waits_for_another_version_is_woken_by_it() -> None:
    served_now = [3]

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"engine": {"version": served_now[0]}})

    async def wait() -> list[int]:
        app = web.Application()
        app.router.add_get("/healthz", health)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            served = ServedVersion(GatewayTable([str(server.make_url(""))]), http, outage_s=60.0)
            seen = []
            async with asyncio.timeout(60.0):
                for version in (3, 4):
                    served_now[0] = version
                    await served.changed(served())
                    seen.append(served())
            waiting = asyncio.create_task(served.changed(4))
            await asyncio.sleep(0.3)  # some polls, which say the same
            seen.append(int(waiting.done()))
            waiting.cancel()
            served.close()
            return seen

    assert asyncio.run(wait()) == [3, 4, False]


@dataclass(frozen=True)
class Few:
    """A family of some tasks, one of them twice; if endless, the tasks repeat."""

    tasks: int
    is_endless: bool = False

    def size(self, split: Split) -> int | None:
        return None if self.is_endless else self.tasks

    def task(self, split: Split, index: int) -> Task:
        assert self.is_endless or index < self.tasks
        name = f"{split.value}-{max(index % self.tasks, 1)}"
        return Task(
            task_id=name,
            family="few",
            template=name,
            split=split,
            prompt="?",
            files={},
            checks=AnswerChecks(answer="!"),
        )


def test_no_heldout_task_is_counted_twice() -> None:
    for few in (Few(4), Few(4, is_endless=True)):
        assert [task.task_id for task in heldout_tasks(few, 8)] == ["heldout-1", "heldout-2", "heldout-3"]
    assert len(heldout_tasks(Few(100), 8)) == 8
    with pytest.raises(ConfigError, match=r"tasks\.heldout_every.*etude\.split.*eval\.enabled"):
        heldout_tasks(Few(0), 8)


def test_an_evaluation_tells_what_passed_template_by_template() -> None:
    def group(index: int, template: str, reward: float | None) -> Group:
        rollouts = () if reward is None else (rollout(index, 0, reward=reward),)
        named = replace(task(index), template=template)
        return Group(index=index, task=named, admitted_version=0, rollouts=rollouts)

    def called(turns: Sequence[Turn]) -> list[str]:
        return ["read", "edit"][: 1 + len(turns)]

    templates, sampled = ["a", "a", "", "b"], (1.0, 0.405, 1.0, None)
    groups = [group(index, name, reward) for index, (name, reward) in enumerate(zip(templates, sampled, strict=True))]
    done = evaluation_done("before", 3, {"sampled": groups, "greedy": groups[:3] + groups[:1]}, called, pass_at=1.0)
    assert done.clusters == ["a", "a", "2", "b"]
    assert done.sampled_rewards == [1.0, 0.405, 1.0, None]
    assert done.sampled_passed == [True, False, True, None]
    assert (done.tasks, done.sampled_pass, done.greedy_pass) == (3, 2 / 3, 0.75)
    assert done.sampled_stderr == pytest.approx(mean_of([1.0, 0.0, 1.0], ["a", "a", "2"]).stderr)
    assert done.sampled_calls == done.greedy_calls == [{"read": 1.0}, {"edit": 1.0}]
    lenient = evaluation_done("before", 3, {"sampled": groups, "greedy": groups}, called, pass_at=0.4)
    assert lenient.sampled_pass == 1.0


def test_an_evaluation_of_failures_alone_says_why_the_last_one_failed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    with Ledger.open(folder.ledger) as ledger:
        ledger.admit_group(task(0), "before-greedy", 1, 0)
        for attempt, reason in enumerate(("no engine", "(exit 1); it printed: no key")):
            ledger.record(replace(rollout(0, 0, attempt, reward=None), reason=reason), "before-greedy")
    text = str(lost_all(folder, "before-greedy"))
    assert text.startswith("evaluation 'before-greedy': every rollout used up its attempts")
    assert "the last failed because of (exit 1); it printed: no key; fix that" in text


def test_rl_is_measured_on_the_way_between_its_ends() -> None:
    assert list(evaluations_due(40, EvalConfig(every_steps=10))) == [10, 20, 30]
    assert list(evaluations_due(5, EvalConfig(every_steps=10))) == []
    assert not evaluations_due(40, EvalConfig())
    assert not evaluations_due(40, EvalConfig(enabled=False, every_steps=10))


@contextlib.asynccontextmanager
async def rollout_parts(path: Path, play: Callable[[Task], None], served_now: list[int]) -> AsyncIterator[RolloutParts]:
    """A run of three steps, evaluated after each; its gateway serves the last of ``served_now``, if any."""

    async def health(request: web.Request) -> web.Response:
        if not served_now:
            return web.Response(status=503)
        return web.json_response({"engine": {"version": served_now[-1]}})

    async def play_one(task: Task, session: Session) -> str:
        play(task)
        sessions.capture(session, replace(TURN, versions=np.full(1, served_now[-1], np.int32)))
        return "submit"

    small = ["rollouts.group_size=2", "rollouts.groups_per_step=1"]
    config = default_recipe(["trainer.steps=3", "eval.every_steps=1", *small])
    folder, family, app = RunFolder.create(path / "run", config), Few(4, is_endless=True), web.Application()
    app.router.add_get("/healthz", health)
    fakes = RolloutFakes(play_one, lambda task: 1.0)
    sessions = fakes.sessions
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TestServer(app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        ledger = stack.enter_context(Ledger.open(folder.ledger))
        events = stack.enter_context(open_events(folder, ROLLOUTS))
        served = ServedVersion(GatewayTable([str(server.make_url(""))]), http, outage_s=0.0)
        stack.callback(served.close)
        dispatcher = Dispatcher(
            config.rollouts,
            ledger=ledger,
            draw=TaskOrder(family, seed=0).draw,
            context=fakes.context,
            events=events,
            serving_version=served,
        )
        yield RolloutParts(
            folder=folder,
            config=config,
            ledger=ledger,
            events=events,
            family=family,
            dispatcher=dispatcher,
            served=served,
            read_tools=lambda turns: [],
        )


def test_a_failed_evaluation_during_rl_is_reported_and_the_next_one_is_made(tmp_path: Path) -> None:
    served_now: list[int] = []
    seen: list[Event] = []

    def play(task: Task) -> None:
        if served_now[-1] == 1:
            raise UserError("the image of a held-out task is broken")

    async def run() -> None:
        async with rollout_parts(tmp_path, play, served_now) as parts:
            log = EventReader(parts.folder.events)

            def has_failed() -> bool:
                seen.extend(logged.event for logged in log.new())
                return any(isinstance(event, EvalFailed) for event in seen)

            async with background_task(evaluate_on_the_way(parts)) as evaluating:
                await asyncio.sleep(0.2)  # some polls without an answer
                served_now.append(1)
                await until(lambda: has_failed() or evaluating.done())
                served_now.append(2)
                await evaluating
            seen.extend(logged.event for logged in log.new())

    asyncio.run(run())
    (failed,) = [event for event in seen if isinstance(event, EvalFailed)]
    assert failed == EvalFailed(label="step-1", reason="UserError: the image of a held-out task is broken")
    assert [event.label for event in seen if isinstance(event, EvalDone)] == ["step-2"]


def test_a_bug_in_an_evaluation_ends_training_at_once(tmp_path: Path) -> None:
    def play(task: Task) -> None:
        if task.split is Split.HELDOUT:
            raise RuntimeError("a bug")

    async def run() -> None:
        async with rollout_parts(tmp_path, play, [1]) as parts, asyncio.timeout(WAIT_S):
            await train_and_evaluate(parts)  # no trainer takes its batches: it would never end

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(run())


class Sandboxes(FakeSandboxes):
    """Sandboxes that claim given capabilities."""

    def __init__(self, *claims: Capability) -> None:
        super().__init__()
        self._claims = frozenset(claims)

    async def capabilities(self) -> frozenset[Capability]:
        return self._claims


CONFINED = (Capability.CONFINED, Capability.NETWORK_OFF)


@pytest.mark.parametrize("claim", [Capability.FORK, Capability.LIVE_FORK])
def test_rollouts_branch_where_sandboxes_can_be_forked(claim: Capability) -> None:
    config = default_recipe(["credit.kind=shared_prefix", "credit.options.branches=2", "sandboxes.kind=ns"])
    asyncio.run(check_sandboxes(Sandboxes(*CONFINED, claim), config))
    with pytest.raises(ConfigError, match=r"branches = 2 forks sandboxes, which sandboxes\.kind = 'ns'"):
        asyncio.run(check_sandboxes(Sandboxes(*CONFINED), config))


def test_programs_of_a_model_are_locked_in_or_let_out_on_purpose() -> None:
    asyncio.run(check_sandboxes(Sandboxes(*CONFINED), default_recipe()))
    with pytest.raises(ConfigError, match="does not keep sandboxes network off"):
        asyncio.run(check_sandboxes(Sandboxes(*CONFINED[:1]), default_recipe()))
    asyncio.run(check_sandboxes(Sandboxes(), default_recipe(["sandboxes.options.allow_unconfined=true"])))
