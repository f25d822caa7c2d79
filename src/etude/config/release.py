"""``[release]``: how a weight version gets to users, and how it is rolled back."""

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config.section import Section


class MetricConfig(Section):
    """``[release.metric]``: a metric by which users' sessions are compared, averaged per user."""

    name: str = Field(default="reward", min_length=1)
    """``reward`` (the recipe's formula over signals), or a kind of signal: ``kept``, ``follow_up``, ``latency`` …"""
    direction: Literal["up", "down"] = "up"
    """``up`` if a larger value is better, ``down`` if a smaller one is."""
    margin: float = Field(default=0.0, ge=0)
    """Amount by which the mean over users may be worse, in the metric's unit. In ``[release.metric]``: a release is
    promoted once it is proven to be worse by less than this; with 0, once it is proven to be better. In a guardrail: it
    is rolled back once it is proven to be worse by more than this.
    """


class SuiteConfig(Section):
    """``[[release.suites]]``: a further evaluation of the gate: tasks of the product, or a judge's scores of them."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    """Name of the suite, in evidence and file names."""
    recipe: str = Field(min_length=1)
    """A recipe, whose held-out ``[tasks]`` are tried with this run's harness; or the folder of a suite
    (``docs/suites.md``), which is tried in the sandboxes that it names, and scored by its own ``[reward]`` and
    ``[judge]`` if it has them.
    """
    count: int = Field(default=64, ge=2)
    """Number of its tasks."""
    margin: float = Field(default=0.05, ge=0)
    """Non-inferiority margin: amount by which the mean reward may be below the released version's."""


class ReleaseConfig(Section):
    """``[release]``: the gate, the canary, the deciding test, and approvals."""

    every_steps: int = Field(default=0, ge=0)
    """Steps from one candidate to the next, starting with version ``live.after_steps``; versions in between are never
    released. 0: nothing is released, and every caller of the gateway gets the newest weights.
    """
    engines: int = Field(default=2, ge=2, le=64)
    """Engines for users; they hold only released versions and candidates. At least two, since a canary needs an engine
    of its own.
    """
    minimum_bar: float = Field(default=0.0, ge=0)
    """Mean reward on the held-out tasks that a candidate must reach, also if there is no release yet to compare it
    with.
    """
    tasks: int = Field(default=64, ge=2)
    """Held-out tasks of the gate, each tried ``passes`` times; the released version is tried on the same ones."""
    passes: int = Field(default=1, ge=1)
    """Sampled tries of each task."""
    margin: float = Field(default=0.05, ge=0)
    """Non-inferiority margin: amount by which the mean reward may be below the released version's. The lower end of the
    paired 95 % interval must be above −``margin``.
    """
    suites: tuple[SuiteConfig, ...] = ()
    """Further evaluations, such as of the product's own tasks."""
    max_cheating: float = Field(default=0.02, ge=0, le=1)
    """Largest share of tries with signs of cheating; above it a candidate is rejected."""
    max_cost_ratio: float = Field(default=2.0, gt=1)
    """Most sampled tokens per task, relative to the released version: a candidate must be proven to need no more."""
    max_latency_ratio: float = Field(default=4.0, gt=1)
    """Most seconds per task, relative to the released version; also most seconds per call of the shadow, relative to
    the same calls of users. Task times are wall-clock, and the released version may have been measured at another time:
    choose a larger ratio on a machine that does other work.
    """
    gate_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that one evaluation may take. One that takes longer is repeated at most twice; then the candidate is
    rejected.
    """
    approvals: int = Field(default=0, ge=0, le=2)
    """People who must approve a candidate after the gate, before any user gets it (``etude release approve``)."""
    shadow_sessions: int = Field(default=0, ge=0)
    """Shadow test before the canary: number of users' calls that the candidate answers as well, without showing its
    answers to users; 0: no shadow test.
    """
    shadow_share: float = Field(default=0.1, gt=0, le=1)
    """Share of users' calls that are shadowed, while only a few of them are in flight and the engine is idle enough."""
    max_shadow_failures: float = Field(default=0.02, ge=0, le=1)
    """Largest share of the shadow's calls that may fail."""
    canary_shares: tuple[float, ...] = (0.05, 0.25, 0.5)
    """Shares of the users that get a candidate, stage by stage; the last stage decides."""
    min_sessions: int = Field(default=50, ge=1)
    """Sessions that the canary needs before its share grows or anything is concluded."""
    min_users: int = Field(default=20, ge=4)
    """Users that each arm of the comparison needs before anything is concluded: with fewer, variances are unreliable.
    """
    max_sessions: int = Field(default=5000, ge=1)
    """Sessions of the last stage after which an undecided candidate is rolled back."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability of each kind of wrong decision, over all interim looks, guardrails and stages together: to promote a
    version that does not meet ``metric.margin``, or to roll back a version that is no worse.
    """
    metric: MetricConfig = MetricConfig()
    """The metric that decides."""
    guardrails: tuple[MetricConfig, ...] = ()
    """``[[release.guardrails]]``: metrics that must not get worse."""
    revert: bool = True
    """True if the trainer loads the released weights again after a candidate was rejected or rolled back. It keeps its
    own if the candidate could not be measured, since nothing is proven against that one.
    """

    @property
    def enabled(self) -> bool:
        """True if the run releases versions at all."""
        return self.every_steps > 0

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.enabled:
            self.refuse_idle("release", type(self).model_fields, "with release.every_steps = 0")
        if not self.shadow_sessions:
            self.refuse_idle("release", ["shadow_share", "max_shadow_failures"], "with release.shadow_sessions = 0")
        suites = [suite.name for suite in self.suites]
        if len(set(suites)) < len(suites):
            raise ValueError(f"release.suites: two suites have one name: {sorted(suites)}")
        return self

    @model_validator(mode="after")
    def _check_canary(self) -> Self:
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
