"""``[live]``: training on users' sessions and their signals, one rollout per prompt."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from etude.config.plugins import Registry
from etude.config.section import Section

LIVE_BASELINES = Registry(
    "live.baseline",
    "baseline",
    {
        name: f"etude.trainer.batching.baselines:{name}"
        for name in ("none", "template_mean", "user_day_mean", "similar", "value_model", "control_variate")
    },
)
"""Baselines without groups by name: each is a :data:`~etude.trainer.batching.baselines.LiveBaseline`."""


class LiveConfig(Section):
    """``[live]``: training on users' sessions and their signals, one rollout per prompt."""

    groups_per_step: int = Field(default=0, ge=0)
    """Live sessions per optimiser step (P_LIVE), each a group of one; 0: the run does not learn from users."""
    simulated_groups_per_step: int = Field(default=0, ge=0)
    """Groups of simulated rollouts in the same step (P_TRAIN), of ``rollouts.group_size`` rollouts each; 0: only live
    sessions.
    """
    after_steps: int = Field(default=0, ge=0)
    """Steps before users are served; they train on simulated groups only (``rollouts.groups_per_step``)."""
    baseline: Annotated[str, AfterValidator(LIVE_BASELINES)] = "control_variate"
    """Baseline that is subtracted from a session's reward (``docs/live.md``): nothing; the mean over the sessions of
    its template; over its user's sessions of the day; over similar sessions; the prediction of a value model; or the
    mean over the other sessions, corrected by that model. Or a function of your own.
    """
    history: int = Field(default=2048, ge=0)
    """Number of newest sessions of earlier steps from which a baseline may be computed."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.groups_per_step:
            idle = [name for name in type(self).model_fields if name != "groups_per_step"]
            self.refuse_idle("live", idle, "with live.groups_per_step = 0")
        return self
