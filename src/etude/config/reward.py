"""``[reward]``: the reward of a rollout as a sum of named parts."""

from math import isfinite, isinf
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from etude.config.plugins import Registry, entry_point
from etude.config.section import Section

SOURCES = ("grader", "behaviour", "measure", "judge")
"""Kinds of source: the family's grader; conduct, read from what was said and done; the harness; a judge's rubric."""
EXCUSED = {
    "judge": "a judge may be out of reach, no error, and no number stands for it: set missing = 'wait' or 'mask'",
    "measure": "not every task has every measure, which is no error: set missing = 'wait', 'mask' or a number",
}
"""Kind of source → why its values may be missing in a run that is in order, and what to do about it."""
OF_HARNESS = ("malformed_calls", "open_todos")
"""Terms of behaviour that take what only the built-in harness counts."""
FUNCTIONS = Registry("reward.parts: source", "reward function", {})
"""Functions by name: each is called with a :class:`~etude.protocols.RewardInput`."""
RESERVED = ("clipped", "assumed")
"""Names of the totals in the record of the parts."""

Missing: TypeAlias = Literal["error", "wait", "mask"]
"""Reactions to a value that is not there: the run stops, the rollout is tried again, or it is not trained on. What
waits for a judge that is away waits once it is finished, and one that was asked and has no verdict masks.
"""


class PartConfig(Section):
    """``[[reward.parts]]``: one part, which adds weight · value to the reward, with the value clipped to ``range``."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)
    """Name under which every rollout records the value, before weight and range."""
    source: str
    """``grader``, the reward of the task's grader; ``grader.NAME``, one of its parts; ``behaviour.NAME``;
    ``measure.NAME`` of the harness; ``judge.NAME`` of a rubric; or a function of your own, ``module:name`` or
    ``@file.py:name`` (``docs/extending.md``).
    """
    version: int = Field(ge=1)
    """Version of the source; a running recipe cannot change it. Raise it when you change a grader or harness. For a
    behaviour it must equal the version in étude.
    """
    weight: float = Field(allow_inf_nan=False)
    """Reward per unit of the value; negative for a penalty. 0: the value is only recorded."""
    range: tuple[float, float]
    """Lowest and highest value: values outside are clipped to these."""
    free: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Amount of the value that is free: only the excess over it counts."""
    missing: Missing | float = "error"
    """Reaction to a missing value: ``error`` stops the run, ``wait`` tries the rollout again, ``mask`` does not train
    on it, and a number replaces the value.
    """

    @property
    def is_function(self) -> bool:
        """True if the source is a function by name."""
        return ":" in self.source or bool(entry_point(self.source))

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest contribution."""
        low, high = sorted(self.contribution(end) + 0.0 for end in self.range)  # without a negative zero
        return low, high

    def contribution(self, value: float) -> float:
        """Compute what the part adds to the reward where its source says ``value``."""
        low, high = self.range
        counted = min(max(value, low), high)
        return self.weight * (max(0.0, counted - self.free) if self.free else counted)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        kind, dot, name = self.source.partition(".")
        where = f"reward.parts: {self.name!r}"
        if kind == "effort":
            raise ValueError(f"{where}: effort is taken off where rewards are compared: set it in [effort]")
        if self.is_function:
            FUNCTIONS.find(self.source)
        elif kind not in SOURCES or bool(dot) != bool(name) or not (name or kind == "grader"):
            raise ValueError(f"{where} has source = {self.source!r}: expected grader or one of "
                             f"{', '.join(f'{kind}.NAME' for kind in SOURCES)}, or module:function")  # fmt: skip
        if self.name in RESERVED or self.name.startswith("cheat_"):
            raise ValueError(f"{where} has a name that means something else in the record; choose another")
        if (self.missing == "error" and kind in EXCUSED) or (isinstance(self.missing, float) and kind == "judge"):
            raise ValueError(f"{where}: {EXCUSED[kind]}")
        return self

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        (low, high), where = self.range, f"reward.parts: {self.name!r}"
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(
                f"{where} has range = [{low:g}, {high:g}]: expected two finite numbers, the lower one first"
            )
        if self.free and not 0 <= low <= self.free < high:
            raise ValueError(
                f"{where}: free = {self.free:g} needs a range that begins at 0 or above and ends above it: with "
                f"[{low:g}, {high:g}] nothing would be free, or nothing would count"
            )
        if isinstance(self.missing, float) and (isinf(self.missing) or not low <= self.missing <= high):
            raise ValueError(f"{where}: missing = {self.missing:g} is outside of range = [{low:g}, {high:g}]")
        return self


class RewardConfig(Section):
    """``[reward]``: the parts of the reward; without parts, the reward is the grader's.

    With parts, the reward is exactly their sum: the grader's reward counts only if it is one of them.
    """

    parts: tuple[PartConfig, ...] = ()
    """``[[reward.parts]]``; their order has no effect."""
    shuffled: bool = False
    """A control experiment: shuffle the rewards of each group among its rollouts before training, so that they teach
    nothing. The records keep each rollout's own reward.
    """

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward that the parts can add up to."""
        return sum(part.bounds[0] for part in self.parts), sum(part.bounds[1] for part in self.parts)

    @property
    def of_harness(self) -> tuple[str, ...]:
        """The sources that only the built-in harness has something to say of."""
        conduct = (name for name in self.names("behaviour") if name in OF_HARNESS)
        return (*(f"measure.{name}" for name in self.names("measure")), *(f"behaviour.{name}" for name in conduct))

    def names(self, kind: str) -> tuple[str, ...]:
        """The names that parts have taken from a kind of source."""
        sources = (part.source.partition(".") for part in self.parts)
        return tuple(sorted({name for source, _, name in sources if source == kind and name}))

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        names = [part.name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"reward.parts: two are called {twice[0]!r}; each needs a name of its own")
        if self.parts and not any(part.weight for part in self.parts):
            raise ValueError("reward.parts: every weight is 0, so that nothing would be worth anything; set one")
        return self
