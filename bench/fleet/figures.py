"""What a fleet's events come to: how far its regions were behind, how busy, and what each fault cost. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.fleet.observed import by_region, of_kind, region_of
from bench.fleet.plan import HOME, FaultKind, FleetPlan, PlannedFault
from etude.telemetry.events import EngineStats, EvalDone, Logged, StepDone, WeightsPublished, WeightsSwapped

SLACK_S = 2.0
"""Allowed for a version beside round trips and its bytes: polls, decoding, the swap."""
ROUND_TRIPS = 2
Span = tuple[float, float]
"""Begin and end, in seconds since 1970."""


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """The outcome of one fault; times in seconds since 1970."""

    fault: PlannedFault
    struck_s: float
    healed_s: float | None = None
    """When it was undone, if it is one that is undone."""
    recovered_s: float | None = None

    @property
    def over_s(self) -> float | None:
        """Time from its end, or from its begin where it has none, until the fleet was over it."""
        since_s = self.healed_s if self.fault.lasts_s else self.struck_s
        return None if self.recovered_s is None or since_s is None else self.recovered_s - since_s

    @property
    def span(self) -> Span:
        """The time in which it was felt."""
        return self.struck_s, self.recovered_s or math.inf


def recovery(record: FaultRecord, events: Iterable[Logged]) -> float | None:
    """When the fleet was over a fault; ``None`` while it is not.

    An engine or a machine is replaced when the region's engine serves again; a cut is over when the region samples
    again; a relay is when the region serves the next version; trainer and supervisor are with the next step.
    """
    since_s = record.struck_s
    if record.fault.lasts_s:
        if record.healed_s is None:
            return None
        since_s = record.healed_s
    signs = (logged.at_s for logged in events if logged.at_s > since_s and _is_sign(record.fault, logged, since_s))
    return min(signs, default=None)


def _is_sign(fault: PlannedFault, logged: Logged, since_s: float) -> bool:
    match fault.kind, logged.event:
        case ((FaultKind.TRAINER_NODE_LOST | FaultKind.SUPERVISOR_KILLED), StepDone()):
            return True
        case FaultKind.RELAY_KILLED, WeightsSwapped():
            return region_of(logged.process) == fault.region
        case ((FaultKind.ENGINE_KILLED | FaultKind.MACHINE_KILLED | FaultKind.REGION_CUT), EngineStats() as stats):
            is_new = logged.at_s - stats.window_s >= since_s and region_of(logged.process) == fault.region
            return is_new and (stats.generated_tokens > 0 or not fault.lasts_s)
    return False


def tokens_per_s(events: Iterable[Logged], regions: Iterable[str], span: Span) -> float:
    """Tokens that engines of some regions sampled in a span of time, per second."""
    names = set(regions)
    tokens = sum(
        logged.event.generated_tokens
        for logged in events
        if isinstance(logged.event, EngineStats) and region_of(logged.process) in names
        and span[0] < logged.at_s <= span[1]
    )  # fmt: skip
    return tokens / max(1e-9, span[1] - span[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFigures:
    """Tokens per second of the regions that were not cut off: during the cut, and as long just before it."""

    window_s: float
    before: float
    during: float

    @property
    def share(self) -> float | None:
        """Throughput during the cut as a share of that before it."""
        return self.during / self.before if self.before else None


def around_cut(events: Sequence[Logged], records: Sequence[FaultRecord], plan: FleetPlan) -> CutFigures | None:
    """Throughput of the other regions around the cut; ``None`` without a healed cut, or if another fault was active
    then.
    """
    cut = next((each for each in records if each.fault.kind is FaultKind.REGION_CUT), None)
    if cut is None or cut.healed_s is None:
        return None
    window_s = cut.healed_s - cut.struck_s
    begin_s = cut.struck_s - window_s
    wrong = [each for each in records if each is not cut and each.span[0] < cut.healed_s and each.span[1] > begin_s]
    if wrong:
        return None
    others = [region.name for region in plan.regions if region.name != cut.fault.region]
    return CutFigures(
        window_s=window_s,
        before=tokens_per_s(events, others, (begin_s, cut.struck_s)),
        during=tokens_per_s(events, others, (cut.struck_s, cut.healed_s)),
    )


def served_lags(events: Sequence[Logged], records: Sequence[FaultRecord], plan: FleetPlan) -> dict[str, list[float]]:
    """Region → by how much each version was served later there than its distance and its size explain.

    Versions that were published before its engine was up, or while a fault of the region was felt, are left out.
    """
    published = {
        logged.event.version: logged for logged in reversed(events) if isinstance(logged.event, WeightsPublished)
    }
    swaps = by_region(of_kind(events, WeightsSwapped))
    lags: dict[str, list[float]] = {region.name: [] for region in plan.regions}
    for region in plan.regions:
        spans = [record.span for record in records if record.fault.region in (region.name, HOME)]
        serves = (each.at_s for each in of_kind(events, EngineStats) if region_of(each.process) == region.name)
        spans.append((-math.inf, min(serves, default=math.inf)))
        for _, logged in sorted(published.items()):
            event = logged.event
            assert isinstance(event, WeightsPublished)
            served_s = min((swap.at_s for swap in swaps.get(region.name, ())
                            if isinstance(swap.event, WeightsSwapped) and swap.event.version >= event.version
                            and swap.at_s >= logged.at_s), default=None)  # fmt: skip
            if served_s is None or any(begin <= served_s and logged.at_s <= end for begin, end in spans):
                continue
            allowed_s = ROUND_TRIPS * region.rtt_s + event.size_bytes * 8 / rate(plan) + SLACK_S
            lags[region.name].append(served_s - logged.at_s - allowed_s)
    return lags


def rate(plan: FleetPlan) -> float:
    """Bits per second of the slowest link."""
    return min(shape.bits_per_s for shape in plan.shapes.values())


def busy_shares(events: Sequence[Logged], records: Sequence[FaultRecord], plan: FleetPlan) -> dict[str, float]:
    """Region → share of the time of RL in which its engine computed, without the time of faults there."""
    steps = of_kind(events, StepDone)
    if len(steps) < 2:
        return {}
    during: Span = (steps[0].at_s, steps[-1].at_s)
    shares = {}
    for region in plan.regions:
        spans = [record.span for record in records if record.fault.region in (region.name, HOME)]
        stats = [
            logged.event
            for logged in of_kind(events, EngineStats)
            if region_of(logged.process) == region.name
            and during[0] <= logged.at_s <= during[1]
            and not any(begin <= logged.at_s <= end for begin, end in spans)
        ]
        window_s = sum(each.window_s for each in stats if isinstance(each, EngineStats))
        busy_s = sum(each.busy_s for each in stats if isinstance(each, EngineStats))
        if window_s:
            shares[region.name] = busy_s / window_s
    return shares


def largest_metric(events: Iterable[Logged], name: str) -> float | None:
    """The largest value of a metric over all steps that have it."""
    steps = (logged.event for logged in of_kind(events, StepDone))
    values = [step.metrics[name] for step in steps if isinstance(step, StepDone) and name in step.metrics]
    return max(values, default=None)


def steps_beyond(events: Iterable[Logged], name: str, bound: float) -> int:
    """Steps in which a metric is above a bound."""
    steps = (logged.event for logged in of_kind(events, StepDone))
    return sum(isinstance(step, StepDone) and step.metrics.get(name, 0.0) > bound for step in steps)


def published_bytes(events: Iterable[Logged]) -> int:
    """Size of all weight versions that were published."""
    sizes = {logged.event.version: logged.event.size_bytes for logged in events
             if isinstance(logged.event, WeightsPublished)}  # fmt: skip
    return sum(sizes.values())


def pass_rate_gap(events: Iterable[Logged], expected: Mapping[str, float]) -> float | None:
    """Difference of the last pass rate from that of one machine, in standard errors of the difference."""
    last = next((logged.event for logged in reversed([*events])
                 if isinstance(logged.event, EvalDone) and logged.event.label == "after"), None)  # fmt: skip
    if last is None:
        return None
    error = math.hypot(last.sampled_stderr, expected["stderr_after"])
    return abs(last.sampled_pass - expected["pass_after"]) / error if error else None
