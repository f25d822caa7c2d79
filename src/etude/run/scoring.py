"""The scorer and the cheat monitor of a run: they collect the inputs of :func:`etude.rewards.score.score`.

    sandbox ──baits──▶ findings ────────────────────┐
    turns ──text──▶ actions ──detectors──▶ findings ┤
              ├───▶ behaviour ──────────────────────┤
              ├───▶ effort (recorded only) ─────────┼──▶ score ──▶ ScoredRollout
    grade, harness's measures ──────────────────────┤                   ▲
    functions that parts name ──────────────────────┤     hints, rewards of single turns
    a judge, if a part uses one ────────────────────┘

Wiring only: terms, rules, rubrics, detectors and the score are in :mod:`etude.rewards`, baits in :mod:`etude.tasks`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol, cast

import orjson

from etude.clock import SystemClock
from etude.config.recipe import RunConfig
from etude.config.reward import FUNCTIONS, RewardConfig
from etude.errors import ConfigError, JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.harnesses.actions import THOUGHTS, Finding, Severity, read_actions
from etude.ledger.ledger import Facts
from etude.protocols import Clock, HarnessResult, RewardFunction, RewardInput, Sandbox
from etude.rewards.monitor.monitor import inspect, scene_of
from etude.rewards.score import BY_SEVERITY, ScorePolicy, score
from etude.rewards.shaping.behaviour import measure, observe
from etude.rewards.shaping.effort import effort_of
from etude.rewards.shaping.hints import HintFinder, malformed_call_rewards
from etude.rewards.shaping.parts import RewardSpec, check_behaviours, differences, digest_of, to_json
from etude.rewards.transcript import SpokenTurn, attributed, conversations, spoken_turns
from etude.rollouts.breaker import FIRST_PAUSE_S, MAX_PAUSE_S
from etude.rollouts.worker import GradedRollout, ScoredRollout, Scorer
from etude.run.detokenize import TurnReader, decoder, turn_reader
from etude.run.hints import open_hints
from etude.run.judging import OpenJudge
from etude.tasks.honeypots import Bait, draw_baits, lift, look, plant, touches
from etude.tasks.impossible import is_impossible
from etude.tokens.messages import ChatFormat
from etude.types import AnswerChecks, Disposition, Ids, Task, Turn, TurnKind

logger = logging.getLogger(__name__)

FUNCTION_S = 60.0
"""Time limit of a reward function: one that calls a service sets a lower limit itself."""
REWARD_SECTION = "reward"
"""Section of a recipe with the reward of rollouts, and the fact of the ledger with its digest."""


class PartJudge(Protocol):
    """Protocol of a judge of rollouts with one value per rubric."""

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        """Rubric → value in [0, 1]. Raises :class:`~etude.errors.JudgeUnavailable`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScorer:
    """Scores every rollout of a run; implements :class:`~etude.rollouts.worker.Scorer`."""

    policy: ScorePolicy
    read: TurnReader
    """Turns as text."""
    bare_shell: bool = False
    """True if replies are shell commands without any markup."""
    thinking_end_id: int = -1
    """The token that ends a turn's thinking; −1: the model does not emit reasoning."""
    judge: PartJudge | None = None
    hints: HintFinder | None = None
    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    """Source of a part → its function."""
    rewards_turns: bool = False
    """True if single turns have their own rewards."""
    clock: Clock = field(default_factory=SystemClock)
    outage_s: float = 300.0
    """Time that a part may wait for a judge that is unavailable."""

    async def score(self, rollout: GradedRollout) -> ScoredRollout:
        """The score, hints and rewards of turns.

        Raises like :func:`~etude.rewards.score.score`, and :class:`~etude.errors.JudgeUnavailable` if a part waited for
        a judge longer than ``outage_s``.
        """
        needs_text = self.policy.reward.parts or self.rewards_turns or self.hints is not None
        # Millions of tokens take seconds: a thread keeps other rollouts running.
        spoken = await asyncio.to_thread(self._spoken, rollout) if needs_text else ()
        _check_names(self.policy.reward, rollout.grade.parts.keys() | rollout.result.measures.keys())
        values = await self._values(rollout, spoken) if self.policy.reward.parts else {}
        impossible = is_impossible(rollout.task)
        return ScoredRollout(
            score=score(rollout.grade, rollout.findings, values, self.policy, impossible=impossible),
            turn_rewards=malformed_call_rewards(spoken) if self.rewards_turns else (),
            hints=() if self.hints is None else await self.hints.find(rollout.task, rollout.turns, spoken),
        )

    def _spoken(self, rollout: GradedRollout) -> Sequence[SpokenTurn]:
        """The turns as text; for a model whose tokens are unknown, from the texts of its calls."""
        return spoken_turns(rollout.result.spoken) if rollout.result.spoken else self.read(rollout.turns)

    async def _values(self, rollout: GradedRollout, spoken: Sequence[SpokenTurn]) -> Mapping[str, float]:
        """All values except the grade, by source."""
        result = rollout.result
        conduct = observe(
            spoken,
            counts=result.counts,
            measures=result.measures,
            sampled_tokens=sum(len(turn.completion_ids) for turn in rollout.turns),
            bare_shell=self.bare_shell,
        )
        effort = effort_of(rollout.turns, result.counts, self.thinking_end_id)
        kinds = {
            "behaviour": measure(conduct),
            "judge": await self._judged(rollout, spoken),
            "measure": result.measures,
            "effort": asdict(effort),
        }
        by_source = {f"{kind}.{name}": value for kind, values in kinds.items() for name, value in values.items()}
        return {**by_source, **await self._called(rollout, spoken)} if self.functions else by_source

    async def _called(self, rollout: GradedRollout, spoken: Sequence[SpokenTurn]) -> Mapping[str, float]:
        """The values of functions; a function that raises or takes too long has none, which is logged."""
        shown = RewardInput(
            task=rollout.task,
            grade=rollout.grade,
            result=rollout.result,
            turns=rollout.turns,
            transcript=transcript_of(spoken),
        )
        values: dict[str, float] = {}
        for source, function in self.functions.items():
            try:
                async with asyncio.timeout(FUNCTION_S):
                    value = await asyncio.to_thread(function, shown)
                    values[source] = float(await value if isinstance(value, Awaitable) else value)
            except Exception:  # a user's code may raise anything
                logger.exception("reward function %s", source)
        return values

    async def _judged(self, rollout: GradedRollout, spoken: Sequence[SpokenTurn]) -> Mapping[str, float]:
        """The judge's values, if a part uses them; none while it is unavailable and no part waits for it, or if it does
        not judge this rollout.

        Otherwise the rollout, which is finished and graded, waits until the judge is available again, for at most
        ``outage_s``.
        """
        judged_parts = [part for part in self.policy.reward.parts if part.source.startswith("judge.")]
        if self.judge is None or not judged_parts:
            return {}
        result = replace(rollout.result, answer=_answer_of(rollout, spoken))
        transcript = transcript_of(spoken)
        until_s, pause_s = self.clock.now() + self.outage_s, FIRST_PAUSE_S
        while True:
            try:
                return await self.judge.parts(rollout.task, result, transcript)
            except JudgeUnavailable as error:
                if isinstance(error, JudgeDeclined) or all(part.missing == "mask" for part in judged_parts):
                    return {}
                if isinstance(error, JudgeLost) or self.clock.now() + pause_s > until_s:
                    raise
            await self.clock.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2.0 * pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaitingMonitor:
    """Monitors every rollout of a run; implements :class:`~etude.rollouts.worker.CheatMonitor`."""

    decode: Callable[[Ids], str]
    """The text of token ids."""
    honeypots: bool
    bare_shell: bool
    """True if replies are shell commands without any markup (``recipes/external-harness``)."""

    async def begin(self, task: Task, sandbox: Sandbox) -> "BaitedRollout":
        """Place baits in a fresh sandbox. Raises :class:`~etude.errors.SandboxError`."""
        baits = await plant(sandbox, draw_baits()) if self.honeypots else ()
        return BaitedRollout(self, task, sandbox, baits)


