"""Judge calibration: agreement with human labels, biases, and alarms when the judge changes.

    items (JSON lines: task, work, label, author) ─┐
    the judgement of each ─────────────────────────┴─▶ agreement, bias ──▶ report, good for one fingerprint

A run trusts a judge if its report has the same fingerprint and its agreement reaches ``judge.min_agreement``. Agreement
is the *lower end* of the interval of Cohen's weighted kappa, so a set that is too small fails automatically. The report
contains the items, so that a run can judge some of them again.

    κ_w = 1 − Σ w_ij O_ij / Σ w_ij E_ij,   w_ij = (i − j)²
    O: observed shares of (label, score), E: those of two independent raters with the same marginals

(Cohen, *Weighted kappa*, Psychological Bulletin 1968; intervals by the percentile bootstrap, Efron 1979: items are
resampled with replacement.) Legend: N items, B bootstrap draws; a function of [..., N] works on any number of draws.

    every N judgements ──▶ an item of the calibration set is judged again ──▶ hit or miss ──▶ CUSUM ──▶ alarm

A provider may replace a hosted model without changing its name. So the model name that the endpoint reports is
compared, and its scores are monitored: S ← max(0, S + log-likelihood ratio of the outcome under "agreement fell by a
fifth" against "agreement as calibrated"), and an alarm where S reaches ln(mean distance of false alarms). (Page,
*Continuous inspection schemes*, Biometrika 1954; that the distance is at least e^h is Lorden's bound, Ann. Math.
Statist. 1971.)

Owns the formats of the item file and the report. Pure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from etude.errors import ConfigError
from etude.rewards.judge.prompts import Rubric
from etude.rewards.judge.votes import Judgement
from etude.types import Mask

Numbers: TypeAlias = npt.NDArray[np.float64]
"""Real numbers, [N] or [B, N]; statistics of them, [] or [B]."""
Indices: TypeAlias = npt.NDArray[np.int64]
"""[B, N] indices of items; a row may contain an item several times."""
Statistic: TypeAlias = Callable[[Indices], Numbers]
"""A function of the items of each draw that returns one number per draw, [B]."""
DRAWS = 2_000
"""B: between seeds, the ends of an interval differ by about a hundredth."""
TAIL = 2.5
"""Per cent outside of the interval on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KappaEstimate:
    """A statistic and its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(statistic: Statistic, items: int, *, seed: int = 0) -> KappaEstimate:
    """Bootstrap ``statistic`` over items with ``DRAWS`` resamples; 0 without items."""
    if not items:
        return KappaEstimate(value=0.0, low=0.0, high=0.0)
    draws_BN = np.random.default_rng(seed).integers(0, items, (DRAWS, items))
    low, high = np.percentile(statistic(draws_BN), [TAIL, 100 - TAIL])
    (value,) = statistic(np.arange(items)[None])
    return KappaEstimate(value=float(value), low=float(low), high=float(high))


def weighted_kappa(labels_N: Numbers, scores_N: Numbers) -> Numbers:
    """Quadratically weighted kappa: 1 is full agreement, 0 the agreement of two independent raters.

    0 if even independent raters could not disagree, as when all labels and scores are equal: such a set says nothing
    about a judge.
    """
    observed = ((labels_N - scores_N) ** 2).mean(-1)
    by_chance = labels_N.var(-1) + scores_N.var(-1) + (labels_N.mean(-1) - scores_N.mean(-1)) ** 2
    kappa: Numbers = 1 - np.divide(observed, by_chance, out=np.ones_like(observed), where=by_chance > 0)
    return kappa


def correlation(a_N: Numbers, b_N: Numbers) -> Numbers:
    """Pearson's r; applied to ranks, Spearman's ρ. 0 if one of the two does not vary."""
    spread = a_N.std(-1) * b_N.std(-1)
    shared = (a_N * b_N).mean(-1) - a_N.mean(-1) * b_N.mean(-1)
    coefficient: Numbers = np.divide(shared, spread, out=np.zeros_like(spread), where=spread > 0)
    return coefficient


def ranks(values_N: Numbers) -> Numbers:
    """[N] ranks from 1 in ascending order; equal values share their mean rank."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    shared: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return shared


