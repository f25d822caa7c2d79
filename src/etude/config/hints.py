"""``[hints]``: which turns the model is told about, and how much it learns from that."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.config.section import Section


class HintRule(Section):
    """``[[hints.rules]]``: a kind of mistake, and what to say to a model that is about to make it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_ -]*$")
    """Name of the rule, in every record of it."""
    where: Literal["said", "answered"]
    """Text that shows the mistake: the turn's own, or what came back."""
    pattern: str = Field(min_length=1)
    """A regular expression that is looked for in there; ``^`` and ``$`` are the ends of a line, ``\\A`` and ``\\Z``
    those of the text.
    """
    text: str = Field(min_length=1)
    """The hint: what would have been worth knowing before the turn, not what was wrong with it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"hints.rules: {pattern!r} is no regular expression: {error}") from error
        return pattern


class HintsConfig(Section):
    """``[hints]``: distillation of single turns from the same policy with a hint in its context.

    :mod:`etude.trainer.distillation` has the equation.
    """

    weight: float = Field(default=0.0, ge=0)
    """γ: what a nat of divergence on a hinted token counts, in units of advantage where every group has a signal; 0:
    nobody looks for hints.
    """
    estimator: Literal["full", "sampled"] = "full"
    """Over the whole vocabulary at every token, or from the sampled tokens alone."""
    contexts: Literal["shared", "all"] = "shared"
    """At which tokens of a turn the two are compared: at each as far as the hinted policy would have come there, too,
    or at all alike, though what it says behind words that it would never have said is worth little.
    """
    cap: float = Field(default=2.0, gt=0)
    """Importance weight at which a token is truncated (``sampled``)."""
    max_per_rollout: int = Field(default=1, ge=1)
    """Turns of a rollout that are hinted at, the earliest ones; each costs two forward passes and a backward one."""
    tools: bool = True
    """True if answers of the built-in tools to calls that went wrong are followed by hints."""
    judge: bool = False
    """True if the judge is asked for hints where rules leave room for some."""
    rules: tuple[HintRule, ...] = ()
    """More rules, which are looked at before the built-in ones."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
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
