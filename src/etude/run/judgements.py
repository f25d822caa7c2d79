"""``etude judge``: looks at a recipe's judge from the command line, without a run.

Owns what is asked and how it is shown. How a judge is put together is :mod:`etude.run.judging`'s.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import orjson

from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.rewards.judging.calibration import Calibration, Item, distrust, dump_calibration, parse_items
from etude.rewards.judging.prompts import Exhibit
from etude.rewards.judging.statistics import Estimate
from etude.rewards.judging.votes import Judgement
from etude.run.judging import calibrate, calibrations_of, opened, pins_of, rubrics_of

SAMPLE = Exhibit(task="Say hello.", work="hello")
"""What is judged to see whether a judge answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found out about a judge."""

    passed: bool
    lines: Sequence[str]


def check(config: RunConfig) -> Check:
    """Have one small text judged on every aspect, and say whether a run would trust the judge.

    Raises :class:`~etude.errors.JudgeUnavailable` when it does not answer.
    """
    judgements = asyncio.run(_judge(config, dict.fromkeys(config.judge.rubrics, SAMPLE)))
    calibrations, pins = calibrations_of(config.judge), pins_of(config)
    lines, passed = [], True
    for aspect, judgement in judgements.items():
        known = calibrations.get(aspect)
        reason = distrust(known, pins[aspect], config.judge.min_agreement)
        readable = f"{len(judgement.votes)} of {config.judge.votes} votes readable"
        trust = f"not trusted: {reason}" if reason else "trusted"
        lines += [f"{aspect}: {readable}; {trust}; pin {pins[aspect][:12]}"]
        lines += _figures(known) if known is not None else []
        passed = passed and bool(judgement.votes) and (not reason or config.judge.allow_uncalibrated)
    return Check(passed=passed, lines=lines)


def calibrate_beside(config: RunConfig, folder: Path, aspects: Sequence[str]) -> list[str]:
    """Judge the items of ``ASPECT.jsonl`` in a folder and write ``ASPECT.calibration.json`` there; what it says.

    Raises :class:`~etude.errors.ConfigError` for items that are missing or wrong.
    """
    rubrics = rubrics_of(config.judge)
    items: dict[str, Sequence[Item]] = {}
    for aspect in aspects:
        file = folder / f"{aspect}.jsonl"
        try:
            items[aspect] = parse_items(file.read_text(encoding="utf-8"), rubrics[aspect], str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the labelled texts of {aspect!r} cannot be read: {error}") from error
    lines: list[str] = []
    for aspect, found in asyncio.run(calibrate(config, items)).items():
        report = folder / f"{aspect}.calibration.json"
        report.write_text(dump_calibration(found), encoding="utf-8")
        lines += [f"{aspect}: {report}", *_figures(found)]
    return lines


def score(config: RunConfig, aspect: str, *, task: str, work: str) -> str:
    """Judge one text on one aspect; the judgement as indented JSON."""
    if aspect not in config.judge.rubrics:
        raise ConfigError(f"--aspect {aspect}: the recipe has rubrics of {', '.join(sorted(config.judge.rubrics))}")
    judgement = asyncio.run(_judge(config, {aspect: Exhibit(task=task, work=work)}))[aspect]
    return orjson.dumps(asdict(judgement), option=orjson.OPT_INDENT_2).decode() + "\n"


async def _judge(config: RunConfig, exhibits: dict[str, Exhibit]) -> dict[str, Judgement]:
    rubrics = rubrics_of(config.judge)
    async with aiohttp.ClientSession() as http, opened(config, http) as judge:
        return {
            aspect: await judge.judge(rubrics[aspect], exhibit, judge.purse) for aspect, exhibit in exhibits.items()
        }


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


def _interval(number: Estimate) -> str:
    return f"{number.value:.2f} [{number.low:.2f}, {number.high:.2f}]"
