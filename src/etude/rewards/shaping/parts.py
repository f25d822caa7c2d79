"""The parts of a recipe's reward: description, validation and digest. Pure.

    recipe, rubrics ──reward_spec──▶ specification of a reward ──digest_of──▶ digest, which is fixed for a run

Does not own the sum (:mod:`etude.rewards.score`) or where values come from (:mod:`etude.run.scoring`).
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import orjson

from etude.config.plugins import portable
from etude.config.reward import RewardConfig
from etude.errors import ConfigError
from etude.rewards.shaping.behaviour import TERMS
from etude.types import Group

RewardSpec: TypeAlias = Mapping[str, Mapping[str, object]]
"""Part → everything that determines its contribution: source, version, weight, range, …, and its rubric's digest."""


def describe(config: RewardConfig) -> list[str]:
    """Description of the reward and its range, for people; empty if it is the grade alone. Raises like
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
                f"{where}: {part.source!r} is missing where a harness has no word on it, which is not an error: "
                f"set missing = 'wait', 'mask' or a number"
            )


def reward_spec(config: RewardConfig, rubrics: Mapping[str, str]) -> RewardSpec:
    """Specification of the reward; ``rubrics`` has the digest of every rubric that a part names."""
    spec: dict[str, Mapping[str, object]] = {}
    for part in config.parts:
        kind, _, name = part.source.partition(".")
        rubric = {"rubric": rubrics[name]} if kind == "judge" else {}
        source = {"source": portable(part.source)}
        spec[part.name] = part.model_dump(mode="json", exclude={"name"}) | source | rubric
    return spec


def digest_of(spec: RewardSpec) -> str:
    """SHA-256 of a reward specification, in hex; the order of the parts does not count."""
    return hashlib.sha256(to_json(spec)).hexdigest()


def to_json(spec: RewardSpec) -> bytes:
    """The canonical JSON of a reward specification."""
    return orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)


def differences(before: RewardSpec, now: RewardSpec) -> list[str]:
    """Describe the differences between two reward specifications."""
    lines = [f"{name!r} is gone" for name in sorted(before.keys() - now.keys())]
    lines += [f"{name!r} is new" for name in sorted(now.keys() - before.keys())]
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        lines += [
            f"{name!r} has {key} = {new.get(key)!r} instead of {old.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    return lines


def mean_parts(groups: Iterable[Group]) -> dict[str, float]:
    """Mean of each recorded reward part over the rollouts that have it, without quarantined ones."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.reward_parts.items() if not rollout.is_quarantined else ():
                values[name].append(value)
    return {name: math.fsum(some) / len(some) for name, some in sorted(values.items())}
