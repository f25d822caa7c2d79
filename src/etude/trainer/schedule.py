"""How large the steps of a phase are, in learning rate and in tokens, decided before the first of them.

Pure: a schedule is a function of the step alone, so a phase that goes on after a crash takes the steps that it would
have taken.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

FINAL_RATE_SHARE = 0.05
"""A phase ends at this share of its peak rate: below it the last steps would teach nothing."""

RateShape: TypeAlias = Literal["wsd", "cosine", "constant"]
"""What follows the warm-up: a plateau and a linear decay, half a cosine, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """The learning rate of ``steps`` steps, as a share of its peak.

    - ``wsd``: a plateau, and over the last ``decay_share`` of the steps a linear decay (warmup-stable-decay, arXiv
      2404.06395)
    - ``cosine``: half a cosine from the end of the warm-up to the last step (arXiv 1608.03983, without restarts)
    - ``constant``: a plateau

    What decays has :data:`FINAL_RATE_SHARE` at the last step.
    """

    steps: int
    warmup_steps: int
    """Linear warm-up."""
    decay_share: float = 0.0
    """Of ``wsd`` alone."""
    shape: RateShape = "wsd"

    def share(self, step: int) -> float:
        """The share at step 1 … ``steps``."""
        warm = min(1.0, step / self.warmup_steps)
        match self.shape:
            case "wsd":
                decay_steps, left = self.decay_share * self.steps, self.steps - step
                if left >= decay_steps:
                    return warm
                return min(warm, FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * left / decay_steps)
            case "cosine":
                done = max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
                return warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * done)) / 2)
            case "constant":
                return warm


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The tokens of each step of a phase: a linear ramp in the tokens read so far, then a plateau.

    Small batches make more of the first tokens, when every gradient points the same way; large ones average out the
    noise of the last (the critical batch size grows as the loss falls: arXiv 1812.06162, section 2).
    """

    tokens: int
    """Of the whole phase."""
    first: int
    """Of the first step."""
    last: int
    """Of every step behind the ramp."""
    ramp_share: float = 0.0
    """Share of the phase's tokens that the ramp takes."""

    def budgets(self) -> tuple[int, ...]:
        """Tokens of each step, ``tokens`` in all: what would be too little for a step of its own is the last one's."""
        budgets: list[int] = []
        left = self.tokens
        while left:
            budget = self._budget(self.tokens - left)
            if budgets and left < budget:
                budgets[-1] += left
                break
            budgets.append(min(budget, left))
            left -= budgets[-1]
        return tuple(budgets)

    def _budget(self, done: int) -> int:
        """Tokens of the step that begins when ``done`` have been read."""
        ramp = self.ramp_share * self.tokens
        return self.last if done >= ramp else round(self.first + (self.last - self.first) * done / ramp)
