"""A rollout of two million tokens in a window of 200k: every token is exact, within stated bytes of memory per token.

It takes the whole path of a rollout: a client whose tools return thousands of tokens, contexts that fill up and are
summarised, the real gateway in its own process, turns that are fetched, recorded in a ledger, read back, built into
trajectories, and scored word for word.
"""

import asyncio
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest

import long_gateway
from etude.config.reward import PartConfig, RewardConfig
from etude.harnesses.completions import CompletionClient, Message
from etude.harnesses.summaries import KeptState, ask_for_summary, open_again
from etude.ledger.ledger import TRAIN, Ledger
from etude.ledger.turns import encode_turns
from etude.protocols import Grade, HarnessResult
from etude.rewards.score import ScorePolicy
from etude.rewards.shaping.hints import TOOL_RULES, HintFinder
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sessions import GatewaySessions
from etude.rollouts.worker import GradedRollout, ScoredRollout
from etude.run.detokenize import turn_reader
from etude.run.scoring import RewardScorer
from etude.trainer.batching.build import build_trajectories
from etude.types import Rollout, RolloutStatus, Trajectory, Turn, TurnKind
from ledgers import task
from long_gateway import ADMIN_KEY, LONGEST, WINDOW, WORDS, completion_of

TOKENS = 2_000_000
"""Of all contexts together."""
OBSERVATION_WORDS = 4_000
SUMMARY_AT = WINDOW - 10_000
PROMPT, REQUEST = "find out what the taxes sum up to", "summarise"
GATEWAY_BYTES = 32
"""Per token, beyond what the gateway takes with a session of one window: tapes, text, and the blob at the end."""
READER_BYTES = 48
"""Per token: the turns, a record, the record read back, and trajectories, all held at once."""
WORD_BYTES = 8
"""Per token: all that was heard and said, once, as text."""
TURN_BYTES = 100
"""Per turn, of a blob or a record."""
SLOWER = 2.5
"""How much more work a turn of the last contexts may be than one of the first, in the least disturbed one of each: work
that grew with all that was said before would be ten times as much. What remains is a neighbour's noise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Counts of one context."""

    tokens: int
    turns: int
    gateway_s: float
    """CPU time of the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The gateway's process, from outside."""

    pid: int
    url: str

    @property
    def cpu_s(self) -> float:
        """Time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self, name: str) -> int:
        """Resident memory: ``VmRSS`` now, ``VmHWM`` at its highest."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Result of a session: its contexts and its turns."""

    contexts: Sequence[Context]
    turns: tuple[Turn, ...]


