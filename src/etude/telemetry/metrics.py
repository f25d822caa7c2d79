"""Table of an optimiser step's metrics, used by ranks, events, ``report.json``, page and terminal.

    measured ──▶ reduced over ranks ──▶ ``StepDone.metrics`` ──▶ report.json (``curve``) ──▶ page, panel, progress line

A new metric needs two changes: a row here, and code that measures it and adds it by name to the step's metrics
(:mod:`etude.trainer.policy` on every rank, :mod:`etude.run.trainer` on rank 0). A value that a step cannot measure,
such as the entropy of no token, is absent, and ``None`` in the report: never 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal


class Reduction(StrEnum):
    """The reduction of a metric over ranks."""

    NONE = "none"
    """Rank 0 alone measures it, or every rank has the same number."""
    SHARES = "shares"
    """Sum over the shares of the batch; ranks that compute one share together have equal counts."""
    RANKS = "ranks"
    """Sum over all ranks, each with its own count."""


class Notation(StrEnum):
    """The rounding of a metric's value."""

    COUNT = "count"
    DECIMAL = "decimal"
    """Four decimals."""
    SIGNIFICANT = "significant"
    """Four significant digits, for values of unknown magnitude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page, with a line for each metric that names it."""

    title: str
    section: Literal["Learning", "Health"]
    wide: bool = False
    """True: as wide as the page, above the other charts of its section, with a smoothed line over dots."""
    log: bool = False
    bound: str = ""
    """Path of the value in the report that is drawn as a bound."""
    bound_label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of the table."""

    title: str
    unit: str = ""
    """Empty: a plain number."""
    notation: Notation = Notation.DECIMAL
    reduction: Reduction = Reduction.NONE
    chart: Chart | None = None
    label: str = ""
    """Name of its line in a chart with several; empty: its newest value."""
    live: str = ""
    """Its name in the live panel and in progress lines; empty: not shown there."""


REWARD_CHART = Chart(title="Mean reward of each step’s rollouts", section="Learning", wide=True)
SPREAD_CHART = Chart(title="Spread of rewards within a group", section="Learning")
SIGNAL_CHART = Chart(title="Shares: groups with a signal, rollouts cut short", section="Learning")
RESAMPLED_CHART = Chart(title="Groups without a signal, sampled again", section="Learning")
SELECTION_CHART = Chart(title="Total variation between the tasks drawn and all alike", section="Learning")
NORM_CHART = Chart(title="Norm of the gradient", section="Learning")
ENTROPY_CHART = Chart(title="Entropy, nats per token", section="Learning")
STALENESS_CHART = Chart(
    title="Staleness, weight versions", section="Health", bound="staleness.bound", bound_label="bound"
)
MISMATCH_CHART = Chart(
    title="Mismatch k3, trainer against engine",
    section="Health",
    log=True,
    bound="config.numerics.warn_k3",
    bound_label="warn",
)


def _count(title: str, unit: str, reduction: Reduction = Reduction.NONE) -> Metric:
    return Metric(title=title, unit=unit, notation=Notation.COUNT, reduction=reduction)


def _significant(title: str, unit: str = "") -> Metric:
    return Metric(title=title, unit=unit, notation=Notation.SIGNIFICANT)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "busy_s": _significant("computing for the step; saving and publishing come on top", "s"),
        "wait_s": _significant("waiting for the batch", "s"),
        "reward_mean": Metric(title="mean reward", chart=REWARD_CHART),
        "reward_low": Metric(title="lowest reward"),
        "reward_high": Metric(title="highest reward"),
        "reward_std": Metric(
            title="standard deviation of rewards within a group, mean over groups", chart=SPREAD_CHART, live="spread"
        ),
        "groups": _count("groups of the batch", "groups"),
        "live_sessions": _count("live sessions among them", "sessions"),
        "live_reward": Metric(title="mean reward of the live sessions"),
        "groups_without_signal": _count("groups in which every advantage is 0", "groups"),
        "groups_resampled": Metric(
            title="groups left out before, since all their rewards were alike",
            unit="groups",
            notation=Notation.COUNT,
            chart=RESAMPLED_CHART,
        ),
        "epoch": _count("newest epoch of the training tasks among them", "epochs"),
        "selection_distance": Metric(
            title="distance of the draws of tasks from all tasks alike", chart=SELECTION_CHART
        ),
        "cut_short": Metric(title="share of rollouts that a limit ended", chart=SIGNAL_CHART, label="cut short"),
        "signal_share": Metric(title="share of groups with a signal", chart=SIGNAL_CHART, label="signal"),
        "grad_norm": Metric(
            title="norm of the gradient before it is clipped",
            notation=Notation.SIGNIFICANT,
            chart=NORM_CHART,
            live="grad norm",
        ),
        "learning_rate": _significant("learning rate of the step"),
        "loss_tokens": _count("tokens with loss", "tokens"),
        "trained_tokens": _count("tokens forward and backward, prompts included", "tokens", Reduction.SHARES),
        "truncated_share": Metric(title="loss tokens whose importance weight hit the cap", reduction=Reduction.SHARES),
        "masked_share": Metric(title="loss tokens left out by a correction or a clip", reduction=Reduction.SHARES),
        "staleness_sum": _count("trainer's version − sampling version, summed over tokens", "versions"),
        "staleness_tokens": _count("sampled tokens of all groups", "tokens"),
        "staleness_max": Metric(
            title="staleness of the oldest token",
            unit="versions",
            notation=Notation.COUNT,
            chart=STALENESS_CHART,
            label="oldest",
        ),
        "staleness_mean": Metric(title="mean staleness", unit="versions", chart=STALENESS_CHART, label="mean"),
        "entropy": Metric(
            title="entropy", unit="nats per token", reduction=Reduction.SHARES, chart=ENTROPY_CHART, live="entropy"
        ),
        "mismatch_tokens": _count("tokens compared under the weights that sampled them", "tokens"),
        "k1": _significant("mismatch k1, trainer against engine", "nats per token"),
        "k3": Metric(
            title="mismatch k3, trainer against engine",
            unit="nats per token",
            notation=Notation.SIGNIFICANT,
            chart=MISMATCH_CHART,
        ),
        "mismatch_p99": _significant("99th percentile of |trainer logprob − engine logprob|", "nats"),
        "mismatch_max": _significant("largest |trainer logprob − engine logprob|", "nats"),
        "mismatch_equal": _count("compared tokens with logprobs equal to the last bit", "tokens"),
        "mismatch_pairs": _count("pairs of compared token and expert that the engine recorded", "pairs"),
        "mismatch_flips": _count("of these, those that the trainer's router would not choose", "pairs"),
        "replayed_pairs": _count("pairs of token and expert routed as by the engine", "pairs", Reduction.RANKS),
        "flipped_pairs": _count("of these, those that the live router would not choose", "pairs", Reduction.RANKS),
        "replaced_pairs": _count("of these, those below numerics.replay_floor", "pairs", Reduction.RANKS),
        "hinted_turns": _count("turns distilled from a hint", "turns"),
        "hinted_tokens": _count("sampled tokens of these", "tokens", Reduction.SHARES),
        "draft_kl": Metric(
            title="divergence of the draft head from the policy where tokens were sampled",
            unit="nats",
            notation=Notation.SIGNIFICANT,
        ),
        "hint_nats": Metric(
            title="weighted divergence from the hinted policy, summed over these",
            unit="nats",
            notation=Notation.SIGNIFICANT,
            reduction=Reduction.SHARES,
        ),
        "hint_kl": Metric(title="divergence from the hinted policy before the step", unit="nats per hinted token"),
    }
)
"""Name → metric, in display order."""


def charts(section: str) -> Iterator[tuple[Chart, list[str]]]:
    """The charts of one section of the page, in the order of the table, each with the names of its metrics."""
    lines: dict[Chart, list[str]] = {}
    for name, metric in METRICS.items():
        if metric.chart is not None and metric.chart.section == section:
            lines.setdefault(metric.chart, []).append(name)
    yield from lines.items()