FEWEST_ITEMS = 8
"""Fewest items: with fewer, an interval is no more than a guess."""
MOST_ITEMS = 2_000
"""Most items, because a run's folder contains all of them."""
ITEM_KEYS = ({"task", "work", "label"}, {"task", "work", "label", "author"})
"""Allowed sets of keys of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledItem:
    """A text and the score that people gave it."""

    task: str
    work: str
    label: int
    author: str = ""
    """The model that wrote it, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of a judge with labels."""

    items: int
    """Items with a verdict of the judge."""
    unjudged: int
    """Items without a verdict."""
    invalid_votes: int
    exact: float
    """Share of the judged items whose score equals the label."""
    within_one: float
    kappa: KappaEstimate

    @property
    def hit_rate(self) -> float:
        """Share of *all* items whose score equals the label; an item without a verdict is a miss."""
        return self.exact * self.items / max(1, self.items + self.unjudged)

    @property
    def worst_kappa(self) -> float:
        """The lower end of kappa's interval. Resamples of a judge without errors have no errors either, so it is capped
        by Clopper and Pearson's lower bound for the share of correctly judged items.
        """
        never_wrong = (TAIL / 100) ** (1 / max(1, self.items)) if self.exact == 1.0 else 1.0
        return min(self.kappa.low, never_wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Correlations of a judge's errors (score − label); those whose interval excludes 0 deserve attention."""

    mean_error: KappaEstimate
    """Above 0 the judge is lenient, below 0 severe."""
    length: KappaEstimate
    """Rank correlation with the number of characters: above 0, longer texts are scored too high."""
    verbosity: KappaEstimate
    """Rank correlation with words per distinct word: above 0, repetitive texts are scored too high."""
    order: KappaEstimate | None
    """Mean score of votes that saw the scale from best to worst, minus that of the others; needs two votes per item."""
    self_preference: KappaEstimate | None
    """Mean error on texts by the judge's own model minus that on other texts; ``None`` if authors are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Calibration report of one judge on one aspect."""

    aspect: str
    pin: str
    model: str
    identity: str
    """Model name that the endpoint reported."""
    date: str
    agreement: Agreement
    bias: Bias
    items: tuple[LabelledItem, ...]


