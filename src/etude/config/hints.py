"""``[hints]``: hints for single turns, and the weight of learning from them."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.config.section import Section


class HintRule(Section):
    """``[[hints.rules]]``: a kind of mistake, and the hint for a model that is about to make it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_ -]*$")
    """Name of the rule, in every record of it."""
    where: Literal["said", "answered"]
    """Text that shows the mistake: the turn's own, or what came back."""
    pattern: str = Field(min_length=1)
    r"""A regular expression to search there; ``^`` and ``$`` are the ends of a line, ``\A`` and ``\Z`` those of the
    text.
    """
    text: str = Field(min_length=1)
    """The hint: what the model should have known before the turn, not what was wrong with it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"hints.rules: {pattern!r} is not a regular expression: {error}") from error
        return pattern


class HintsConfig(Section):
    """``[hints]``: distillation of single turns from the same policy with a hint in its context.

    :mod:`etude.trainer.distillation` has the equation.
    """

    weight: float = Field(default=0.0, ge=0)
    """γ: weight of a nat of divergence on a hinted token, in units of advantage where every group has a signal; 0:
    hints are off.
    """
    estimator: Literal["full", "sampled"] = "full"
    """``full``: the divergence over the whole vocabulary at every token; ``sampled``: from the sampled tokens only."""
    contexts: Literal["shared", "all"] = "shared"
    """Tokens of a turn at which the two are compared: each as far as the hinted policy would have got there, too; or
    all alike, although what it says after words that it would never have said is worth little.
    """
    cap: float = Field(default=2.0, gt=0)
    """Importance weight at which a token is truncated (``sampled``)."""
    max_per_rollout: int = Field(default=1, ge=1)
    """Most hinted turns of a rollout, the earliest ones; each costs two forward passes and a backward one."""
    tools: bool = True
    """Give hints for calls of the built-in tools that went wrong."""
    judge: bool = False
    """Ask the judge for further hints if the rules leave room for some."""
    rules: tuple[HintRule, ...] = ()
    """More rules, which are looked at before the built-in ones."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.weight:
            self.refuse_idle("hints", type(self).model_fields, "with hints.weight = 0")
        if self.estimator == "full":
            self.refuse_idle("hints", ["cap"], "with hints.estimator = 'full'")
        if not (self.tools or self.judge or self.rules):
            raise ValueError("hints.weight would have no effect: there are neither rules nor a judge; name some")
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError(f"hints.rules: two rules have one name: {sorted(names)}")
        return self