class BaitedRollout:
    """One rollout under the monitor; implements :class:`~etude.rollouts.worker.MonitoredRollout`."""

    def __init__(self, monitor: BaitingMonitor, task: Task, sandbox: Sandbox, baits: Sequence[Bait]) -> None:
        self._monitor = monitor
        self._task = task
        self._sandbox = sandbox
        self._baits = tuple(baits)
        self._touched: tuple[Finding, ...] = ()

    async def look(self) -> None:
        """Check and remove the baits, so that none is graded. Raises :class:`~etude.errors.SandboxError`."""
        if self._baits:
            self._touched = await look(self._sandbox, self._baits)
            await lift(self._sandbox, self._baits)

    def fork(self, sandbox: Sandbox) -> "BaitedRollout":
        """The monitor of a fork, whose copy contains the same baits."""
        return BaitedRollout(self._monitor, self._task, sandbox, self._baits)

    def findings(self, turns: Sequence[Turn]) -> Sequence[Finding]:
        """Findings of touched baits and of the detectors in the actions."""
        actions = read_actions(tuple(turns), self._monitor.decode, bare_shell=self._monitor.bare_shell)
        return (*self._touched, *touches(actions, self._baits), *inspect(actions, scene_of(self._task)))


def open_monitor(config: RunConfig, chat: ChatFormat) -> BaitingMonitor:
    """The cheat monitor of a recipe."""
    return BaitingMonitor(
        decode=decoder(chat),
        honeypots=config.cheating.honeypots,
        bare_shell=config.harness.kind == "command",
    )