def parse_items(text: str, rubric: Rubric, source: str) -> tuple[LabelledItem, ...]:
    """Read labelled items, one JSON object per line. Raises :class:`~etude.errors.ConfigError` naming the line."""
    items: list[LabelledItem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields = orjson.loads(line)
            if not isinstance(fields, dict) or set(fields) not in ITEM_KEYS:
                raise ValueError("expected the keys task, work, label and, where it is known, author")
            label = fields["label"]
            if type(label) is not int or not rubric.lowest <= label <= rubric.highest:
                raise ValueError(f"label {label!r}: expected {rubric.lowest} to {rubric.highest}")
            if not all(isinstance(fields.get(key, ""), str) for key in ("task", "work", "author")):
                raise ValueError("task, work and author are texts")
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from error
        items.append(LabelledItem(**fields))
    if not FEWEST_ITEMS <= len(items) <= MOST_ITEMS:
        raise ConfigError(f"{source} has {len(items)} items: expected {FEWEST_ITEMS} to {MOST_ITEMS}")
    return tuple(items)


def agreement_of(items: Sequence[LabelledItem], judgements: Sequence[Judgement]) -> Agreement:
    """Compare judgements with labels, item by item."""
    labels_N, scores_N = _judged(items, judgements)
    errors_N = np.abs(scores_N - labels_N)
    judged = len(labels_N)
    return Agreement(
        items=judged,
        unjudged=len(items) - judged,
        invalid_votes=sum(len(judgement.invalid) for judgement in judgements),
        exact=float((errors_N == 0).mean()) if judged else 0.0,
        within_one=float((errors_N <= 1).mean()) if judged else 0.0,
        kappa=estimate(lambda drawn: weighted_kappa(labels_N[drawn], scores_N[drawn]), judged),
    )


def bias_of(items: Sequence[LabelledItem], judgements: Sequence[Judgement], model: str) -> Bias:
    """Biases of a judge whose model is ``model``."""
    judged = [item for item, judgement in zip(items, judgements, strict=True) if judgement.score is not None]
    labels_N, scores_N = _judged(items, judgements)
    errors_N = scores_N - labels_N
    own_N = np.array([item.author == model for item in judged], np.bool_)
    has_authors = all(item.author for item in judged) and bool(own_N.any()) and not own_N.all()
    return Bias(
        mean_error=_mean(errors_N),
        length=_leaning(errors_N, [float(len(item.work)) for item in judged]),
        verbosity=_leaning(errors_N, [_verbosity(item.work) for item in judged]),
        order=_order(judgements),
        self_preference=_difference(errors_N, own_N) if has_authors else None,
    )


def dump_calibration(calibration: Calibration) -> str:
    """The report as indented JSON, for a file next to its rubric."""
    return orjson.dumps(asdict(calibration), option=orjson.OPT_INDENT_2).decode() + "\n"


def parse_calibration(text: str, source: str) -> Calibration:
    """Parse a calibration report. Raises :class:`~etude.errors.ConfigError` for anything else."""
    try:
        tree = orjson.loads(text)
        bias: dict[str, Any] = {name: value and KappaEstimate(**value) for name, value in tree["bias"].items()}
        agreement = tree["agreement"] | {"kappa": KappaEstimate(**tree["agreement"]["kappa"])}
        items = tuple(LabelledItem(**item) for item in tree["items"])
        parts = {"agreement": Agreement(**agreement), "bias": Bias(**bias), "items": items}
        return Calibration(**(tree | parts))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is not a calibration: {error}; write it with `etude judge calibrate`") from error


def distrust(calibration: Calibration | None, pin: str, min_agreement: float) -> str:
    """The reason why a judge with this ``pin`` is not trusted after its calibration; empty if it is."""
    if calibration is None:
        return "it was never calibrated"
    if calibration.pin != pin:
        return "its model, prompt, rubric or way of voting is not the one that was calibrated"
    agreement, low = calibration.agreement, calibration.agreement.worst_kappa
    if agreement.unjudged > agreement.items:
        return f"it had no verdict on {agreement.unjudged} of {agreement.unjudged + agreement.items} items"
    if not low >= min_agreement:
        return f"its weighted kappa may be as low as {low:.2f}, and judge.min_agreement is {min_agreement:g}"
    return ""


def _judged(items: Sequence[LabelledItem], judgements: Sequence[Judgement]) -> tuple[Numbers, Numbers]:
    """Labels and scores [N] of the items with a verdict."""
    pairs = [
        (item.label, judgement.score)
        for item, judgement in zip(items, judgements, strict=True)
        if judgement.score is not None
    ]
    both = np.array(pairs, np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _mean(values_N: Numbers) -> KappaEstimate:
    return estimate(lambda drawn: values_N[drawn].mean(-1), len(values_N))


def _leaning(errors_N: Numbers, by: Sequence[float]) -> KappaEstimate:
    """Rank correlation of errors; resampled items keep their ranks among all items."""
    errors, others = ranks(errors_N), ranks(np.array(by, np.float64))
    return estimate(lambda drawn: correlation(errors[drawn], others[drawn]), len(errors))


def _order(judgements: Sequence[Judgement]) -> KappaEstimate | None:
    differences: list[float] = []
    for judgement in judgements:
        descending = [vote.score for vote in judgement.votes if vote.score is not None and vote.descending]
        ascending = [vote.score for vote in judgement.votes if vote.score is not None and not vote.descending]
        if descending and ascending:
            differences.append(float(np.mean(descending) - np.mean(ascending)))
    return _mean(np.array(differences, np.float64)) if differences else None


def _difference(errors_N: Numbers, own_N: Mask) -> KappaEstimate:
    """Difference of two means. A draw that has only one of the sides, which is rare, counts as no difference."""

    def gap(drawn: Indices) -> Numbers:
        errors, own = errors_N[drawn], own_N[drawn]
        sides = own.sum(-1), (~own).sum(-1)
        mixed = (sides[0] > 0) & (sides[1] > 0)
        own_mean = (errors * own).sum(-1) / np.maximum(sides[0], 1)
        other_mean = (errors * ~own).sum(-1) / np.maximum(sides[1], 1)
        return np.where(mixed, own_mean - other_mean, 0.0)

    return estimate(gap, len(errors_N))


def _verbosity(text: str) -> float:
    words = text.lower().split()
    return len(words) / len(set(words)) if words else 0.0


FALL = 0.2
"""The loss of agreement that the alarm is tuned for."""
FALSE_ALARM_CHECKS = 1_000
"""Lower bound of the mean number of checks between two false alarms."""
LEAST, MOST = 0.05, 0.98
"""Bounds to which a calibrated rate of agreement is clamped: no set is large enough for certainty."""
MOST_IDENTITIES = 63
"""Number of earlier model names of an endpoint that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A judge alarm that a person has to look at."""

    kind: Literal["model", "agreement"]
    aspect: str
    """Empty: all aspects."""
    detail: str


class AgreementWatch:
    """Monitors whether calibration items still get the scores of their labels. ``rate`` is the share of them that did
    at calibration.
    """

    def __init__(self, rate: float) -> None:
        before = min(MOST, max(LEAST, rate))
        after = max(LEAST / 2, before - FALL)
        self.evidence = 0.0
        """S: log-likelihood ratio of the fall against no fall, in nats; never below 0."""
        self.checks = self.misses = 0
        """Number of items judged again, and of those whose score was not the label."""
        self._hit = math.log(after / before)
        self._miss = math.log((1 - after) / (1 - before))

    def observe(self, *, hit: bool) -> bool:
        """Record one outcome; true if it raises an alarm, after which the evidence restarts at 0."""
        self.checks += 1
        self.misses += not hit
        self.evidence = max(0.0, self.evidence + (self._hit if hit else self._miss))
        if self.evidence < math.log(FALSE_ALARM_CHECKS):
            return False
        self.evidence = 0.0
        return True


class IdentityWatch:
    """Monitors the model name that an endpoint reports. ``calibrated`` are the names at calibration."""

    def __init__(self, calibrated: Iterable[str] = ()) -> None:
        self._names = [identity for identity in calibrated if identity]
        self._calibrated = frozenset(self._names)

    def observe(self, identity: str) -> bool:
        """True for a new name. If there is no calibrated name, the first one takes its place; an endpoint that
        alternates between two names is reported once, and one that reports none never.
        """
        if not identity or identity in self._names:
            return False
        self._names = [*self._names[-MOST_IDENTITIES:], identity]
        self._calibrated = self._calibrated or frozenset({identity})
        return len(self._names) > 1

    def vouches_for(self, identity: str) -> bool:
        """True if the last name is the calibrated or first one, or if the endpoint reports none."""
        return not identity or identity in self._calibrated
