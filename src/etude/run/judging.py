"""The judge of a recipe, assembled for a run or for the command line.

    [judge] ──▶ rubrics, calibrations ──▶ trusted? ──▶ endpoint (a model's, or local rules) ──▶ parts, hints

This module owns the wiring and the files: votes and spending are in the run folder, with copies at the URL of the run;
calibrations are next to the rubrics. :mod:`etude.rewards.judge` makes the decisions.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from etude.aio import gather_or_cancel
from etude.clock import SystemClock, date_utc
from etude.config.judge import KEY_VARIABLE, JudgeConfig, ModelJudgeOptions
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, EtudeError
from etude.rewards.judge.budget import BudgetLimit, JudgeBudget, JudgePause, Prices, SpendFile
from etude.rewards.judge.calibration import (
    Alarm,
    Calibration,
    IdentityWatch,
    LabelledItem,
    agreement_of,
    bias_of,
    distrust,
    parse_calibration,
)
from etude.rewards.judge.endpoint import Address, ChatEndpoint, Endpoint
from etude.rewards.judge.hints import HintJudge
from etude.rewards.judge.judge import Judge, JudgeDeps, JudgeLimits, needed_for
from etude.rewards.judge.parts import BESIDE, CalibrationShiftCheck, JudgedParts
from etude.rewards.judge.prompts import JudgeInput, JudgeParams, Rubric, judge_fingerprint, parse_rubric
from etude.rewards.judge.rules import MODEL, SUMMARY_RULES, SUMMARY_RULES_VERSION, Rule, rules_app
from etude.rewards.judge.votes import Judgement, VoteCache
from etude.rewards.shaping.parts import digest_of, reward_spec
from etude.rollouts.breaker import Breaker
from etude.run.endpoints import HOST
from etude.run.folder import RunFolder
from etude.run.kept_files import KeptFiles
from etude.run.rounds import Rounds
from etude.run.serving import listening
from etude.telemetry.events import JudgeAlarm

logger = logging.getLogger(__name__)

OPENAI = "api.openai.com"
"""The host of OpenAI's own API."""
RECHECK_EVERY = 50
"""Number of judgements of an aspect after which a calibration item is judged again: at most two calls in a hundred."""
COPY_S = 30.0
"""Initial interval at which votes and costs are copied to the URL of a run."""
CACHE_ENTRIES = 100_000
"""Maximum number of votes stored in the run folder: about ten megabytes."""


