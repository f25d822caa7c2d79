"""Questions of `etude judge` to the judge of a recipe or a suite, and the text of its answers.

A judge is put together by :mod:`etude.run.judging`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from etude.config.judge import JudgeConfig
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.rewards.judge.budget import Spend
from etude.rewards.judge.calibration import (
    Calibration,
    KappaEstimate,
    LabelledItem,
    distrust,
    dump_calibration,
    parse_items,
)
from etude.rewards.judge.hints import HintJudge
from etude.rewards.judge.prompts import JudgeInput, ReplyFault
from etude.rewards.judge.votes import Judgement
from etude.run.judging import (
    calibrate,
    calibrations_of,
    check_budget,
    judge_fingerprints,
    open_unchecked_judge,
    rollout_budget,
    rubrics_of,
)
from etude.run.suite import TryLimits, open_suite, try_config
from etude.tasks.suites import is_suite
from etude.telemetry.events import JudgeAlarm
from etude.types import Hint

SAMPLE = JudgeInput(task="Say hello.", work="hello")
"""Input of a check that a judge answers."""
SAMPLE_TURNS = ("raed hello.txt\nno such tool: raed", "read hello.txt\nhello")
"""Turns of a check that it gives hints."""
NO_CALIBRATIONS = "judge.calibrations={}"
"""Override by which a recipe is read without the reports that are about to be written."""


def recipe_with_judge(recipe: Path, overrides: Sequence[str]) -> RunConfig:
    """A recipe or a suite that has a judge. Raises :class:`~etude.errors.ConfigError`."""
    config = (
        try_config(open_suite(recipe), {}, TryLimits(), overrides)
        if is_suite(recipe)
        else load_recipe(recipe, overrides)
    )
    if config.judge.kind == "none":
        raise ConfigError(f"{recipe} has no judge: set judge.kind and judge.rubrics")
    return config


def check_aspect(config: RunConfig, aspect: str) -> None:
    """Raise :class:`~etude.errors.ConfigError` for an aspect without a rubric."""
    if aspect not in config.judge.rubrics:
        raise ConfigError(f"--aspect {aspect}: the recipe has rubrics of {', '.join(sorted(config.judge.rubrics))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCheck:
    """Result of a check of a judge."""

    passed: bool
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """Answers of a judge, and their cost."""

    judgements: Mapping[str, Judgement]
    """By aspect."""
    hints: Sequence[Hint] | ReplyFault | None
    """``None``: it was not asked for any."""
    alarms: Sequence[JudgeAlarm]
    spent: Spend
    cost: float


def check(config: RunConfig) -> JudgeCheck:
    """Have one small text judged on every aspect, and ask for hints where the recipe does; say what that cost and
    whether a run would trust the judge.

    Raises :class:`~etude.errors.JudgeUnavailable` when it does not answer, and :class:`~etude.errors.ConfigError` where
    there is nothing to ask, and for what a run would refuse of its budget.
    """
    if not (config.judge.rubrics or config.hints.judge):
        raise ConfigError("the recipe asks its judge nothing: write judge.rubrics, or set hints.judge = true")
    check_budget(config)
    answers = asyncio.run(_query_judge(config, dict.fromkeys(config.judge.rubrics, SAMPLE), hints=config.hints.judge))
    calibrations, pins = calibrations_of(config.judge), judge_fingerprints(config)
    lines, passed = [], not isinstance(answers.hints, ReplyFault)
    for aspect, judgement in answers.judgements.items():
        calibration = calibrations.get(aspect)
        reason = distrust(calibration, pins[aspect], config.judge.min_agreement)
        readable = f"{len(judgement.votes)} of {config.judge.required_options.votes} votes readable"
        trust = f"not trusted: {reason}" if reason else "trusted"
        lines += [f"{aspect}: {readable}; {trust}; pin {pins[aspect][:12]}"]
        lines += _figures(calibration) if calibration is not None else []
        passed = passed and bool(judgement.votes) and (not reason or config.judge.allow_uncalibrated)
    if answers.hints is not None:
        unreadable = isinstance(answers.hints, ReplyFault)
        lines += [f"hints: its reply could not be read: {answers.hints}" if unreadable else "hints: readable"]
    lines += [f"alarm: {alarm.detail}" for alarm in answers.alarms]
    passed = passed and not (answers.alarms and config.judge.required_options.on_alarm == "hold")
    return JudgeCheck(passed=passed, lines=[*lines, _costs(answers, config.judge)])


def calibrate_beside(config: RunConfig, folder: Path, aspects: Sequence[str]) -> list[str]:
    """Judge the items of ``ASPECT.jsonl`` in a folder and write ``ASPECT.calibration.json`` there; what it says.

    Raises :class:`~etude.errors.ConfigError` for items that are missing or wrong.
    """
    if not aspects:
        raise ConfigError("there is nothing to calibrate: write judge.rubrics")
    rubrics = rubrics_of(config.judge)
    items: dict[str, Sequence[LabelledItem]] = {}
    for aspect in aspects:
        file = folder / f"{aspect}.jsonl"
        try:
            items[aspect] = parse_items(file.read_text(encoding="utf-8"), rubrics[aspect], str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the labelled texts of {aspect!r} cannot be read: {error}") from error
    lines: list[str] = []
    for aspect, calibration in asyncio.run(calibrate(config, items)).items():
        report = folder / f"{aspect}.calibration.json"
        report.write_text(dump_calibration(calibration), encoding="utf-8")
        lines += [f"{aspect}: {report}", *_figures(calibration)]
    return lines


def judge_text(config: RunConfig, aspect: str, *, task: str, work: str) -> Judgement:
    """Have one text judged on an aspect. Raises :class:`~etude.errors.JudgeUnavailable` when it does not answer."""
    judged = JudgeInput(task=task, work=work)
    return asyncio.run(_query_judge(config, {aspect: judged})).judgements[aspect]


async def _query_judge(config: RunConfig, inputs: Mapping[str, JudgeInput], *, hints: bool = False) -> _Answers:
    rubrics = rubrics_of(config.judge)
    alarms: list[JudgeAlarm] = []
    async with aiohttp.ClientSession() as http, open_unchecked_judge(config, http, alarm=alarms.append) as judge:
        judgements = {
            aspect: await judge.judge(rubrics[aspect], judged, judge.budget) for aspect, judged in inputs.items()
        }
        hinting = HintJudge(judge, rollout_budget(config.judge))
        hinted = await hinting.ask(SAMPLE.task, SAMPLE_TURNS) if hints else None
        return _Answers(
            judgements=judgements, hints=hinted, alarms=alarms, spent=judge.budget.spent, cost=judge.budget.cost
        )


def _costs(answers: _Answers, config: JudgeConfig) -> str:
    spent, has_prices = answers.spent, any(config.required_options.prices)
    money = f"{answers.cost:g} at the recipe's prices" if has_prices else "the recipe has no prices"
    return f"{spent.calls} calls: {spent.prompt_tokens} tokens read, {spent.completion_tokens} written; {money}"


def _figures(calibration: Calibration) -> list[str]:
    agreement, bias = calibration.agreement, calibration.bias
    leanings = {
        "mean error": bias.mean_error,
        "length": bias.length,
        "verbosity": bias.verbosity,
        "order of the scale": bias.order,
        "own model": bias.self_preference,
    }
    shown = [f"{name} {_interval(value)}" for name, value in leanings.items() if value is not None]
    return [
        f"  {calibration.model}, which says it is {calibration.identity!r}, {calibration.date}",
        f"  agreement over {agreement.items} items: exact {agreement.exact:.2f}, within one "
        f"{agreement.within_one:.2f}, weighted kappa {_interval(agreement.kappa)}; "
        f"{agreement.unjudged} without a verdict, {agreement.invalid_votes} votes unreadable",
        f"  bias: {', '.join(shown)}",
    ]


def _interval(number: KappaEstimate) -> str:
    return f"{number.value:.2f} [{number.low:.2f}, {number.high:.2f}]"
