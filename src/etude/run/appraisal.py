"""What a finished rollout is worth, all considered: gathers what the parts of its reward are, and adds them up.

    turns ──words──▶ conduct ──▶ behaviour ┐
    grader's reward and its parts ─────────┼─▶ combine ──▶ the reward ──▶ Appraisal
    harness's measures ────────────────────┤                                 ▲
    a judge, where a part asks for one ────┘             hints, rewards of single turns

Wiring only: terms, rules, rubrics and the sum are :mod:`etude.rewards`'s. Without ``[reward]`` the grader's word stands
untouched.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import orjson

from etude.clock import SystemClock
from etude.config.recipe import RunConfig
from etude.config.reward import RewardConfig
from etude.errors import ConfigError, JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.harnesses.actions import THOUGHTS
from etude.ledger.ledger import Facts
from etude.protocols import Appraisal, Clock, Grade, HarnessResult
from etude.rewards.shaping.behaviour import measure, observe
from etude.rewards.shaping.effort import effort_of
from etude.rewards.shaping.hints import HintFinder
from etude.rewards.shaping.malformed_calls import slip_rewards
from etude.rewards.shaping.parts import (
    GRADER,
    Combined,
    MakeUp,
    check_behaviours,
    combine,
    differences,
    digest_of,
    to_json,
)
from etude.rewards.transcript import SpokenTurn, attributed
from etude.rollouts.breaker import FIRST_PAUSE_S, MAX_PAUSE_S
from etude.run.detokenize import TurnReader, turn_reader
from etude.run.hints import open_hints
from etude.run.judging import OpenJudge
from etude.tokens.messages import ChatFormat
from etude.types import AnswerChecks, Task, Turn, TurnKind

REWARD_FACT, MAKE_UP_FACT = "reward", "reward_made_of"
"""Under which the ledger remembers the digest of a run's reward, and what it is the digest of."""


class PartJudge(Protocol):
    """Somebody who judges rollouts, one value for each rubric."""

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        """Rubric → value in [0, 1]. Raises :class:`~etude.errors.JudgeUnavailable`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAppraiser:
    """Appraises every rollout of a run; implements :class:`~etude.protocols.Appraiser`."""

    reward: RewardConfig
    read: TurnReader
    """Turns in words."""
    bare_shell: bool = False
    """Whether replies are shell commands without any mark."""
    thinking_end_id: int = -1
    """The token that ends a turn's thinking; −1: the model does not think."""
    judge: PartJudge | None = None
    hints: HintFinder | None = None
    rewards_turns: bool = False
    """Whether single turns have rewards of their own."""
    clock: Clock = field(default_factory=SystemClock)
    outage_s: float = 300.0
    """How long a part may wait for a judge that is away."""

    async def appraise(self, task: Task, result: HarnessResult, reward: Grade, turns: Sequence[Turn]) -> Appraisal:
        """The reward that the recipe's parts add up to, and hints.

        Raises like :func:`~etude.rewards.shaping.parts.combine`, and :class:`~etude.errors.JudgeUnavailable` where a
        part has waited for a judge in vain.
        """
        spoken = await asyncio.to_thread(self.read, turns)  # millions of tokens take seconds: others go on meanwhile
        done = _Finished(task=task, result=result, reward=reward, turns=turns, spoken=spoken)
        masked = ""
        if self.reward.parts:
            combined, beside = await self._combine(done)
            recorded = {**reward.parts, **beside, **combined.parts}
            counted = {"clipped": float(combined.clipped), "assumed": float(combined.assumed)}
            reward, masked = Grade(value=combined.value, parts=recorded | counted), combined.masked
        return Appraisal(
            reward=reward,
            turn_rewards=slip_rewards(done.spoken) if self.rewards_turns else (),
            hints=() if self.hints is None else await self.hints.find(task, turns, done.spoken),
            masked=masked,
        )

    async def _combine(self, done: "_Finished") -> tuple[Combined, Mapping[str, float]]:
        """The sum, and what is known beside its parts, by source."""
        result, parts = done.result, done.reward.parts
        conduct = observe(
            done.spoken,
            counts=result.counts,
            measures=result.measures,
            sampled_tokens=sum(len(turn.completion_ids) for turn in done.turns),
            bare_shell=self.bare_shell,
        )
        beside = {
            GRADER: done.reward.value,
            **_under("behaviour", measure(conduct)),
            **_under("judge", await self._judged(done)),
        }
        combined = combine(self.reward, beside | _under(GRADER, parts) | _under("measure", result.measures))
        _check_names(self.reward, parts.keys() | result.measures.keys())
        effort = effort_of(done.turns, result.counts, self.thinking_end_id)
        return combined, beside | _under("effort", asdict(effort))

    async def _judged(self, done: "_Finished") -> Mapping[str, float]:
        """What the judge says, where a part asks for it; nothing while it is out of reach and no part waits for it, or
        where it will say nothing of this rollout.

        Else the rollout, which is finished and graded, is held until the judge is back, for as long as machines may be
        out of order at all.
        """
        asked = [part for part in self.reward.parts if part.source.startswith("judge.")]
        if self.judge is None or not asked:
            return {}
        result, transcript = replace(done.result, answer=_answer_of(done)), transcript_of(done.spoken)
        until_s, pause_s = self.clock.now() + self.outage_s, FIRST_PAUSE_S
        while True:
            try:
                return await self.judge.parts(done.task, result, transcript)
            except JudgeUnavailable as error:
                if isinstance(error, JudgeDeclined) or all(part.missing == "mask" for part in asked):
                    return {}
                if isinstance(error, JudgeLost) or self.clock.now() + pause_s > until_s:
                    raise
            await self.clock.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2.0 * pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    """A rollout as it is appraised."""

    task: Task
    result: HarnessResult
    reward: Grade
    """The grader's."""
    turns: Sequence[Turn]
    spoken: Sequence[SpokenTurn]


