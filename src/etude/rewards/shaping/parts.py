"""The reward as a sum of named parts, each with its weight, its range and a rule for when it is missing. Pure.

    source → value ──combine──▶ Combined: Σ contribution, the value of every part, what was clipped, assumed, missing
    recipe, rubrics ──make_up──▶ what a reward is made of ──digest_of──▶ the fact that a run may not change

A value outside of its range is clipped and counted instead of being an error: most values are in some way the model's
doing, and what a model does must neither buy more than the recipe promises nor stop the run. The record keeps the value
as it was, and how many were clipped.

Owns the sum and its identity. Does not own where values come from (:mod:`etude.run.appraisal` gathers them).
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from etude.config.reward import PartConfig, RewardConfig
from etude.errors import ConfigError, InfrastructureError
from etude.rewards.shaping.behaviour import TERMS
from etude.types import Disposition, Group, Rollout

GRADER = "grader"
"""In the record of a reward that has parts: what the task's grader said."""
MakeUp: TypeAlias = Mapping[str, Mapping[str, object]]
"""Part → what decides its contribution: source, version, weight, range, …, and the digest of its rubric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What the parts of one rollout add up to."""

    value: float
    parts: Mapping[str, float]
    """Part → its value as it was found, or assumed; one that is missing and masks is absent."""
    clipped: int
    """Parts whose value was outside of its range."""
    assumed: int
    """Parts for which the recipe's number stands."""
    masked: str
    """Why the rollout must not be trained on; empty: it may be."""


def combine(config: RewardConfig, found: Mapping[str, float]) -> Combined:
    """Add up the parts; ``found`` holds values by source, and what is no finite number there is missing.

    Raises :class:`~etude.errors.ConfigError` for a missing value that is an error, and
    :class:`~etude.errors.InfrastructureError` for one that is waited for. One of a judge masks instead: it was asked
    and has no verdict, and to play again until it has one would prefer work that is easily judged.
    """
    given = {part.name: found.get(part.source, math.nan) for part in config.parts}
    missing = {part.name: _stand_in(part) for part in config.parts if not math.isfinite(given[part.name])}
    masking = sorted(name for name, value in missing.items() if value is None)
    assumed = {name: value for name, value in missing.items() if value is not None}
    values = {name: value for name, value in given.items() if name not in missing} | assumed
    counting = [part for part in config.parts if part.name in values]
    return Combined(
        value=math.fsum(part.contribution(values[part.name]) for part in counting),
        parts=values,
        clipped=sum(_is_outside(part, values[part.name]) for part in counting),
        assumed=len(assumed),
        masked=f"reward part {masking[0]!r} is missing" if masking else "",
    )


def describe(config: RewardConfig) -> list[str]:
    """What the reward is and can be, for people; nothing where it is the grader's word. Raises like
    :func:`check_behaviours`.
    """
    check_behaviours(config)
    if not config.parts:
        return []
    low, high = config.bounds
    lines = [f"reward: from {low:g} to {high:g}"]
    for part in config.parts:
        least, most = part.bounds
        lines.append(f"  {part.name}: {least:g} to {most:g}, {part.weight:g} × {part.source}, version {part.version}")
    return lines


def check_behaviours(config: RewardConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a part that does not fit the behaviour term that it names."""
    for part in config.parts:
        kind, _, name = part.source.partition(".")
        if kind != "behaviour":
            continue
        where, term = f"reward.parts: {part.name!r}", TERMS.get(name)
        if term is None:
            raise ConfigError(f"{where}: there is no {part.source!r}: expected one of {', '.join(sorted(TERMS))}")
        if part.version != term.version:
            raise ConfigError(
                f"{where} was written for version {part.version} of {part.source!r}, which is {term.version} here: "
                f"read what it counts now, then set version = {term.version}"
            )
        low, high = part.range
        if low < term.low or high > term.high:
            raise ConfigError(
                f"{where}: range = [{low:g}, {high:g}] promises what never happens: {part.source!r} is from "
                f"{term.low:g} to {term.high:g}"
            )
        if term.optional and part.missing == "error":
            raise ConfigError(
                f"{where}: {part.source!r} is missing where a harness has no word on it, which is no error: "
                f"set missing = 'wait', 'mask' or a number"
            )


def make_up(config: RewardConfig, rubrics: Mapping[str, str]) -> MakeUp:
    """What decides the reward; ``rubrics`` has the digest of every rubric that a part names."""
    made: dict[str, Mapping[str, object]] = {}
    for part in config.parts:
        kind, _, name = part.source.partition(".")
        rubric = {"rubric": rubrics[name]} if kind == "judge" else {}
        made[part.name] = part.model_dump(mode="json", exclude={"name"}) | rubric
    return made


def digest_of(made: MakeUp) -> str:
    """SHA-256 in hex; the order of the parts does not count."""
    return hashlib.sha256(to_json(made)).hexdigest()


def to_json(made: MakeUp) -> bytes:
    """The one way to write it down."""
    return orjson.dumps(made, option=orjson.OPT_SORT_KEYS)


def differences(before: MakeUp, now: MakeUp) -> list[str]:
    """What has changed from one reward to another, in words."""
    said = [f"{name!r} is gone" for name in sorted(before.keys() - now.keys())]
    said += [f"{name!r} is new" for name in sorted(now.keys() - before.keys())]
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        said += [
            f"{name!r} has {key} = {new.get(key)!r} instead of {old.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    return said


def grade_of(rollout: Rollout) -> float:
    """The grader's word; 0 where a verdict did not let it stand. A reward without parts is that word."""
    if rollout.verdict is not None:
        return rollout.verdict.graded if rollout.verdict.disposition is Disposition.KEEP else 0.0
    return rollout.reward_parts.get(GRADER, rollout.reward or 0.0)


def mean_parts(groups: Iterable[Group]) -> dict[str, float]:
    """Name in the records of rewards → mean over the rollouts that have it; quarantined ones are not counted."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.reward_parts.items() if not rollout.is_quarantined else ():
                values[name].append(value)
    return {name: math.fsum(some) / len(some) for name, some in sorted(values.items())}


def _stand_in(part: PartConfig) -> float | None:
    """What stands for a missing value; ``None``: the rollout is masked."""
    match part.missing:
        case "error":
            raise ConfigError(
                f"reward.parts: {part.name!r} has no value: {part.source!r} says nothing of this rollout; correct the "
                f"source, or set missing = 'wait', 'mask' or a number"
            )
        case "wait" if not part.source.startswith("judge."):
            raise InfrastructureError(f"reward part {part.name!r} is missing: {part.source!r} said nothing")
        case "wait" | "mask":
            return None
        case number:
            return number


def _is_outside(part: PartConfig, value: float) -> bool:
    low, high = part.range
    return not low <= value <= high
