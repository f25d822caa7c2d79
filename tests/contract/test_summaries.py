"""Work that outgrows its context, with the real gateway: ours, and clients that compact their own history.

Whoever compacts, and however the gateway learns which call was for a summary: each context is a branch, a summary is
the last turn of the context that it ends, its prompt is that context's own ids, and everything sampled is trained once.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np
import pytest

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.config.rollouts import CodingOptions
from etude.engines.fake import FakeEngine
from etude.harnesses.coding import CodingHarness
from etude.protocols import Completion, HarnessResult, SamplingParams
from etude.rollouts.fake import FakeSandbox
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sessions import GatewaySessions
from etude.trainer.batching.build import build_trajectories
from etude.types import AnswerChecks, Rollout, RolloutStatus, Split, Task, TokenIds, Turn, TurnKind
from gateways import ADMIN_KEY, MESSAGES, VOCAB_SIZE, Caller, Setting, gateway, template

WINDOW = 600
"""Tokens; a letter is about one."""
ADVANTAGE = 0.75
A, S = TurnKind.ACT, TurnKind.SUMMARY
MARK = "Sum up the work so far"
"""What only a request for a summary says."""
COMPACTING = GatewayConfig(engine_timeout_s=0.1, summary_mark=MARK)
PAGES = {"p1": "tax 42\ncost 3", "p2": "fee 7\nrent 8", "p3": "rate 19\nload 5", "p4": "x" * 550}
LOOKUP = Task(
    task_id="t",
    family="lookup",
    template="pages",
    split=Split.TRAIN,
    prompt="give tax fee",
    files=PAGES,
    checks=AnswerChecks(answer="42 7", facts=("tax 42", "fee 7")),
)
HARNESS = CodingOptions(
    context="summary", summary_at_tokens=20, summary_request="sum up", max_tokens_per_summary=60, max_turns=20
)
"""Each of the pages fills the context."""


class ScriptedEngine(FakeEngine):
    """Returns scripted replies, and records every prompt and completion."""

    def __init__(self, replies: Sequence[str]) -> None:
        super().__init__(SystemClock(), vocab_size=VOCAB_SIZE, max_length=WINDOW)
        self.calls: list[tuple[list[int], list[int]]] = []
        self.script(*[[*template().encode(reply), template().end_id] for reply in replies])

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        completion = await super().generate(prompt_ids, params, session=session)
        self.calls.append((list(prompt_ids), completion.token_ids.tolist()))
        return completion


@dataclass
class Client:
    """A program of other people's: sends whole histories and rewrites them as it likes."""

    caller: Caller
    key: str
    history: list[Any] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    """Of each call, how much of its prompt continues earlier turns."""

    async def chat(self, text: str) -> str:
        """Over OpenAI's chat completions."""
        self.history.append({"role": "user", "content": text})
        answer = await self.caller.chat(self.key, self.history, max_tokens=100)
        assert answer.status == 200, answer.raw
        output = str(answer.at("choices", 0, "message", "content"))
        self.history.append({"role": "assistant", "content": output})
        self.reused.append(int(str(answer.at("usage", "prompt_tokens_details", "cached_tokens"))))
        return output

    async def messages(self, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
        """Over Anthropic's messages, with a tool and instructions."""
        self.history.append({"role": "user", "content": list(blocks)})
        tool = {"name": "read", "description": "", "input_schema": {"type": "object"}}
        body = {"model": "any", "max_tokens": 100, "system": "Be brief.", "tools": [tool], "messages": self.history}
        answer = await self.caller.send("POST", MESSAGES, self.key, body)
        assert answer.status == 200, answer.raw
        output: Any = answer.at("content")
        self.history.append({"role": "assistant", "content": output})
        self.reused.append(int(str(answer.at("usage", "cache_read_input_tokens"))))
        return list(output)


def text(output: str) -> dict[str, Any]:
    return {"type": "text", "text": output}


def check(turns: Sequence[Turn], engine: ScriptedEngine, segments: Sequence[Sequence[TurnKind]]) -> None:
    """The turns are the engine's calls, in contexts of these kinds; each context is a trajectory, trained once."""
    assert [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in turns] == engine.calls
    assert [turn.kind for turn in turns] == [kind for segment in segments for kind in segment]
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=tuple(turns)
    )
    trajectories, first = build_trajectories(rollout, ADVANTAGE), 0
    assert len(trajectories) == len(segments)
    for trajectory, segment in zip(trajectories, segments, strict=True):
        own = turns[first : first + len(segment)]
        first += len(segment)
        output = np.concatenate([turn.completion_ids for turn in own])
        assert np.array_equal(trajectory.token_ids[trajectory.loss_mask], output)
        assert np.array_equal(trajectory.advantages, np.where(trajectory.loss_mask, np.float32(ADVANTAGE), 0))
        for earlier, later in pairwise(own):
            seen = np.concatenate([earlier.prompt_ids, earlier.completion_ids])
            assert np.array_equal(later.prompt_ids[: len(seen)], seen), "a turn continues what was sampled before it"


def opening(turn: Turn) -> str:
    return template().decode(turn.prompt_ids.tolist())


# --- Our harness --------------------------------------------------------------------------------------------------


async def drive(engine: ScriptedEngine, config: CodingOptions = HARNESS) -> tuple[HarnessResult, tuple[Turn, ...]]:
    async with gateway(Setting(engine=engine, max_length=WINDOW)) as caller, aiohttp.ClientSession() as http:
        sessions = GatewaySessions(GatewayTable([caller.url]), ADMIN_KEY, http)
        session = await sessions.open()
        sandbox = FakeSandbox(PAGES, lambda _: None)
        result = await CodingHarness(config, http).run(LOOKUP, session, sandbox, temperature=1.0)
        return result, await sessions.close(session.session_id)