def open_appraiser(config: RunConfig, chat: ChatFormat, judge: OpenJudge | None) -> RolloutAppraiser | None:
    """Who appraises the rollouts of a recipe; nobody where the grader's word is all that it wants.

    Raises :class:`~etude.errors.ConfigError` for a part whose source is not there, or is of another version, and where
    the model's chat template takes no hint.
    """
    check_behaviours(config.reward)
    hints = open_hints(config, chat, judge.hints if judge is not None and config.hints.judge else None)
    rewards_turns = config.credit.kind == "shaped"
    if not (config.reward.parts or rewards_turns or hints is not None):
        return None
    return RolloutAppraiser(
        reward=config.reward,
        read=turn_reader(chat),
        bare_shell=config.harness.kind == "command",
        thinking_end_id=config.effort.thinking_end_id,
        judge=None if judge is None else judge.parts,
        hints=hints,
        rewards_turns=rewards_turns,
        outage_s=config.rollouts.outage_s,
    )


def transcript_of(spoken: Sequence[SpokenTurn]) -> str:
    """A rollout as a judge reads it: everything once, in order, and before every line who said it."""
    turns = enumerate(spoken)
    pages = (attributed(heard=turn.heard, said=turn.said, before=f"turn {number} ") for number, turn in turns)
    return "\n".join(pages)


def hold_reward(facts: Facts, made: MakeUp) -> None:
    """Remember what a run's reward is made of, so that it is the same until its end: rewards of two makes cannot be
    compared. Raises :class:`~etude.errors.ConfigError` for another one than it began with.
    """
    known, now = facts.get(REWARD_FACT), digest_of(made)
    if known is None:
        facts.set(MAKE_UP_FACT, to_json(made).decode())
        facts.set(REWARD_FACT, now)
    elif known != now:
        before: MakeUp = orjson.loads(facts.get(MAKE_UP_FACT) or "{}")
        changes = "; ".join(differences(before, orjson.loads(to_json(made))))
        raise ConfigError(
            f"[reward] is {now[:12]}, but this run began with {known[:12]}: {changes}. Put it back as it was, or start "
            f"another run"
        )


def _answer_of(done: _Finished) -> str:
    """What a judge of the answer reads: what was handed in; of a task that asks for none, what an agent said last, its
    thoughts left out.
    """
    answer = done.result.answer
    if answer.strip() or isinstance(done.task.checks, AnswerChecks):
        return answer
    said = (THOUGHTS.sub("", turn.said).strip() for turn in reversed(done.spoken) if turn.kind is TurnKind.ACT)
    return next(filter(None, said), "")


def _under(kind: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{kind}.{name}": value for name, value in values.items()}


def _check_names(config: RewardConfig, taken: set[str]) -> None:
    """A name of the record stands for one thing. Raises :class:`~etude.errors.ConfigError`."""
    for part in config.parts:
        if part.name in taken and part.source not in (f"grader.{part.name}", f"measure.{part.name}"):
            raise ConfigError(
                f"reward.parts: {part.name!r} is of {part.source!r}, but the grader or the harness records something "
                f"else under that name; choose another"
            )
