"""Branching rollouts with all real parts: gateway, built-in harness, sandboxes on this machine, ledger.

The actions in a rollout's record must be what its sandbox contains, shared turns included. The turns that rollouts
share are bit-identical, and they are trained once.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
import numpy as np

from etude.clock import SystemClock
from etude.config.credit import CreditConfig, SharedPrefixOptions
from etude.config.rollouts import CodingOptions, RolloutConfig
from etude.engines.fake import FakeEngine
from etude.harnesses import tools
from etude.harnesses.coding import CodingHarness
from etude.ledger.ledger import TRAIN, Ledger
from etude.protocols import Completion, Grade, HarnessResult, SamplingParams, Sandbox
from etude.rollouts.branching import Branching
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.runner import RolloutRunner
from etude.rollouts.sessions import GatewaySessions
from etude.rollouts.worker import RolloutContext
from etude.sandboxes.local.provider import LocalSandboxes
from etude.telemetry.log import EventLog
from etude.trainer.batching.batch import build_batch
from etude.types import Case, FunctionChecks, Group, Rollout, Split, Task, TokenIds, Turn
from gateways import ADMIN_KEY, VOCAB_SIZE, Setting, gateway, template

WINDOW, GROUPS, SIZE = 600, 3, 4
PLAYS = 20
"""At most: which rollout draws which words hangs on whose call comes first, so that no seed promises what is seen."""
CREDIT = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2, branch_within=4))
CASE = Case(arguments=(), expected=0)
CHECKS = FunctionChecks(path="a.py", function="f", visible=(CASE,), hidden=(CASE,))
ROLLOUT_START = "one\ntwo\nthree\n"


def task(number: int) -> Task:
    return Task(
        task_id=f"t{number}",
        family="f",
        template="t",
        split=Split.TRAIN,
        prompt=f"{number}",
        files={"a.py": ROLLOUT_START},
        checks=CHECKS,
    )


class Agent(FakeEngine):
    """Edits a file at random, runs its tests, sometimes makes a malformed call, and submits at the end."""

    def __init__(self, seed: int) -> None:
        super().__init__(SystemClock(), vocab_size=VOCAB_SIZE, max_length=WINDOW)
        self._random = Random(seed)
        self.calls = 0

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        self.calls += 1
        line, number = self._random.randint(1, 4), self._random.randint(10, 99)
        edit = f"edit a.py {line}\n{number}"
        reply = self._random.choice([edit, edit, edit, edit, "read a.py", tools.TEST, "edit it", tools.SUBMIT])
        self.script([*template().encode(reply), template().end_id])
        return await super().generate(prompt_ids, params, session=session)


class Sandboxes:
    """Folders on this machine."""

    def __init__(self) -> None:
        self.local = LocalSandboxes(workers=1, isolate=False)

    async def open(self, task: Task, *, gateway: str) -> Sandbox:
        return await self.local.create(task.files)


class Grader:
    """Rewards the sum of the numbers in the file."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        text = await sandbox.read_file("a.py") or ""
        value = sum(int(line) for line in text.split() if line.isdigit())
        return Grade(value=float(value), parts={})


@asynccontextmanager
async def context(agent: Agent) -> AsyncIterator[RolloutContext]:
    sandboxes, setting = Sandboxes(), Setting(engine=agent, max_length=WINDOW)
    async with gateway(setting) as caller, aiohttp.ClientSession() as http:
        try:
            yield RolloutContext(
                sessions=GatewaySessions(GatewayTable([caller.url]), ADMIN_KEY, http),
                sandboxes=sandboxes,
                harness=CodingHarness(CodingOptions(max_turns=7), http),
                grader=Grader(),
                clock=SystemClock(),
                branching=Branching.of(CREDIT, seed=3),
            )
            assert (await caller.send("GET", "/healthz")).at("sessions") == 0
        finally:
            await sandboxes.local.close()


async def play(folder: Path, agent: Agent) -> list[Group]:
    config = RolloutConfig(group_size=SIZE, concurrency=SIZE * GROUPS)
    with Ledger.open(folder / "ledger.db") as ledger, EventLog(folder / "events", "rollouts") as events:
        async with context(agent) as parts:
            for number in range(GROUPS):
                ledger.admit_group(task(number), TRAIN, SIZE, 0)
            runner = RolloutRunner(TRAIN, config, temperature=1.0, ledger=ledger, context=parts, events=events)
            async with runner:
                runner.launch(ledger.open_slots(TRAIN))
                while len(runner):
                    await runner.turn(0.05)
        return list(ledger.groups(TRAIN))


def written(rollout: Rollout) -> float:
    """The reward of the file after all edits that are recorded in the rollout."""
    text = ROLLOUT_START
    for turn in rollout.turns:
        call = tools.parse_call(template().decode(turn.completion_ids.tolist()[:-1]))
        if isinstance(call, tools.EditFile):
            text = tools.apply_edit(text, call) or text
    return float(sum(int(line) for line in text.split() if line.isdigit()))


def branches(groups: list[Group]) -> Iterator[tuple[Rollout, Rollout, int]]:
    """Parent, fork, shared turns."""
    for group in groups:
        index = {rollout.rollout_id: rollout for rollout in group.rollouts}
        for rollout in group.rollouts:
            if rollout.branch is not None:
                yield index[rollout.branch.rollout_id], rollout, rollout.branch.turns


def same(one: Turn, other: Turn) -> bool:
    names = ("prompt_ids", "completion_ids", "logprobs", "versions")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_what_a_record_says_is_what_was_done_and_is_trained_once(tmp_path: Path) -> None:
    seen = set[str]()
    for number in range(PLAYS):
        agent, folder = Agent(number), tmp_path / str(number)
        folder.mkdir()
        groups = asyncio.run(play(folder, agent))
        check(groups, agent)
        seen |= set(endings(groups))
        if seen == {"parted", "copied"}:
            return
    raise AssertionError(f"of parents that fork and parents that end before, {PLAYS} plays had only {seen}")


def check(groups: list[Group], agent: Agent) -> None:
    assert [[rollout.slot for rollout in group.rollouts] for group in groups] == [[0, 1, 2, 3]] * GROUPS
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.reward == written(rollout), rollout.reason
    pairs = list(branches(groups))
    assert len(pairs) == GROUPS * SIZE // 2
    for parent, branch, shared in pairs:
        assert all(map(same, parent.turns[:shared], branch.turns[:shared]))
        if len(parent.turns) > shared < len(branch.turns):
            assert np.array_equal(parent.turns[shared].prompt_ids, branch.turns[shared].prompt_ids)
    batch = build_batch(1, groups, "leave_one_out", credit=CREDIT)
    sampled = sum(len(turn.completion_ids) for group in groups for rollout in group.rollouts
                  for turn in rollout.turns[rollout.branch.turns if rollout.branch else 0 :])  # fmt: skip
    assert batch.num_loss_tokens == sampled == len(batch.staleness)
    assert agent.calls == sum(len(turns) for turns in own_turns(groups))


def endings(groups: list[Group]) -> Iterator[str]:
    """How each branch ended: it continued after the fork, or it is a copy of a parent that ended at the fork."""
    for parent, branch, shared in branches(groups):
        if len(branch.turns) > shared:
            yield "parted"
        elif len(parent.turns) == len(branch.turns) == shared:
            yield "copied"


def own_turns(groups: list[Group]) -> Iterator[tuple[Turn, ...]]:
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        yield rollout.turns[rollout.branch.turns if rollout.branch else 0 :]
