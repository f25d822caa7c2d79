"""Environments of the verifiers library, played through our gateway in a process of their own."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import aiohttp
import pytest

from environments import PYTHON, real, write_verifiers
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.config.tasks import VerifiersOptions
from etude.errors import ConfigError, EngineUnavailable, SandboxError
from etude.harnesses.completions import HarnessContext
from etude.protocols import Grade, GraderContext, HarnessResult, Session
from etude.rewards.graders.named import NamedGrader
from etude.rollouts.fake import FakeSandbox
from etude.run.rollouts import make_harness
from etude.run.task_families import open_family
from etude.run.task_sandboxes import PlainTaskSandboxes
from etude.sandboxes.local.provider import LocalSandboxes
from etude.tasks.outcomes import Card, is_heldout
from etude.tasks.verifiers.family import FAMILY
from etude.tasks.verifiers.process import EnvironmentCommand, EnvironmentProcess
from etude.tasks.verifiers.program import judge
from etude.types import Json, Split
from scripted_model import ScriptedModel, serving
from waiting import until, wait_until


def recipe(*settings: str, env: str = "etude-sums", python: str = str(PYTHON)) -> RunConfig:
    family = ["tasks.family=verifiers", f"tasks.options.env={env}", f"tasks.options.python={python}"]
    return default_recipe([*family, "tasks.options.max_tasks=20", "harness.options.timeout_s=120.0", *settings])


def add(messages: Sequence[dict[str, Json]]) -> str:
    first, _, second = str(messages[-1]["content"]).partition(" + ")
    return str(int(first) + int(second))


async def play(model: ScriptedModel, config: RunConfig, scratch: Path) -> tuple[HarnessResult, Grade]:
    task, closing = open_family(config).task(Split.TRAIN, 3), list[Any]()
    sandboxes = LocalSandboxes(scratch=scratch)
    async with aiohttp.ClientSession() as http, serving(model) as session:
        harness = make_harness(config, HarnessContext(http=http, tasks=config.tasks, on_close=closing.append))
        grader = NamedGrader(config.tasks.graders, GraderContext(open_sandbox=PlainTaskSandboxes(sandboxes).open))
        try:
            sandbox = await sandboxes.create(task.files)
            result = await harness.run(task, session, sandbox, temperature=0.5)
            return result, await grader.grade(task, sandbox, result)
        finally:
            for close in closing:
                await close()
            await sandboxes.close()


@real
def test_a_real_environment_is_rewarded_through_our_model(tmp_path: Path) -> None:
    folder = write_verifiers(tmp_path / "environments")
    config = recipe(f"tasks.folder={folder}", "tasks.options.args={step=2}")
    family = open_family(config)
    sizes = [family.size(split) or 0 for split in Split]
    assert sum(sizes) == 20 and all(sizes)
    assert family.task(Split.TRAIN, 0).prompt.endswith(" + 2")
    model = ScriptedModel(add)
    result, reward = asyncio.run(play(model, config, tmp_path))
    assert (reward.value, reward.parts["right"], reward.parts["length"]) == (3.0, 1.0, 1.0)
    assert result.counts == {"turns": 1}
    assert model.keys == ["Bearer the key of one session"]
    assert (model.requests[0]["model"], model.requests[0]["temperature"]) == ("policy", 0.5)


@real
def test_a_wrong_answer_is_graded_and_a_dead_engine_is_not(tmp_path: Path) -> None:
    config = recipe(f"tasks.folder={write_verifiers(tmp_path / 'environments')}")
    _, reward = asyncio.run(play(ScriptedModel(lambda messages: "?"), config, tmp_path))
    assert reward.parts["right"] == 0.0
    with pytest.raises(EngineUnavailable, match="etude-sums"):
        asyncio.run(play(ScriptedModel(add, statuses=[500] * 20), config, tmp_path))


@real
def test_an_environment_that_is_not_installed_is_named_with_its_log() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.options\.env = 'no-such-one'(.|\n)*ModuleNotFoundError"):
        open_family(recipe(env="no-such-one"))


def test_without_the_package_an_environment_cannot_be_opened() -> None:
    with pytest.raises(ConfigError, match="exit code 1"):
        open_family(recipe(python="/bin/false"))
    with pytest.raises(ConfigError, match=r"no verifiers: /nowhere/python is missing(.|\n)*tasks\.options\.python"):
        open_family(recipe(python="/nowhere/python"))


def command(python: str) -> EnvironmentCommand:
    return EnvironmentCommand.of(VerifiersOptions(env="x", python=python), "")


LISTED = json.dumps({"id": 0, "tasks": [{"index": 0, "name": "n", "prompt": "?"}]})


def program(folder: Path, then: str) -> str:
    """A stand-in for the Python with the package, which leaves its process id in ``folder``."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho $$ > {folder}/new; mv {folder}/new {folder}/pid\n{then}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def is_alive(pid: Path) -> bool:
    try:
        return Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_an_environment_left_running_goes_with_it_and_blocks_nothing(tmp_path: Path) -> None:
    python = program(tmp_path, f"sleep 600 >&2 &\necho $! > {tmp_path}/left\nread line\necho '{LISTED}'\nread line")

    async def act() -> None:
        process = EnvironmentProcess(command(python))
        async with asyncio.timeout(60):
            await process.open()
            for _ in range(2):
                with pytest.raises(SandboxError, match="exit code 0"):
                    await process.ask({"do": "run"}, 600)
            assert not process.is_running
            await process.close()

    asyncio.run(act())
    wait_until(lambda: not is_alive(tmp_path / "left"))


