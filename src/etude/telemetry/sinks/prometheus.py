"""One HTTP endpoint with the newest figures of all processes of a run, in Prometheus' text format.

Most processes of a run have no HTTP server and need none for this: what they do is in their events.
"""

import logging
from collections.abc import Iterator
from threading import Lock
from typing import final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from etude.config.log import PrometheusOptions
from etude.telemetry.events import Logged
from etude.telemetry.exported import ExportedValues
from etude.telemetry.sinks.sink import SinkContext

logger = logging.getLogger(__name__)


@final
class PrometheusSink:
    """Folds events and serves ``/metrics``; implements :class:`~etude.telemetry.sinks.sink.Sink`."""

    def __init__(self, options: PrometheusOptions, context: SinkContext) -> None:
        self._collector = _Collector(context.run)
        for logged in context.past():
            self._collector.add(logged)
        registry = CollectorRegistry()
        registry.register(self._collector)
        self._server, self._thread = start_http_server(options.port, options.host, registry)
        logger.info("metrics at http://%s:%d/metrics", options.host, self._server.server_port)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def emit(self, event: Logged) -> None:
        """Fold in one event."""
        self._collector.add(event)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@final
class _Collector(Collector):
    """The newest values, read by the server's threads."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._values = ExportedValues()
        self._lock = Lock()

    def add(self, logged: Logged) -> None:
        with self._lock:
            self._values.add(logged)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = [(name, figure, dict(values)) for name, figure, values in self._values]
        for name, figure, values in families:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(name, f"{figure.title}, {figure.unit}".rstrip(", "), labels=["run", *figure.labels])
            for labels, value in values.items():
                family.add_metric([self._run, *labels], value)
            yield family
