"""Environments of the verifiers library, played through our gateway in a process of their own."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from etude.errors import ConfigError, EngineUnavailable, SandboxError
from etude.protocols import Grade, HarnessResult, Session
from etude.rollouts.fake import FakeSandbox
from etude.sandboxes.local.provider import LocalSandboxes
from etude.tasks.outcomes import Card
from etude.tasks.verifiers.family import FAMILY, VerifiersEnvironment
from etude.tasks.verifiers.program import judge
from etude.types import Json, Split
from scripted_model import ScriptedModel, serving
from waiting import until, wait_until

PYTHON = os.environ.get("ETUDE_VERIFIERS_PYTHON", sys.executable if importlib.util.find_spec("verifiers") else "")
"""The Python that has the real package, if one does."""
real = pytest.mark.skipif(not PYTHON, reason="verifiers is not installed: set ETUDE_VERIFIERS_PYTHON")

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Sum(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        print("what environments print is no answer")
        return float(trace.last_reply == str(eval(self.data.prompt)))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            yield Sum(vf.TaskData(prompt=f"{number} + 1", name=f"sum {number}"), self.config.task)
"""
HARNESS = """
import httpx
import verifiers.v1 as vf

__all__ = ["Asking"]

class Asking(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}, timeout=20
            )
        return vf.ProgramResult(exit_code=0 if answer.status_code == 200 else 1, stdout="", stderr=answer.text)
"""
SETTINGS: dict[str, Json] = {"taskset": {"id": "etude_sums"}, "agent": {"harness": {"id": "etude_asking"}}}


def add(messages: Sequence[dict[str, Json]]) -> str:
    first, _, second = str(messages[-1]["content"]).partition(" + ")
    return str(int(first) + int(second))


async def play(model: ScriptedModel, settings: dict[str, Json], scratch: Path) -> tuple[HarnessResult, Grade]:
    environment = VerifiersEnvironment(settings, python=PYTHON, max_tasks=20, timeout_s=60)
    sandboxes = LocalSandboxes(scratch=scratch)
    await environment.open()
    try:
        task = environment.task(Split.TRAIN, 3)
        sandbox = await sandboxes.create(task.files)
        async with serving(model) as session:
            result = await environment.run(task, session, sandbox, temperature=0.5)
        return result, await environment.grade(task, sandbox, result)
    finally:
        await environment.close()
        await sandboxes.close()


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "etude_sums.py").write_text(TASKSET, encoding="utf-8")
    (folder / "etude_asking.py").write_text(HARNESS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@real
@pytest.mark.usefixtures("plugins")
def test_a_real_environment_is_rewarded_through_our_model(tmp_path: Path) -> None:
    model = ScriptedModel(add)
    result, reward = asyncio.run(play(model, SETTINGS, tmp_path))
    assert (reward.value, reward.parts["right"], reward.parts["length"]) == (2.0, 1.0, 1.0)
    assert result.counts == {"turns": 1}
    assert model.keys == ["Bearer the key of one session"]
    assert (model.requests[0]["model"], model.requests[0]["temperature"]) == ("policy", 0.5)


@real
@pytest.mark.usefixtures("plugins")
def test_a_wrong_answer_is_graded_and_a_dead_engine_is_not(tmp_path: Path) -> None:
    _, reward = asyncio.run(play(ScriptedModel(lambda messages: "?"), SETTINGS, tmp_path))
    assert reward.value == 0.0
    with pytest.raises(EngineUnavailable, match="etude_sums"):
        asyncio.run(play(ScriptedModel(add, statuses=[500] * 20), SETTINGS, tmp_path))


@real
def test_an_environment_that_is_not_installed_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_environment") as refused:
        asyncio.run(play(ScriptedModel(add), {"taskset": {"id": "no_such_environment"}}, tmp_path))
    assert "ModuleNotFoundError" in str(refused.value)


def test_without_the_package_an_environment_cannot_be_opened(tmp_path: Path) -> None:
    bare = VerifiersEnvironment({"taskset": {"id": "x"}}, python="/bin/false")
    with pytest.raises(ConfigError, match="exit code 1"):
        asyncio.run(bare.open())
    with pytest.raises(ConfigError, match="name the environment"):
        VerifiersEnvironment({"taskset": {}})


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
    tasks = [{"index": index, "name": str(index), "prompt": "?"} for index in range(20)]
    answer = json.dumps({"id": 0, "tasks": tasks})
    python = program(tmp_path, f"sleep 600 >&2 &\necho $! > {tmp_path}/left\nread line\necho '{answer}'\nread line")

    async def act() -> None:
        environment = VerifiersEnvironment({"taskset": {"id": "x"}}, python=python, timeout_s=600)
        async with asyncio.timeout(30):
            await environment.open()
            task, session = environment.task(Split.TRAIN, 0), Session(session_id="s", base_url="", api_key="")
            for _ in range(2):
                with pytest.raises(SandboxError, match="exit code 0"):
                    await environment.run(task, session, FakeSandbox({}, lambda sandbox: None), temperature=1.0)
            await environment.close()

    asyncio.run(act())
    wait_until(lambda: not is_alive(tmp_path / "left"))


def test_an_environment_that_is_given_up_while_it_opens_is_gone(tmp_path: Path) -> None:
    python = program(tmp_path, "while read line; do :; done")

    async def act() -> None:
        opening = asyncio.create_task(VerifiersEnvironment({"taskset": {"id": "x"}}, python=python).open())
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
    assert [card.split for card in cards[:40]] == [card.split for card in cards[40:]]
    assert {card.split for card in cards} == set(Split)
    assert len({card.task(FAMILY, Split.TRAIN).task_id for card in cards}) == 80


def test_a_task_of_another_family_is_refused(tmp_path: Path) -> None:
    environment = VerifiersEnvironment({"taskset": {"id": "x"}}, python="/bin/false")
    task = Card(environment="x", index=0, name="n", prompt="p").task("openenv", Split.TRAIN)

    async def grade_nothing() -> None:
        sandboxes = LocalSandboxes(scratch=tmp_path)
        sandbox = await sandboxes.create({})
        try:
            with pytest.raises(SandboxError, match="did not come to its end"):
                await environment.grade(task, sandbox, HarnessResult(reason="submit", counts={}))
            async with serving(ScriptedModel(add)) as session:
                with pytest.raises(ValueError, match="openenv"):
                    await environment.run(task, session, sandbox, temperature=1.0)
        finally:
            await sandboxes.close()

    asyncio.run(grade_nothing())
