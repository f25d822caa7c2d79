"""Mid-training's documents of the lookup family equal the text of rollouts, and are divided at the same places."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import aiohttp
import orjson
import pytest
from aiohttp import web

from etude.config.loading import load_recipe
from etude.config.rollouts import CodingOptions
from etude.config.tasks import LookupOptions
from etude.config.training import ModelShape
from etude.harnesses.coding import CodingHarness
from etude.protocols import HarnessResult
from etude.rollouts.fake import FakeSandbox
from etude.tasks.corpora.corpus import tokenizer_texts
from etude.tasks.corpora.lookup import LookupDemonstrations, list_facts
from etude.tasks.corpora.transcripts import Message
from etude.tasks.lookup import NAMES, Fact, LookupFamily
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatMessage
from etude.types import AnswerChecks, Split, Task
from scripted_model import ScriptedModel, serving

RECIPE = load_recipe(Path(__file__).parents[4] / "recipes" / "self-summary")
assert isinstance(RECIPE.harness.options, CodingOptions)
SUMMARY = RECIPE.harness.options
TRUNCATE = CodingOptions(max_turns=SUMMARY.max_turns, context="truncate", summary_at_tokens=SUMMARY.summary_at_tokens)
GROW = CodingOptions(max_turns=SUMMARY.max_turns)
assert isinstance(RECIPE.tasks.options, LookupOptions)
OPTIONS = RECIPE.tasks.options
FAMILY = LookupFamily(OPTIONS, seed=0)


def demonstrations(harness: CodingOptions = SUMMARY, keep_fact: float = 0.8) -> LookupDemonstrations:
    return LookupDemonstrations(FAMILY, LookupOptions(keep_fact=keep_fact), harness)


assert isinstance(RECIPE.model.shape, ModelShape)
CHAT = ChatTemplate.train(tokenizer_texts(demonstrations(), seed=0), RECIPE.model.shape.vocab_size)


class Reciter(ScriptedModel):
    """Repeats the imitated agent's replies to the same prompts; counts tokens like a gateway."""

    def __init__(self, contexts: Sequence[Sequence[Message]]) -> None:
        super().__init__(lambda messages: "")
        self._turns = [
            (context[:place], output.content)
            for context in contexts
            for place, output in enumerate(context)
            if output.role == "assistant"
        ]

    async def answer(self, request: web.Request) -> web.Response:
        messages = orjson.loads(await request.read())["messages"]
        expected, reply = self._turns.pop(0)
        assert messages == [{"role": output.role, "content": output.content} for output in expected]
        prompt = CHAT.open([ChatMessage(role=output.role, content=output.content) for output in cast("Any", expected)])
        choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        tokens = len(prompt) + len(CHAT.encode(reply)) + 1
        return web.json_response({"choices": [choice], "usage": {"total_tokens": tokens}})

    @property
    def left(self) -> int:
        """The number of turns that were not requested."""
        return len(self._turns)


def play(harness: CodingOptions, index: int, keep_fact: float) -> tuple[Task, HarnessResult, int]:
    """A task, how the real harness saw its session in the imitated agent's words, and how many it did not ask for."""
    inquiry = FAMILY.inquiry(Split.TRAIN, Random(index))
    reciter = Reciter(demonstrations(harness, keep_fact).contexts(inquiry, Random(index)))
    task = inquiry.task(Split.TRAIN)

    async def act() -> HarnessResult:
        async with serving(reciter) as session, aiohttp.ClientSession() as http:
            sandbox = FakeSandbox(task.files, lambda sandbox: None)
            return await CodingHarness(harness, http).run(task, session, sandbox, temperature=1.0)

    return task, asyncio.run(act()), reciter.left


@pytest.mark.parametrize("harness", [SUMMARY, TRUNCATE, GROW], ids=lambda harness: harness.context)
def test_a_session_is_cut_where_the_harness_cuts_it(harness: CodingOptions) -> None:
    for index in range(6):
        _, result, left = play(harness, index, keep_fact=0.8)
        assert (result.reason, left) == ("submit", 0)
        assert result.counts == {"read": OPTIONS.pages, "submit": 1}


def test_an_agent_that_keeps_what_is_asked_for_is_right_and_one_that_does_not_is_wrong() -> None:
    def is_right(task: Task, result: HarnessResult, left: int) -> bool:
        return result.answer == cast("AnswerChecks", task.checks).answer

    assert all(is_right(*play(SUMMARY, index, keep_fact=1.0)) for index in range(6))
    assert all(is_right(*play(GROW, index, keep_fact=0.0)) for index in range(6))
    assert not any(is_right(*play(SUMMARY, index, keep_fact=0.0)) for index in range(6))


def test_every_context_fits_into_the_window_and_the_material_is_four_times_as_long() -> None:
    window = RECIPE.engine.max_length
    for index in range(20):
        inquiry = FAMILY.inquiry(Split.TRAIN, Random(index))
        for context in demonstrations().contexts(inquiry, Random(index)):
            spoken = [ChatMessage(role=output.role, content=output.content) for output in cast("Any", context[:-1])]
            assert len(CHAT.open(spoken)) + SUMMARY.max_tokens_per_summary <= window
        assert sum(len(CHAT.encode(text)) for text in inquiry.files.values()) >= 4 * window


def test_a_name_is_one_token_wherever_it_stands() -> None:
    assert all(len(CHAT.encode(f" {name}")) == 1 for name in NAMES)


def test_no_session_asks_for_what_is_held_out() -> None:
    rng = Random(0)
    for _ in range(300):
        opening = demonstrations().session(rng)[0].content.splitlines()[0]
        assert not FAMILY.is_heldout(opening.split()[1:])


def test_a_drill_asks_for_what_it_shows_and_more_than_once() -> None:
    rng = Random(0)
    repeated = 0
    for _ in range(100):
        question, answer = demonstrations().code(rng)
        names, *shown = question.content.splitlines()
        requested = names.split()[1:]
        facts = [Fact(line.split()[1], int(line.split()[2])) for line in shown]
        assert answer.content == f"have {list_facts(requested, facts)}"
        assert "?" not in answer.content
        assert not FAMILY.is_heldout(sorted(set(requested)))
        repeated += len(set(requested)) < len(requested)
    assert repeated == 100
