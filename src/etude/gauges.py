"""Present states in Prometheus' text format: what ``/metrics`` of engines, gateways and hosts of sandboxes share.

Owns the form. What the states are, and what is counted beside them, is each server's.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias, final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of such a page."""
Gauges: TypeAlias = Mapping[str, Mapping[str, float]]
"""Name of the gauge → value of its label (empty for none) → value."""
NO_LABELS: Mapping[str, str] = MappingProxyType({})


@final
class GaugeCollector(Collector):
    """Gauges that are computed when they are read. ``labels``: the name of a gauge → that of its label."""

    def __init__(self, gauges: Callable[[], Gauges], labels: Mapping[str, str] = NO_LABELS) -> None:
        self._gauges = gauges
        self._labels = labels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges, as they are now."""
        for name, values in self._gauges().items():
            label = self._labels.get(name)
            family = GaugeMetricFamily(name, name.replace("_", " "), labels=[label] if label else None)
            for value, number in values.items():
                family.add_metric([value] if label else [], number)
            yield family


def gauge_page(values: Mapping[str, float]) -> bytes:
    """The page of a server that has gauges alone."""
    registry = CollectorRegistry()
    registry.register(GaugeCollector(lambda: {name: {"": value} for name, value in values.items()}))
    return generate_latest(registry)