def test_a_process_that_ended_is_started_again_by_the_next_rollout(tmp_path: Path) -> None:
    outcome = json.dumps({"id": 1, "reward": 0.5, "parts": {}, "reason": "submit", "turns": 1})
    first = f"test -e {tmp_path}/again || {{ touch {tmp_path}/again; exit 1; }}"
    python = program(tmp_path, f"read line\necho '{LISTED}'\nread line\n{first}\necho '{outcome}'\nread line")
    config, closing = recipe(python=python), list[Any]()
    task = Card(environment="x", index=0, name="n", prompt="p").task(FAMILY, Split.TRAIN)
    session = Session(session_id="s", base_url="", api_key="")

    async def act() -> None:
        sandbox = FakeSandbox({}, lambda sandbox: None)
        async with aiohttp.ClientSession() as http:
            harness = make_harness(config, HarnessContext(http=http, tasks=config.tasks, on_close=closing.append))
            with pytest.raises(SandboxError, match="exit code 1"):
                await harness.run(task, session, sandbox, temperature=1.0)
            result = await harness.run(task, session, sandbox, temperature=1.0)
            assert (result.reason, result.counts) == ("submit", {"turns": 1})
            await closing[0]()

    asyncio.run(act())


def test_an_environment_that_is_given_up_while_it_opens_is_gone(tmp_path: Path) -> None:
    python = program(tmp_path, "while read line; do :; done")

    async def act() -> None:
        opening = asyncio.create_task(EnvironmentProcess(command(python)).open())
        await until((tmp_path / "pid").exists)
        opening.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait({opening})
        assert opening.cancelled()
        await until(lambda: not is_alive(tmp_path / "pid"))

    asyncio.run(act())


# --- Recorded shapes ----------------------------------------------------------------------------------------------


def trace(rewards: dict[str, tuple[float, float]], **changed: Any) -> Thing:
    named = {name: Thing(score=score, weight=weight, value=score * weight) for name, (score, weight) in rewards.items()}
    usual = {
        "agent": Thing(trainable=True),
        "rewards": named,
        "metrics": {},
        "errors": [],
        "is_timeout": False,
        "stop_condition": "agent_completed",
        "num_turns": 2,
    }
    return Thing(**(usual | changed))


def episode(*traces: Thing, errors: Sequence[Thing] = (), is_timeout: bool = False) -> Thing:
    return Thing(traces=list(traces), errors=list(errors), is_timeout=is_timeout)


def test_rewards_are_weighted_and_averaged_over_the_trained_traces() -> None:
    first = trace({"right": (1.0, 0.5), "short": (0.5, 1.0)}, metrics={"words": 4.0})
    judge_of = trace({"right": (9.0, 9.0)}, agent=Thing(trainable=False))
    answer = judge(episode(first, trace({"right": (0.0, 0.5)}), judge_of))
    assert (answer["reward"], answer["turns"], answer["reason"]) == (0.5, 4, "agent_completed")
    assert answer["parts"] == {"right": 0.5, "short": 0.25, "words": 2.0}


def test_a_deadline_is_graded_and_an_error_is_not() -> None:
    late = Thing(type="TimeoutError", message="late")
    assert judge(episode(trace({}, is_timeout=True, errors=[late])))["reason"] == "timeout"
    broken = judge(episode(trace({}), errors=[Thing(type="TaskError", message="no file")]))
    assert broken == {"error": "TaskError: no file", "kind": "environment"}
    unreachable = judge(episode(trace({}, errors=[Thing(type="ProviderError", message="503")])))
    assert unreachable["kind"] == "provider"
    assert judge(episode())["error"] == "no agent was run"


def test_equal_names_are_on_the_same_side_and_indices_come_back() -> None:
    cards = [Card(environment="e", index=index, name=f"n{index % 40}", prompt="p") for index in range(80)]
    sides = [is_heldout(card, 6) for card in cards]
    assert sides[:40] == sides[40:]
    assert set(sides) == {True, False}
    assert len({card.task(FAMILY, Split.TRAIN).task_id for card in cards}) == 80


def test_a_task_of_another_family_is_refused_and_one_without_an_outcome_not_graded(tmp_path: Path) -> None:
    config = recipe(python="/bin/false")
    task = Card(environment="x", index=0, name="n", prompt="p").task("openenv", Split.TRAIN)

    async def act() -> None:
        sandboxes = LocalSandboxes(scratch=tmp_path)
        sandbox = await sandboxes.create({})
        try:
            grader = NamedGrader({}, GraderContext(open_sandbox=PlainTaskSandboxes(sandboxes).open))
            with pytest.raises(SandboxError, match="did not come to its end"):
                await grader.grade(task, sandbox, HarnessResult(reason="submit", counts={}))
            async with aiohttp.ClientSession() as http, serving(ScriptedModel(add)) as session:
                context = HarnessContext(http=http, tasks=config.tasks, on_close=lambda close: None)
                with pytest.raises(ValueError, match="openenv"):
                    await make_harness(config, context).run(task, session, sandbox, temperature=1.0)
        finally:
            await sandboxes.close()

    asyncio.run(act())
