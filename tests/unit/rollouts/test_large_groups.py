"""Groups as large as they are in earnest, through the real dispatcher: whole groups, in order, within the limits."""

import asyncio
from pathlib import Path
from random import Random

import numpy as np
import pytest

from etude.config.rollouts import RolloutConfig
from etude.ledger.ledger import TRAIN, Ledger
from etude.protocols import Session
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import RolloutFakes, run_virtually
from etude.telemetry.log import EventLog
from etude.types import Finish, RolloutStatus, Task, Turn
from ledgers import new_task

ONE = np.ones(1, np.int32)
NEWEST = 99 * ONE
"""A weight version that is never too old."""
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=NEWEST, finish=Finish.STOP)
STEPS = 3


@pytest.mark.parametrize(("group_size", "groups_per_step"), [(16, 16), (64, 4), (128, 2)])
def test_hundreds_of_rollouts_in_flight_end_as_whole_groups_in_order(
    group_size: int, groups_per_step: int, tmp_path: Path
) -> None:
    config = RolloutConfig(group_size=group_size, groups_per_step=groups_per_step, max_staleness=1, concurrency=3 * 128)
    random, most = Random(0), [0]

    async def play(task: Task, session: Session) -> str:
        most[0] = max(most[0], len(fakes.sessions))
        await asyncio.sleep(random.random())
        fakes.sessions.capture(session, TURN)
        return "submit"

    fakes = RolloutFakes(play, lambda task: random.random())
    with Ledger.open(tmp_path / "ledger.db") as ledger, EventLog(tmp_path / "events", "rollouts") as events:
        dispatcher = Dispatcher(
            config,
            ledger=ledger,
            draw=new_task,
            context=fakes.context,
            events=events,
            serving_version=lambda: ledger.progress().steps_done,
        )

        async def train() -> list[int]:
            training, order = asyncio.create_task(dispatcher.train(STEPS)), []
            for step in range(1, STEPS + 1):
                while (groups := ledger.claim_batch(step, groups_per_step)) is None:
                    await asyncio.sleep(0.05)
                ledger.commit_step(step)
                order += [group.index for group in groups]
                assert {len(group.rollouts) for group in groups} == {group_size}
            await training
            return order

        assert run_virtually(train()) == list(range(STEPS * groups_per_step))
        assert ledger.rollout_counts(TRAIN)[RolloutStatus.GRADED] == STEPS * config.rollouts_per_step
    assert config.concurrency - group_size < most[0] <= config.concurrency
    assert fakes.is_tidy