@contextmanager
def gateway() -> Iterator[Process]:
    command = [sys.executable, long_gateway.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Process(pid=process.pid, url=f"http://127.0.0.1:{int(process.stdout.readline())}")
        process.stdin.close()
        assert process.wait(20) == 0


async def work(process: Process, tokens: int) -> Work:
    """Continue until ``tokens`` tokens were read and sampled, context after context."""
    chance, contexts, first = random.Random(0), list[Context](), PROMPT
    async with aiohttp.ClientSession() as http:
        sessions = GatewaySessions(GatewayTable([process.url]), ADMIN_KEY, http)
        session = await sessions.open()
        acting, summing_up = (
            CompletionClient(http, max_tokens=LONGEST, timeout_s=30.0, kind=kind) for kind in TurnKind
        )
        while sum(context.tokens for context in contexts) < tokens:
            messages: list[Message] = [{"role": "user", "content": first}]
            began_s, turns = process.cpu_s, 0
            while True:
                reply = await acting.complete(session, messages, temperature=1.0)
                assert reply.finish == "stop"
                observation, turns = " ".join(chance.choices(WORDS, k=OBSERVATION_WORDS)), turns + 1
                full = reply.tokens >= min(SUMMARY_AT, tokens)
                shown = ask_for_summary(observation, REQUEST) if full else observation
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": shown}]
                if full:
                    break
            reply = await summing_up.complete(session, messages, temperature=1.0)
            assert reply.finish == "stop"
            contexts.append(Context(tokens=reply.tokens, turns=turns + 1, gateway_s=process.cpu_s - began_s))
            first = open_again(PROMPT, reply.text, KeptState(summaries=len(contexts)))
        return Work(contexts=contexts, turns=await sessions.close(session.session_id))


def recorded(turns: tuple[Turn, ...], folder: Path) -> Rollout:
    """The rollout as it is read back from a ledger."""
    with Ledger.open(str(folder / "ledger.db")) as ledger:
        index = ledger.admit_group(task("long"), TRAIN, 1, 0)
        assert index is not None
        rollout = Rollout(
            rollout_id="long",
            group_index=index,
            slot=0,
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=1.0,
            turns=turns,
            turn_rewards=(0.5,) * len(turns),
        )
        ledger.record(rollout, TRAIN)
        (read,) = ledger.group(TRAIN, index).rollouts
        return read


async def scored(rollout: Rollout) -> ScoredRollout:
    """Score a rollout, with all its text: behaviour, malformed calls of each turn, hints."""
    behaved = PartConfig(name="behaved", source="behaviour.thinking_comments", version=1, weight=-1.0, range=(0.0, 1.0))
    scorer = RewardScorer(
        policy=ScorePolicy(reward=RewardConfig(parts=(behaved,))),
        read=turn_reader(long_gateway.template()),
        hints=HintFinder(TOOL_RULES, most=1, fits=lambda prompt_ids: True),
        rewards_turns=True,
    )
    result = HarnessResult(reason="submit", counts={}, measures={})
    grade = Grade(value=1.0, parts={})
    return await scorer.score(GradedRollout(task=task("long"), result=result, grade=grade, turns=rollout.turns))


@pytest.mark.timeout(900)
def test_two_million_tokens_are_exact_and_take_bounded_memory(tmp_path: Path) -> None:
    with gateway() as process:
        asyncio.run(work(process, WINDOW))  # so that what a call takes in passing does not count
        before = process.memory_bytes("VmRSS")
        done = asyncio.run(work(process, TOKENS))
        peak = process.memory_bytes("VmHWM") - before
    contexts, turns = done.contexts, done.turns
    tokens = sum(context.tokens for context in contexts)
    sampled = sum(len(turn.completion_ids) for turn in turns)
    assert len(contexts) >= 10
    assert tokens >= TOKENS

    assert_exact(turns, contexts)
    assert peak < GATEWAY_BYTES * tokens < sum(turn.prompt_ids.nbytes for turn in turns) / 2
    per_turn_s = [context.gateway_s / context.turns for context in contexts]
    assert min(per_turn_s[-3:]) < SLOWER * min(per_turn_s[:3]), per_turn_s

    assert len(encode_turns(turns)) < 4 * tokens + 12 * sampled + TURN_BYTES * len(turns)
    tracemalloc.start()
    rollout = recorded(turns, tmp_path)
    trajectories = build_trajectories(rollout, 0.5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < READER_BYTES * tokens
    assert rollout.turn_rewards == (0.5,) * len(turns)
    assert_trained_once(trajectories, turns)
    assert [len(trajectory.token_ids) for trajectory in trajectories] == [context.tokens for context in contexts]
    assert (tmp_path / "ledger.db").stat().st_size < 5 * tokens

    tracemalloc.start()
    scored_rollout = asyncio.run(scored(rollout))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < WORD_BYTES * tokens
    assert len(scored_rollout.turn_rewards) == len(turns)


def assert_exact(turns: Sequence[Turn], contexts: Sequence[Context]) -> None:
    """Check that turns are what the engine was given and sampled, and that each context ends with a summary."""
    for turn in turns:
        shown = completion_of(turn.prompt_ids)
        for name in ("token_ids", "logprobs", "versions"):
            ours = getattr(turn, name.replace("token_ids", "completion_ids"))
            assert ours.tobytes() == getattr(shown, name).tobytes()
    kinds = [kind for context in contexts for kind in (*[TurnKind.ACT] * (context.turns - 1), TurnKind.SUMMARY)]
    assert [turn.kind for turn in turns] == kinds


def assert_trained_once(trajectories: Sequence[Trajectory], turns: Sequence[Turn]) -> None:
    """The trained tokens of all trajectories are the sampled ones of all turns, in order."""
    for name, shown in (("token_ids", "completion_ids"), ("logprobs", "logprobs"), ("versions", "versions")):
        trained = np.concatenate([getattr(one, name)[one.loss_mask] for one in trajectories])
        sampled = np.concatenate([getattr(turn, shown) for turn in turns])
        assert trained.tobytes() == sampled.tobytes()
