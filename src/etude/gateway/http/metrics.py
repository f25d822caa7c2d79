"""What a gateway counts, in Prometheus' text format.

Owns names, labels and buckets. One :class:`~etude.gateway.http.request_log.Visit` at its end updates
everything that is counted; what is a state rather than a count (calls in flight, engines by state) is asked for when
somebody reads. Labels come from closed sets: no caller can make a series of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from etude.gateway.http.keys import OVER_BUDGET
from etude.gateway.http.request_log import Visit

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of :meth:`Metrics.page`."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the latency histograms: from what the gateway alone takes to the longest deadline."""

Gauges = Callable[[], Mapping[str, Mapping[str, float]]]
"""Says the present states: name of the gauge → value of its label (empty for none) → value."""


@final
class Metrics:
    """The registry of one gateway. ``gauges`` is asked at every reading."""

    def __init__(self, gauges: Gauges) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "etude_calls", "Model calls that are over.", ("dialect", "status", "traffic"), registry=registry
        )
        self._requests = Counter("etude_requests", "Other requests that are over.", ("status",), registry=registry)
        self._seconds = Histogram(
            "etude_call_seconds", "Whole model calls.", ("traffic",), buckets=SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "etude_first_token_seconds", "To the first token.", ("traffic",), buckets=SECONDS, registry=registry
        )
        self._tokens = Counter(
            "etude_tokens",
            "Tokens of calls that got any; `reused` is the part of `prompt` that continues an earlier turn.",
            ("kind", "traffic"),
            registry=registry,
        )
        self._over_budget = Counter("etude_budget_refusals", "Calls beyond their key's budget.", registry=registry)
        registry.register(_States(gauges))
        self._series: dict[tuple[str, int, str], Counter] = {}
        self._of_traffic: dict[str, _Traffic] = {}

    def count(self, visit: Visit) -> None:
        """Add one visit that is over."""
        key = visit.dialect, visit.status, visit.traffic
        series = self._series.get(key)
        if series is None:
            status = str(visit.status)
            call = self._calls.labels(visit.dialect, status, visit.traffic) if visit.dialect else None
            series = self._series[key] = self._requests.labels(status) if call is None else call
        series.inc()
        if visit.code == OVER_BUDGET:
            self._over_budget.inc()
        if visit.dialect and visit.traffic:
            self._traffic(visit.traffic).count(visit)

    def page(self) -> bytes:
        """Everything as text."""
        return generate_latest(self._registry)

    def _traffic(self, name: str) -> "_Traffic":
        traffic = self._of_traffic.get(name)
        if traffic is None:
            tokens = (self._tokens.labels(kind, name) for kind in ("prompt", "reused", "sampled"))
            traffic = _Traffic(self._seconds.labels(name), self._first_token.labels(name), *tokens)
            self._of_traffic[name] = traffic
        return traffic


class _Traffic:
    """The series of one traffic class, looked up once: a call must not pay for finding them."""

    def __init__(
        self, seconds: Histogram, first_token: Histogram, prompt: Counter, reused: Counter, sampled: Counter
    ) -> None:
        self._seconds, self._first_token = seconds, first_token
        self._prompt, self._reused, self._sampled = prompt, reused, sampled

    def count(self, visit: Visit) -> None:
        self._seconds.observe(visit.seconds)
        if visit.first_token_s is None:
            return
        self._first_token.observe(visit.first_token_s)
        self._prompt.inc(visit.prompt_tokens)
        self._reused.inc(visit.reused_tokens)
        self._sampled.inc(visit.completion_tokens)


class _States(Collector):
    """Gauges that are computed when they are read."""

    LABELS = (("etude_engines", "state"), ("etude_calls_waiting", "traffic"))

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = dict(self.LABELS)
        for name, values in self._gauges().items():
            label = labels.get(name)
            family = GaugeMetricFamily(name, name.replace("_", " "), labels=[label] if label else None)
            for value, number in values.items():
                family.add_metric([value] if label else [], number)
            yield family