def open_scorer(config: RunConfig, chat: ChatFormat, judge: OpenJudge | None) -> Scorer:
    """The scorer of a recipe.

    Raises :class:`~etude.errors.ConfigError` for a part whose source is missing or has another version, and if the
    model's chat template accepts no hint.
    """
    return reward_scorer(
        config,
        judge,
        read=turn_reader(chat),
        hints=open_hints(config, chat, judge.hints if judge is not None and config.hints.judge else None),
    )


def reward_scorer(
    config: RunConfig, judge: OpenJudge | None, *, read: TurnReader, hints: HintFinder | None = None
) -> RewardScorer:
    """A scorer of a recipe's ``[reward]``. Raises :class:`~etude.errors.ConfigError` as :func:`open_scorer` does."""
    check_behaviours(config.reward)
    return RewardScorer(
        policy=policy_of(config),
        read=read,
        bare_shell=config.harness.kind == "command",
        thinking_end_id=config.effort.thinking_end_id,
        judge=None if judge is None else judge.parts,
        functions={
            part.source: cast("RewardFunction", FUNCTIONS.find(part.source))
            for part in config.reward.parts
            if part.is_function
        },
        hints=hints,
        rewards_turns=config.credit.kind == "shaped",
        outage_s=config.rollouts.outage_s,
    )


def policy_of(config: RunConfig) -> ScorePolicy:
    """The score policy of a recipe."""
    outcomes = {name: Disposition(outcome) for name, outcome in config.cheating.outcomes.items()}
    return ScorePolicy(
        reward=config.reward,
        by_severity={severity: outcomes.get(severity.name.lower(), BY_SEVERITY[severity]) for severity in Severity},
        by_name=outcomes,
    )


def transcript_of(spoken: Sequence[SpokenTurn]) -> str:
    """A rollout as a judge reads it: everything once, in order, with the speaker before every line. Several
    conversations follow in the order of their start, each with its number; turns are numbered consecutively.
    """
    pages: list[str] = []
    for number, turns in enumerate(conversations(spoken), start=1):
        name = f"conversation {number} " if number > 1 else ""
        for index in turns:
            turn = spoken[index]
            pages.append(attributed(heard=turn.heard, said=turn.text, before=f"{name}turn {index} "))
    return "\n".join(pages)


def freeze_reward(facts: Facts, spec: RewardSpec, section: str = REWARD_SECTION) -> None:
    """Record the definition of a run's reward in a recipe section, so that it stays the same until the run's end:
    rewards of two specifications cannot be compared. Raises :class:`~etude.errors.ConfigError` if it differs from the
    initial one.
    """
    made_of = f"{section}_made_of"
    before, now = facts.get(section), digest_of(spec)
    if before is None:
        facts.set(made_of, to_json(spec).decode())
        facts.set(section, now)
    elif before != now:
        old: RewardSpec = orjson.loads(facts.get(made_of) or "{}")
        changes = "; ".join(differences(old, orjson.loads(to_json(spec))))
        raise ConfigError(
            f"[{section}] is {now[:12]}, but this run began with {before[:12]}: {changes}. Put it back as it was, or "
            f"start another run"
        )


def _answer_of(rollout: GradedRollout, spoken: Sequence[SpokenTurn]) -> str:
    """The text that a judge of the answer reads: the submitted answer or, for a task without one, the agent's last
    message without its reasoning.
    """
    answer = rollout.result.answer
    if answer.strip() or isinstance(rollout.task.checks, AnswerChecks):
        return answer
    texts = (THOUGHTS.sub("", turn.text).strip() for turn in reversed(spoken) if turn.kind is TurnKind.ACT)
    return next(filter(None, texts), "")


def _check_names(config: RewardConfig, taken: set[str]) -> None:
    """Raise :class:`~etude.errors.ConfigError` if two values of the record have the same name."""
    for part in config.parts:
        if part.name in taken and part.source not in (f"grader.{part.name}", f"measure.{part.name}"):
            raise ConfigError(
                f"reward.parts: {part.name!r} is of {part.source!r}, but the grader or the harness records something "
                f"else under that name; choose another"
            )