@dataclass(frozen=True, slots=True)
class JudgeState:
    """Files of a process's judge: cached votes and spend."""

    folder: Path
    """The run's folder."""
    worker_id: int = 0
    """Number of the rollouts process: each has its own files."""

    @property
    def votes(self) -> Path:
        """The cache of votes."""
        return self.folder / f"judge-{self.worker_id}.db"

    @property
    def pause(self) -> JudgePause:
        """Pause of the run's judging."""
        return JudgePause(self.folder / "judge-held.txt")

    @property
    def spending(self) -> SpendFile:
        """Spend of this process and of the others."""
        return SpendFile(self.folder, self.worker_id)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all these files in the folder."""
        return (self.votes.name, f"judge-spend-{self.worker_id}.json", "judge-held.txt")


@contextlib.contextmanager
def synced_judge_state(folder: RunFolder, state: JudgeState) -> Iterator[None]:
    """Restore the votes and the spending of this worker's judge from the URL of the run, and copy them there while the
    context is open; does nothing for a run without a URL.

    Raises :class:`~etude.errors.DamagedError` for an incomplete copy.
    """
    files = KeptFiles(folder, f"judge/{state.worker_id}")
    files.bring()

    def copy() -> None:
        try:
            files.keep(*state.files, whole=True)
        except (EtudeError, OSError, sqlite3.Error) as error:
            logger.warning("votes of the judge are not copied yet: %s", error)

    with Rounds("copies of votes", copy, COPY_S) if folder.url else contextlib.nullcontext():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rule-based judges of a task family's work."""

    version: str
    by_aspect: Mapping[str, Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJudge:
    """The open judge of a run and the components that use it."""

    judge: Judge
    parts: JudgedParts
    hints: HintJudge


def rules_of(config: RunConfig) -> Rules:
    """The rules of a task family. Raises :class:`~etude.errors.ConfigError` if it has none."""
    match config.tasks.family:
        case "summaries":
            return Rules(version=SUMMARY_RULES_VERSION, by_aspect=SUMMARY_RULES)
        case family:
            raise ConfigError(f"judge.kind = 'rules', but tasks.family = {family!r} has none: set judge.kind = 'model'")


def rubrics_of(config: JudgeConfig) -> Mapping[str, Rubric]:
    """Rubrics by aspect. Raises :class:`~etude.errors.ConfigError` for an unreadable rubric or one of
    another aspect.
    """
    rubrics = {aspect: parse_rubric(text, f"judge.rubrics.{aspect}") for aspect, text in config.rubrics.items()}
    for aspect, rubric in rubrics.items():
        if aspect in BESIDE:
            raise ConfigError(f"judge.rubrics.{aspect}: that name has another meaning in the record; choose another")
        if rubric.aspect != aspect:
            raise ConfigError(f"judge.rubrics.{aspect} is about {rubric.aspect!r}: use that name as its key")
    return rubrics


def judge_params(config: RunConfig) -> JudgeParams:
    """The voting parameters of a recipe."""
    judge = config.judge.required_options
    return JudgeParams(
        model=judge.model if isinstance(judge, ModelJudgeOptions) else f"{MODEL}-{rules_of(config).version}",
        votes=judge.votes,
        temperature=judge.temperature,
        max_tokens=judge.max_tokens,
        text_characters=judge.text_characters,
        structured=isinstance(judge, ModelJudgeOptions) and judge.structured,
    )


def judge_fingerprints(config: RunConfig) -> Mapping[str, str]:
    """Digests by aspect of all local settings that decide a verdict; none without a judge."""
    if config.judge.kind == "none":
        return {}
    params = judge_params(config)
    return {aspect: judge_fingerprint(rubric, params) for aspect, rubric in rubrics_of(config.judge).items()}


def reward_digest(config: RunConfig) -> str:
    """SHA-256 of the definitions of a recipe's reward parts, including rubrics; empty for a recipe without parts."""
    return digest_of(reward_spec(config.reward, judge_fingerprints(config))) if config.reward.parts else ""


def calibrations_of(config: JudgeConfig) -> Mapping[str, Calibration]:
    """Calibration reports by aspect. Raises :class:`~etude.errors.ConfigError` for an invalid one."""
    return {name: parse_calibration(text, f"judge.calibrations.{name}") for name, text in config.calibrations.items()}


def check_judge(config: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a judge that cannot be used, whose budget is too small, or that is
    not trusted with an aspect named by a reward part.
    """
    if config.judge.kind == "none":
        return
    check_budget(config)
    calibrations, aspects = calibrations_of(config.judge), config.reward.names("judge")
    if config.judge.kind == "rules":
        missing = config.judge.rubrics.keys() - rules_of(config).by_aspect.keys()
        if missing:
            raise ConfigError(f"judge.rubrics: there is no rule for {', '.join(sorted(missing))}")
    for aspect, fingerprint in judge_fingerprints(config).items():
        reason = distrust(calibrations.get(aspect), fingerprint, config.judge.min_agreement)
        if reason and aspect in aspects and not config.judge.allow_uncalibrated:
            raise ConfigError(
                f"the judge of {aspect!r} cannot be trusted: {reason}. Run `etude judge calibrate RECIPE` and name "
                f"the report in judge.calibrations, or set judge.allow_uncalibrated = true"
            )


def check_budget(config: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a budget that is too small to judge one rollout."""
    judge, aspects = config.judge, config.reward.names("judge")
    rubrics, options = [each for aspect, each in rubrics_of(judge).items() if aspect in aspects], judge.required_options
    needed = needed_for(rubrics, judge_params(config))
    for budget in (rollout_budget(judge), _run_budget(judge)):
        if not budget.holds(needed, _prices(judge)):
            raise ConfigError(
                f"{budget}: a rollout is judged in {needed.calls} calls (judge.options.votes = {options.votes} "
                f"on each of {len(rubrics)} aspects) of up to {needed.tokens} tokens in total (texts are limited by "
                f"judge.options.text_characters = {options.text_characters}); raise the budget, or lower one of these"
            )


async def check_key(config: RunConfig) -> None:
    """Check that the endpoint of the recipe's judge accepts the key from the environment; costs nothing.

    Raises :class:`~etude.errors.ConfigError` if it does not, and :class:`~etude.errors.JudgeUnavailable` if it cannot
    be reached.
    """
    judge = config.judge.options
    assert isinstance(judge, ModelJudgeOptions), "only a model's endpoint has a key"
    async with aiohttp.ClientSession() as http, endpoint_of(config, http) as endpoint:
        is_taken = await endpoint.takes_key()
    if not is_taken:
        given = "which is wrong" if os.environ.get(KEY_VARIABLE) else "which is not set"
        raise ConfigError(
            f"judge.options.url = {judge.url!r} rejects the key in {KEY_VARIABLE}, {given}: export {KEY_VARIABLE} with "
            f"the key of that endpoint"
        )


@contextlib.asynccontextmanager
async def open_judge(
    config: RunConfig,
    http: aiohttp.ClientSession,
    *,
    state: JudgeState | None = None,
    alarm: Callable[[JudgeAlarm], None] | None = None,
) -> AsyncIterator[OpenJudge | None]:
    """Check and open the judge of a run, for the aspects named by reward parts; ``None`` without a judge.

    Without a ``state`` no votes or spending are stored. Raises :class:`~etude.errors.ConfigError`.
    """
    if config.judge.kind == "none":
        yield None
        return
    check_judge(config)
    aspects, budget = config.reward.names("judge"), rollout_budget(config.judge)
    rubrics = {aspect: rubric for aspect, rubric in rubrics_of(config.judge).items() if aspect in aspects}
    async with open_unchecked_judge(config, http, state=state, alarm=alarm) as judge:
        shift_checks = {
            aspect: CalibrationShiftCheck(
                rubrics[aspect], calibration.items, calibration.agreement.hit_rate, RECHECK_EVERY
            )
            for aspect, calibration in calibrations_of(config.judge).items()
            if aspect in rubrics
        }
        yield OpenJudge(
            judge=judge,
            parts=JudgedParts(judge, rubrics, budget, shift_checks),
            hints=HintJudge(judge, budget, most=config.hints.max_per_rollout),
        )


async def calibrate(config: RunConfig, items: Mapping[str, Sequence[LabelledItem]]) -> Mapping[str, Calibration]:
    """Judge labelled items, aspect by aspect, and compare with the labels. Raises
    :class:`~etude.errors.JudgeUnavailable`.
    """
    rubrics, params = rubrics_of(config.judge), judge_params(config)
    calibrations: dict[str, Calibration] = {}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        endpoint = await stack.enter_async_context(endpoint_of(config, http))
        deps = _deps(config, endpoint, state=None, alarm=None)
        stack.enter_context(deps.cache)
        judge = Judge(deps, params, _limits(config.judge))
        for aspect, of_aspect in items.items():
            judgements = await _judged(judge, rubrics[aspect], of_aspect, config.judge.required_options.concurrency)
            calibrations[aspect] = Calibration(
                aspect=aspect,
                pin=judge_fingerprint(rubrics[aspect], params),
                model=params.model,
                identity=endpoint.identity,
                date=date_utc(),
                agreement=agreement_of(of_aspect, judgements),
                bias=bias_of(of_aspect, judgements, params.model),
                items=tuple(of_aspect),
            )
    return calibrations


async def _judged(judge: Judge, rubric: Rubric, items: Sequence[LabelledItem], at_once: int) -> Sequence[Judgement]:
    """Judge ``at_once`` items at a time, so that none times out in the queue."""
    judgements: list[Judgement] = []
    for start in range(0, len(items), at_once):
        inputs = [JudgeInput(task=item.task, work=item.work) for item in items[start : start + at_once]]
        judging = [judge.judge(rubric, judged, judge.budget, fresh=True) for judged in inputs]
        judgements += await gather_or_cancel(judging)
    return judgements


@contextlib.asynccontextmanager
async def endpoint_of(config: RunConfig, http: aiohttp.ClientSession) -> AsyncIterator[Endpoint]:
    """The endpoint of the recipe's judge; rules are served on a free local port while the context is open."""
    judge, model = config.judge.required_options, judge_params(config).model
    key = os.environ.get(KEY_VARIABLE, "")
    if isinstance(judge, ModelJudgeOptions):
        bound = _limit_name(judge.url)
        yield Endpoint(
            http, Address(url=judge.url, model=model, key=key, structured=judge.structured, limit_name=bound)
        )
        return
    rules = rules_of(config)
    async with listening(rules_app(rules.by_aspect, rules.version), 0) as port:
        yield Endpoint(http, Address(url=f"http://{HOST}:{port}/v1", model=model))


@contextlib.asynccontextmanager
async def open_unchecked_judge(
    config: RunConfig,
    http: aiohttp.ClientSession,
    *,
    state: JudgeState | None = None,
    alarm: Callable[[JudgeAlarm], None] | None = None,
) -> AsyncIterator[Judge]:
    """Open the recipe's judge without checking whether it is trusted."""
    async with endpoint_of(config, http) as endpoint:
        deps = _deps(config, endpoint, state=state, alarm=alarm)
        with deps.cache:
            yield Judge(deps, judge_params(config), _limits(config.judge))


def _deps(
    config: RunConfig, endpoint: ChatEndpoint, *, state: JudgeState | None, alarm: Callable[[JudgeAlarm], None] | None
) -> JudgeDeps:
    judge = config.judge
    spending = SpendFile(None) if state is None else state.spending
    budget = JudgeBudget(_run_budget(judge), _prices(judge), spent=spending.load())
    budget.elsewhere = spending.others()

    def sound(raised: Alarm) -> None:
        logger.warning("judge: %s %s: %s", raised.kind, raised.aspect, raised.detail)
        if alarm is not None:
            alarm(JudgeAlarm(kind=raised.kind, aspect=raised.aspect, detail=raised.detail))

    return JudgeDeps(
        endpoint=endpoint,
        cache=VoteCache(None if state is None else state.votes, CACHE_ENTRIES),
        budget=budget,
        circuit=Breaker(config.rollouts.outage_s),
        clock=SystemClock(),
        identity=IdentityWatch(calibration.identity for calibration in calibrations_of(judge).values()),
        alarm=sound,
        pause=state.pause if state is not None and judge.required_options.on_alarm == "hold" else None,
        record=spending.save,
    )


def _limit_name(url: str) -> str:
    """Parameter name of the token limit of a reply, which differs between OpenAI's newer models and all
    other servers.
    """
    return "max_completion_tokens" if urlsplit(url).hostname == OPENAI else "max_tokens"


def _limits(config: JudgeConfig) -> JudgeLimits:
    return JudgeLimits(timeout_s=config.required_options.timeout_s, concurrency=config.required_options.concurrency)


def rollout_budget(config: JudgeConfig) -> BudgetLimit:
    """Judge budget of one rollout's reward; its hints have a second budget of the same size."""
    return BudgetLimit(
        per="rollout",
        calls=config.required_options.calls_per_rollout,
        tokens=config.required_options.tokens_per_rollout,
    )


def _run_budget(config: JudgeConfig) -> BudgetLimit:
    options = config.required_options
    cost = options.cost_per_run or float("inf")
    return BudgetLimit(calls=options.calls_per_run, tokens=options.tokens_per_run, cost=cost)


def judge_cost(folder: Path, config: JudgeConfig) -> float:
    """Cost of all judging in a run so far; 0 for rules."""
    return _prices(config).cost(SpendFile(folder, worker_id=-1).others()) if config.kind == "model" else 0.0


def _prices(config: JudgeConfig) -> Prices:
    return Prices(prompt=config.required_options.prices[0], completion=config.required_options.prices[1])
