"""The worlds in which TRL's rollouts live in `bench loop`: étude's sandboxes, tools and hidden tests."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.loop.contestants import CONTESTANTS, TRL, LoopOptions, loop_options, recipe
from bench.loop.trl import Environments, run_trl
from bench.trl_environment import trl_python
from etude.config.training import ModelShape
from etude.errors import InfrastructureError
from etude.models.checkpoint import save_checkpoint, spec_from_shape, state_of
from etude.models.decoder import Decoder
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.weight_log import open_log
from etude.sandboxes.local.provider import LocalSandboxes
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate
from etude.types import Case, FunctionChecks, Json, Split, Task
from etude.weights.pull import pull

CHECKS = FunctionChecks(
    path="lib.py",
    function="add",
    visible=(Case(arguments=(1, 2), expected=3),),
    hidden=(Case(arguments=(2, 2), expected=4), Case(arguments=(5, 1), expected=6)),
)
TASK = Task(
    task_id="t",
    family="bugfix",
    template="add",
    split=Split.TRAIN,
    prompt="fix add in lib.py",
    files={"lib.py": "def add(a, b):\n    return a - b"},
    checks=CHECKS,
)
REPAIR = "edit lib.py 2\n    return a + b"


async def ask(environments: Environments, **question: Json) -> dict[str, Json]:
    return await environments.answer(question)


async def act(environments: Environments, call: str) -> str:
    return str((await ask(environments, verb="act", environment=0, call=call))["observation"])


async def grade(environments: Environments, *replies: tuple[int, str, bool]) -> Json:
    return (await ask(environments, verb="grade", replies=[list(reply) for reply in replies]))["rewards"]


async def opened() -> AsyncIterator[Environments]:
    sandboxes = LocalSandboxes(workers=1)
    try:
        yield Environments(tasks=[TASK], sandboxes=sandboxes)
    finally:
        await sandboxes.close()


async def play() -> None:
    async for environments in opened():
        for environment in (0, 1):
            await ask(environments, verb="reset", environment=environment, task=0)
        assert (await act(environments, "test")).startswith("FAIL add(1, 2) = -1 want 3")
        assert await act(environments, REPAIR) == "ok"
        assert await act(environments, "test") == "PASS"
        assert await act(environments, "nonsense") == "bad call"
        assert await grade(environments, (0, "submit", True), (1, "submit", True)) == [1.0, 0.0]
        assert await grade(environments, (0, "test", True)) == [0.0], "not submitted"
        assert await grade(environments, (0, "submit", False)) == [0.0], "cut before it ended"
        await ask(environments, verb="reset", environment=0, task=0)
        assert await grade(environments, (0, "submit", True)) == [0.0], "a fresh world is broken again"


def test_environments_are_worked_in_and_graded_as_those_of_our_own_rollouts() -> None:
    asyncio.run(play())


def test_a_question_that_is_not_answered_is_an_error() -> None:
    async def unknown() -> None:
        async for environments in opened():
            await ask(environments, verb="fly")

    with pytest.raises(InfrastructureError, match="unknown request 'fly'"):
        asyncio.run(unknown())


def start(path: Path, options: LoopOptions) -> RunFolder:
    """A run folder with an untrained model as version 0."""
    config = recipe(CONTESTANTS[0], options)
    folder = RunFolder.create(path, config)
    shape = config.model.shape
    assert isinstance(shape, ModelShape)
    chat = ChatTemplate.train(["read lib.py", "submit", *"abcdefgh"], shape.vocab_size)
    spec = spec_from_shape(shape, chat.vocab_size)
    model = Decoder(spec)
    model.initialise(0)
    save_checkpoint(folder.model, spec, state_of(model), end_id=chat.end_id, pad_id=chat.pad_id)
    chat.save(folder.model)
    with (
        EventLog(folder.events, "midtrain") as events,
        WeightPublishing(open_log(folder), config.name, events) as publishing,
    ):
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()
    return folder


@pytest.mark.skipif(not os.environ.get("ETUDE_LONG"), reason="ETUDE_LONG=1: TRL takes a minute to take two steps")
def test_trl_trains_our_model_in_our_environments(tmp_path: Path) -> None:
    try:
        trl_python()
    except InfrastructureError as error:
        pytest.skip(str(error))
    options = loop_options((TRL,), quick=True)
    result = run_trl(options.chosen[0], options, start(tmp_path / "start", options), tmp_path / TRL)
    assert result.missing is None
    assert (result.steps, result.rollouts) == (2, 32)
    assert [(mark.version, mark.step) for mark in result.marks] == [(1, 2)]
    assert result.folder is not None and pull(open_log(result.folder), 1).version == 1
    assert sum(result.phases.values()) == pytest.approx(1.0, abs=0.05)
