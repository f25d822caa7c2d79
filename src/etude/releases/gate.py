"""The offline gate: checks from measurements of a candidate and of the released version. Pure.

    held-out tasks, suites ──▶ paired intervals, missing tries ─┐
    signs of cheating, tokens, seconds, parity ─────────────────┴▶ checks, each with its bound ──▶ passed, if all did

Each difference is over the same tasks, with a 95 % interval. A candidate passes by non-inferiority, not by a lack of
evidence against it: the lower end must be above minus the margin. So too few tasks may block a good candidate, but
never pass a bad one. A missing try (a machine failed, a judge was unavailable) is excluded from means and never counts
as zero; more than a few missing tries block, since the unmeasured ones may be the bad ones. Before the first release
there are only the absolute checks. :mod:`etude.run.release_gate` computes the intervals.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from etude.config.release import ReleaseConfig
from etude.types import Json

MAX_MISSING = 0.05
"""Maximum share of missing tries in an evaluation: with rewards up to 1, they hide no more than a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A candidate against the released version, task by task."""

    reward: Interval
    """Mean reward, candidate minus released."""
    cost_excess: Interval
    """Sampled tokens of the candidate minus ``max_cost_ratio`` times those of the released version."""
    latency_excess: Interval
    """The same for seconds, with ``max_latency_ratio``."""
    suites: Mapping[str, Interval] = field(default_factory=dict)
    """Suite → mean reward, candidate minus released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingTries:
    """Tries of an evaluation that infrastructure prevented."""

    evaluation: str
    """``held-out tasks``, or the suite."""
    version: int
    missing: int
    planned: int
    """Number of planned tries."""
    reason: str
    """Reason of the last failure."""

    @property
    def share(self) -> float:
        """Share of the tries that are missing."""
        return self.missing / self.planned

    @property
    def are_few(self) -> bool:
        """True if the evaluation counts although they are missing."""
        return self.share <= MAX_MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFacts:
    """All measurements of a candidate."""

    reward: Interval
    """Its mean reward on the held-out tasks."""
    tries: int
    """Its tries of all evaluations."""
    cheats: int
    """Tries that look like cheating."""
    parity: bool | None = None
    """True if engine and trainer compute the same numbers from its weights; ``None`` if they cannot be compared."""
    against: Against | None = None
    """``None`` before the first release."""
    missing: tuple[MissingTries, ...] = ()
    """Evaluations of the candidate and of the released version with missing tries."""

    @property
    def is_measured(self) -> bool:
        """False if so many tries are missing that a failed check says nothing of the weights."""
        return all(tries.are_few for tries in self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the gate."""

    name: str
    value: float
    """The decisive number; for an interval, its worse end."""
    bound: float
    passed: bool
    says: str
    """The numbers as text."""


def checks(facts: GateFacts, config: ReleaseConfig) -> tuple[Check, ...]:
    """All checks of a candidate."""
    return tuple(_checks(facts, config))


def evidence_of(facts: GateFacts, results: tuple[Check, ...]) -> dict[str, Json]:
    """Measurements and checks as JSON."""
    return {"measured": asdict(facts), "checks": [asdict(check) for check in results]}


def _checks(facts: GateFacts, config: ReleaseConfig) -> Iterator[Check]:
    reward, bar = facts.reward.value, config.minimum_bar
    yield Check(
        name="minimum bar", value=reward, bound=bar, passed=reward >= bar, says=f"{reward:.3f}, at least {bar:g}"
    )
    share = facts.cheats / max(1, facts.tries)
    yield Check(
        name="cheating",
        value=share,
        bound=config.max_cheating,
        passed=share <= config.max_cheating,
        says=f"{facts.cheats} of {facts.tries} tries, at most {config.max_cheating:.1%}",
    )
    for tries in facts.missing:
        yield _few_missing(tries)
    if facts.parity is not None:
        says = "engine and trainer agree" if facts.parity else "engine and trainer compute different numbers"
        yield Check(name="numerics", value=float(facts.parity), bound=1.0, passed=facts.parity, says=says)
    if facts.against is None:
        return
    yield _not_inferior("held-out tasks", facts.against.reward, config.margin)
    for suite in config.suites:
        yield _not_inferior(f"suite {suite.name}", facts.against.suites[suite.name], suite.margin)
    yield _within("cost", facts.against.cost_excess, config.max_cost_ratio)
    yield _within("latency", facts.against.latency_excess, config.max_latency_ratio)


def _few_missing(tries: MissingTries) -> Check:
    says = (
        f"{tries.missing} of {tries.planned} tries of version {tries.version} are missing, at most {MAX_MISSING:.0%}; "
        f"the last failed because of {tries.reason}"
    )
    name = f"tries of {tries.evaluation}"
    return Check(name=name, value=tries.share, bound=MAX_MISSING, passed=tries.are_few, says=says)


def _not_inferior(name: str, difference: Interval, margin: float) -> Check:
    says = f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}], must be above {-margin:g}"
    return Check(name=name, value=difference.low, bound=-margin, passed=difference.low > -margin, says=says)


def _within(name: str, excess: Interval, ratio: float) -> Check:
    says = f"{excess.high:+.3g} beyond {ratio:g} times the released version's, at most 0"
    return Check(name=name, value=excess.high, bound=0.0, passed=excess.high <= 0, says=says)
