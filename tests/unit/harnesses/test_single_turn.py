"""The harness that makes one call, whose reply is the answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import aiohttp

from etude.config.rollouts import SingleTurnOptions
from etude.config.tasks import TaskConfig
from etude.harnesses.completions import HarnessContext
from etude.harnesses.single_turn import SingleTurnHarness
from etude.protocols import HarnessResult
from etude.rollouts.fake import FakeSandbox
from etude.types import AnswerChecks, Json, PromptMessage, Split, Task
from scripted_model import ScriptedModel, serving

TASK = Task(
    task_id="t",
    family="dataset",
    template="",
    split=Split.TRAIN,
    prompt="1 + 1 =",
    files={},
    checks=AnswerChecks(answer="2"),
)


def ask(model: ScriptedModel, task: Task, options: SingleTurnOptions) -> HarnessResult:
    async def run() -> HarnessResult:
        async with aiohttp.ClientSession() as http, serving(model) as session:
            context = HarnessContext(http=http, tasks=TaskConfig(), on_close=lambda close: None)
            harness = SingleTurnHarness.open(options, context)
            return await harness.run(task, session, FakeSandbox({}, lambda sandbox: None), temperature=0.5)

    return asyncio.run(run())


def last(messages: Sequence[dict[str, Json]]) -> str:
    return f"to {messages[-1]['content']}: 2"


def test_the_reply_is_handed_in_as_it_is() -> None:
    model = ScriptedModel(last)
    result = ask(model, TASK, SingleTurnOptions(max_tokens_per_turn=17))
    assert (result.reason, result.answer, result.counts) == ("submit", "to 1 + 1 =: 2", {"submit": 1})
    assert model.requests == [
        {
            "model": "policy",
            "messages": [{"role": "user", "content": "1 + 1 ="}],
            "temperature": 0.5,
            "max_tokens": 17,
        }
    ]


def test_a_system_message_and_the_conversation_come_first() -> None:
    history = (PromptMessage(role="user", content="hello"), PromptMessage(role="assistant", content="hi"))
    model = ScriptedModel(last)
    ask(model, replace(TASK, history=history), SingleTurnOptions(system="be brief"))
    (request,) = model.requests
    assert request["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "1 + 1 ="},
    ]