def test_three_summaries_make_four_trajectories() -> None:
    summaries = ["p1 has tax\nsummary\ntax 42\nnext p2", "summary\ntax 42\nfee 7\nnext p3", "tax 42, fee 7"]
    pages = ["read p1", "read p2", "read p3"]
    engine = ScriptedEngine([reply for pair in zip(pages, summaries, strict=True) for reply in pair] + ["answer 42 7"])
    result, turns = asyncio.run(drive(engine))
    assert (result.reason, result.answer) == ("submit", "42 7")
    assert (result.measures["facts_seen"], result.measures["facts_kept"]) == (5, 5)
    check(turns, engine, [[A, S], [A, S], [A, S], [A]])
    assert [opening(turn) for turn in turns[::2]] == [
        "give tax fee",
        "give tax fee\nsummary 1\ntax 42\nnext p2",
        "give tax fee\nsummary 2\ntax 42\nfee 7\nnext p3",
        "give tax fee\nsummary 3\ntax 42, fee 7",
    ]
    assert opening(turns[1]) == "give tax feeread p11 tax 42\n2 cost 3\nsum up"


def test_a_result_that_the_window_does_not_hold_is_shortened_until_it_does() -> None:
    engine = ScriptedEngine(["read p4", "summary\np4 is long", "answer none"])
    result, turns = asyncio.run(drive(engine, HARNESS.model_copy(update={"summary_at_tokens": 100})))
    assert result.reason == "submit"
    check(turns, engine, [[A, S], [A]])
    shown = "1 " + PAGES["p4"]
    assert opening(turns[1]) == f"give tax feeread p4{shown[: len(shown) // 2]}\n[cut]\nsum up"


def test_a_truncated_context_is_a_branch_as_well() -> None:
    config = CodingOptions(context="truncate", summary_at_tokens=20)
    engine = ScriptedEngine(["read p1", "read p2", "answer none"])
    _, turns = asyncio.run(drive(engine, config))
    check(turns, engine, [[A], [A], [A]])
    assert opening(turns[2]) == "give tax fee\n1 fee 7\n2 rent 8"


# --- Other people's -----------------------------------------------------------------------------------------------


def test_a_client_of_openais_compacts_its_history() -> None:
    replies = ["look", "found 3", "found 3 of 9", "more", "found 9", "done"]
    engine = ScriptedEngine(replies)

    async def work(caller: Caller) -> tuple[Turn, ...]:
        session_id, key = await caller.open_session()
        client = Client(caller, key, [{"role": "system", "content": "Be brief."}])
        for start, result in (("count them", "3 here"), ("go on", "9 here")):
            await client.chat(start)
            if start == "count them":
                await client.chat(result)
            summary = await client.chat(f"{MARK}, please.")
            client.history[1:] = [{"role": "user", "content": f"So far: {summary}"}]
        await client.chat("finish")
        lengths = [len(prompt) + len(output) for prompt, output in engine.calls]
        assert client.reused == [0, lengths[0], lengths[1], 0, lengths[3], 0]
        return await caller.close(session_id)

    async def act() -> tuple[Turn, ...]:
        async with gateway(Setting(engine=engine, max_length=WINDOW, config=COMPACTING)) as caller:
            return await work(caller)

    check(asyncio.run(act()), engine, [[A, A, S], [A, S], [A]])


def test_a_client_of_anthropics_compacts_its_history() -> None:
    read = '<tool_call>{"name": "read", "arguments": {"path": "PAGE"}}</tool_call>'
    engine = ScriptedEngine([read.replace("PAGE", "p1"), "tax 42", read.replace("PAGE", "p2"), "tax 42, fee 7", "42 7"])

    async def work(caller: Caller) -> tuple[Turn, ...]:
        session_id, key = await caller.open_session()
        client = Client(caller, key)
        task = text("give tax fee")
        for page in ("p1", "p2"):
            (use,) = await client.messages(task)
            assert (use["type"], use["input"]) == ("tool_use", {"path": page})
            seen = {"type": "tool_result", "tool_use_id": use["id"], "content": PAGES[page]}
            (summary,) = await client.messages(seen, text(f"{MARK}."))
            client.history.clear()
            task = text(f"give tax fee. Known: {summary['text']}")
        await client.messages(task)
        lengths = [len(prompt) + len(output) for prompt, output in engine.calls]
        assert [reused for reused in client.reused if reused] == [lengths[0], lengths[2]]
        return await caller.close(session_id)

    async def act() -> tuple[Turn, ...]:
        async with gateway(Setting(engine=engine, max_length=WINDOW, config=COMPACTING)) as caller:
            return await work(caller)

    check(asyncio.run(act()), engine, [[A, S], [A, S], [A]])


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_says_it_where_there_is_no_mark(stream: bool) -> None:
    engine = ScriptedEngine(["yes", "all of it"])

    async def act() -> tuple[Turn, ...]:
        async with gateway(Setting(engine=engine, max_length=WINDOW)) as caller:
            session_id, key = await caller.open_session()
            body = {"messages": [{"role": "user", "content": "go"}], "stream": stream}
            await caller.send("POST", "/v1/chat/completions", key, body)
            body["messages"] = [{"role": "user", "content": "what was said?"}]
            await caller.send("POST", "/v1/chat/completions", key, body, X_Etude_Turn="summary")
            refused = await caller.send("POST", "/v1/chat/completions", key, body, X_Etude_Turn="plan")
            assert refused.error == (400, "invalid_request_error", "invalid_request", "X-Etude-Turn")
            return await caller.close(session_id)

    check(asyncio.run(act()), engine, [[A], [S]])
