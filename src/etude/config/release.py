"""``[release]``: how a weight version becomes what users meet, and how it is taken back."""

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config.section import Section


class MetricConfig(Section):
    """``[release.metric]``: what users' sessions are compared by, per user."""

    name: str = Field(default="reward", min_length=1)
    """``reward`` (the recipe's formula over signals), or a kind of signal: ``kept``, ``follow_up``, ``latency`` …"""
    direction: Literal["up", "down"] = "up"
    """The better direction."""
    margin: float = Field(default=0.0, ge=0)
    """Amount by which the mean over users may be worse, in the metric's unit. Of the metric: a release is promoted when
    it is proven to be no worse than that; 0 asks for proof that it is better. Of a guardrail: it is rolled back when it
    is proven to be worse than that.
    """


class SuiteConfig(Section):
    """``[[release.suites]]``: another evaluation of the gate: the product's own tasks, or what a judge says of them."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    """Name of the suite, in evidence and in names of files."""
    recipe: str = Field(min_length=1)
    """A recipe whose ``[tasks]`` are tried, on their held-out side, with this run's harness; or the folder of a suite
    (``docs/suites.md``), in the sandboxes that it names, scored by its own ``[reward]`` and ``[judge]`` where it has
    them.
    """
    count: int = Field(default=64, ge=2)
    """Tasks of it."""
    margin: float = Field(default=0.05, ge=0)
    """Amount by which the mean reward may be below the released version's (non-inferiority)."""


class ReleaseConfig(Section):
    """``[release]``: the gate, the canary, the test that decides, and who has to agree."""

    every_steps: int = Field(default=0, ge=0)
    """Steps from one candidate to the next, the first of which is version ``live.after_steps``; a version in between is
    never released. 0: nothing is ever released, and whoever asks the gateway gets the newest weights.
    """
    engines: int = Field(default=2, ge=2, le=64)
    """Engines for users, which hold released and tried versions only. Two at least: a canary needs one of its own."""
    minimum_bar: float = Field(default=0.0, ge=0)
    """Mean reward on the held-out tasks that a candidate must reach: none below it ever meets a user, also where there
    is no release yet to compare it with.
    """
    tasks: int = Field(default=64, ge=2)
    """Held-out tasks of the gate, each tried ``passes`` times; the released version is tried on the same ones."""
    passes: int = Field(default=1, ge=1)
    """Sampled tries of each task."""
    margin: float = Field(default=0.05, ge=0)
    """Amount by which the mean reward may be below the released version's: the lower end of the paired interval of 95 %
    must be above it (non-inferiority).
    """
    suites: tuple[SuiteConfig, ...] = ()
    """More evaluations: of the product's own tasks."""
    max_cheating: float = Field(default=0.02, ge=0, le=1)
    """Share of tries that look like cheating beyond which a candidate is rejected."""
    max_cost_ratio: float = Field(default=2.0, gt=1)
    """Sampled tokens of a task, of the released version's, that a candidate is shown to need at most."""
    max_latency_ratio: float = Field(default=4.0, gt=1)
    """Seconds of a task likewise, and seconds of the shadow's calls of those that users waited. Those of tasks are by
    the clock, and the released version may have been tried at another time: on a machine that does other work leave
    room.
    """
    gate_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that one evaluation may take; then it is made again, twice at most, and after that the candidate is
    rejected.
    """
    approvals: int = Field(default=0, ge=0, le=2)
    """People who must agree behind the gate, before any user meets a candidate (``etude release approve``)."""
    shadow_sessions: int = Field(default=0, ge=0)
    """Calls of users that are sampled a second time, unseen, before the canary; 0 leaves the shadow out."""
    shadow_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the calls that are sampled so, while no more than a few are under way and the engine is idle enough."""
    max_shadow_failures: float = Field(default=0.02, ge=0, le=1)
    """Share of these that may fail."""
    canary_shares: tuple[float, ...] = (0.05, 0.25, 0.5)
    """Shares of the users that meet a candidate, one after another; the last one decides."""
    min_sessions: int = Field(default=50, ge=1)
    """Sessions of the canary before its share grows, or anything is concluded."""
    min_users: int = Field(default=20, ge=4)
    """Users of each arm before anything is concluded: variances of fewer are no estimates."""
    max_sessions: int = Field(default=5000, ge=1)
    """Sessions of the last stage after which a candidate that is proven neither way is taken back."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of a false decision of a kind, over all looks, guardrails and stages together: that a version is promoted
    which is not what ``metric.margin`` asks for, or one is rolled back that is no worse.
    """
    metric: MetricConfig = MetricConfig()
    """The metric that decides."""
    guardrails: tuple[MetricConfig, ...] = ()
    """``[[release.guardrails]]``: metrics that must not get worse."""
    revert: bool = True
    """True if the trainer goes back to the released weights when a candidate was rejected or rolled back."""

    @property
    def enabled(self) -> bool:
        """True if the run releases versions at all."""
        return self.every_steps > 0

    @model_validator(mode="after")
    def _meant(self) -> Self:
        if not self.enabled:
            self.refuse_idle("release", type(self).model_fields, "with release.every_steps = 0")
        if not self.shadow_sessions:
            self.refuse_idle("release", ["shadow_share", "max_shadow_failures"], "with release.shadow_sessions = 0")
        suites = [suite.name for suite in self.suites]
        if len(set(suites)) < len(suites):
            raise ValueError(f"release.suites: two suites have one name: {sorted(suites)}")
        return self

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        shares = self.canary_shares
        if not shares or list(shares) != sorted(set(shares)) or not all(0 < share < 1 for share in shares):
            raise ValueError(
                f"release.canary_shares = {list(shares)}: expected ascending shares between 0 and 1, one at least, "
                f"such as [0.05, 0.25, 0.5]"
            )
        if self.max_sessions < self.min_sessions:
            raise ValueError(
                f"release.max_sessions = {self.max_sessions} is below release.min_sessions = {self.min_sessions}: no "
                f"candidate could ever be promoted; raise it"
            )
        names = [self.metric.name, *(guardrail.name for guardrail in self.guardrails)]
        if len(set(names)) < len(names):
            raise ValueError(f"release.guardrails: a metric is named twice, or is release.metric itself: {names}")
        return self
