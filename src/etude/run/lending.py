"""Lends a region's machines to its rollouts while production does not need them.

    consumes   production's load, every ``LOOK_S``, by default from its Prometheus pages; the running processes
    produces   the engines that must not run now, for the region's supervisor; the weekly forecast, in a file
    waits for  nothing: while production does not answer, it keeps all machines
    on stop    only the forecast is stored: a successor lends again once production has been calm for ``calm_s``

:mod:`etude.fleet.lending` makes the decisions. A machine is returned when its engine ends: the supervisor stops the
engine, and its calls continue on other engines after their last token (:mod:`etude.gateway.routing.pool`).
"""

import math
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import cast, final

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from etude.clock import unix_s
from etude.closing import Closing
from etude.config.fleet import PRODUCTIONS, FleetConfig, LendingConfig
from etude.errors import ConfigError, InfrastructureError
from etude.fleet.lending import Forecast, LendingLimits, LendingTable, Production, ProductionLoad
from etude.fleet.specs import ProcessSpec
from etude.fsync import write_whole

LOOK_S = 0.5
"""Interval at which production's load is polled."""
ANSWER_S = 2.0
"""Timeout for a page of metrics."""
WINDOW_S = 30.0
"""Window over which production's time to first token is evaluated."""
PERCENTILE = 0.95
RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs", "etude_calls_inflight"})
WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs", "etude_calls_waiting"})
FIRST_TOKEN = frozenset(
    {"vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "etude_first_token_seconds"}
)
"""Names of gauges and of a histogram on pages of vLLM, SGLang and étude's gateways."""
ROLLOUTS = {"traffic": "rollout"}
"""Labels of samples that do not come from production's users."""


@final
class MetricsProduction:
    """Reads production's load from Prometheus pages; implements :class:`~etude.fleet.lending.Production`."""

    def __init__(self, config: LendingConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._urls = config.metrics
        self._now = now
        self._seen: deque[tuple[float, Mapping[float, float]]] = deque()
        """(Time, upper bound in seconds → calls so far whose first token came within it)."""

    def load(self) -> ProductionLoad:
        """The sums over all pages, and the 95th percentile of the last ``WINDOW_S``."""
        metrics = [metric for url in self._urls for metric in self._page(url)]
        now, buckets = self._now(), first_tokens(metrics)
        while self._seen and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, buckets))
        earlier = self._seen[0][1]
        recent = {bound: max(0.0, count - earlier.get(bound, 0.0)) for bound, count in buckets.items()}
        return ProductionLoad(
            running=round(_total(metrics, RUNNING)),
            waiting=round(_total(metrics, WAITING)),
            first_token_p95_s=quantile(recent, PERCENTILE),
        )

    def _page(self, url: str) -> list[Metric]:
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                metrics = list(text_string_to_metric_families(answer.read().decode()))
        except (OSError, HTTPException, ValueError) as error:
            raise InfrastructureError(f"production's page {url} cannot be read: {error}") from error
        if RUNNING.isdisjoint(metric.name for metric in metrics):
            raise InfrastructureError(
                f"production's page {url} does not report running calls: it has none of {', '.join(sorted(RUNNING))}"
            )
        return metrics


def first_tokens(metrics: Iterable[Metric]) -> dict[float, float]:
    """Upper bound in seconds → production's calls so far whose first token came within it."""
    buckets: dict[float, float] = {}
    for sample in _samples(metrics, FIRST_TOKEN):
        if sample.name.endswith("_bucket") and "le" in sample.labels:
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile of a histogram with cumulative ``buckets``, linear within the bucket, like Prometheus'
    ``histogram_quantile``; the last finite bound for values above it, ``None`` without any counts.
    """
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= share * total:
            return low if math.isinf(bound) else low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return low


def _total(metrics: Iterable[Metric], names: frozenset[str]) -> float:
    return sum(sample.value for sample in _samples(metrics, names))


def _samples(metrics: Iterable[Metric], names: frozenset[str]) -> Iterator[Sample]:
    """The samples of some metrics, without those of rollouts."""
    for metric in metrics:
        for sample in metric.samples if metric.name in names else ():
            if not ROLLOUTS.items() <= sample.labels.items():
                yield sample


@final
class Lender(Closing):
    """The lending of one region, on a separate thread from :meth:`start` on."""

    def __init__(
        self,
        config: LendingConfig,
        engines: Sequence[str],
        production: Production,
        forecast: Path,
        notify: Callable[[str], None],
    ) -> None:
        """``engines`` are the processes on machines that may be lent, the file ``forecast`` stores the
        weekly forecast.
        """
        self.made_of = config, tuple(engines)
        """The configuration and the engines."""
        own = [f"production-{number}" for number in range(config.own)]
        limits = LendingLimits(
            slo_first_token_s=config.slo_first_token_s,
            places=config.places,
            keep=config.own,
            margin=config.margin,
            lead_s=config.lead_s,
            calm_s=config.calm_s,
        )
        self.withheld = frozenset(engines)
        """Engines whose machines production has now: they must not run."""
        self._table = LendingTable([*own, *engines], limits, _read(forecast))
        self._engines = frozenset(engines)
        self._production = production
        self._file, self._written = forecast, ""
        self._notify = notify
        self._running: frozenset[str] = frozenset()
        self._is_away = False
        self._closed = Event()
        self._thread = Thread(target=self._follow, name="lending", daemon=True)

    def start(self) -> None:
        """Start to poll production, until closed."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_S * 2)

    def see(self, running: Iterable[str]) -> None:
        """Record the running processes: production has a machine back once its engine has ended."""
        self._running = self._engines & frozenset(running)

    def look(self, now_s: float) -> None:
        """Poll production once and decide, at ``now_s`` of a clock with weeks of equal length."""
        load, trouble = self._fetch_load()
        decision = self._table.step(load, self._running, now_s)
        self.withheld -= frozenset(decision.lend)
        self.withheld |= frozenset(decision.recall)
        self._tell(decision.lend, decision.recall, load, trouble)
        if (learnt := self._table.forecast.to_json()) != self._written:
            self._written = learnt
            with suppress(OSError):  # a full disk: this hour's data is lost if this process ends before the next save
                write_whole(self._file, learnt.encode())

    def _fetch_load(self) -> tuple[ProductionLoad | None, str]:
        """Production's load, or the reason why there is none."""
        try:
            return self._production.load(), ""
        except InfrastructureError as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001  # somebody else's code may raise anything
            return None, f"production's load cannot be read: {type(error).__name__}: {error}"

    def _tell(self, lend: Sequence[str], recall: Sequence[str], load: ProductionLoad | None, trouble: str) -> None:
        if bool(trouble) != self._is_away:
            self._is_away = bool(trouble)
            keeps = f"{trouble}; production keeps its machines until it answers"
            self._notify(keeps if trouble else "production answers again")
        calls = "" if load is None else f": production has {load.calls} calls"
        for word, names in (("lent", lend), ("given back", recall)):
            if names:
                self._notify(f"{word}: the machines of {', '.join(names)}{calls}")

    def _follow(self) -> None:
        has_failed = False
        while not self._closed.wait(LOOK_S):
            try:
                self.look(unix_s())
                has_failed = False
            except Exception as error:  # noqa: BLE001  # the thread must go on: only it gives production its machines back
                if not has_failed:
                    self._notify(f"lending fails and is tried again: {type(error).__name__}: {error}")
                has_failed = True


@final
class RegionLenders(Closing):
    """The lenders of all regions in which a supervisor has engines; they follow its fleet."""

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        """The forecasts are files in ``folder``."""
        self._folder, self._notify = folder, notify
        self._lenders: dict[str, Lender] = {}

    @property
    def withheld(self) -> frozenset[str]:
        """Engines that must not run now."""
        return frozenset[str]().union(*(lender.withheld for lender in self._lenders.values()))

    def follow(self, fleet: FleetConfig, specs: Iterable[ProcessSpec]) -> None:
        """Lend for the regions in which the fleet enables it; unchanged lenders continue.

        Raises :class:`~etude.errors.ConfigError` for a production that cannot be created.
        """
        lent = [spec for spec in specs if spec.is_lent]
        lending = {
            region.name: (region.lending, tuple(spec.name for spec in lent if spec.region == region.name))
            for region in fleet.regions
            if region.lending.places
        }
        for name in [name for name, lender in self._lenders.items() if lending.get(name) != lender.made_of]:
            self._lenders.pop(name).close()
        for name, (config, engines) in lending.items():
            if engines and name not in self._lenders:
                forecast = self._folder / f"lending-{name}.json"
                self._lenders[name] = Lender(config, engines, make_production(config), forecast, self._notify)
                self._lenders[name].start()

    def see(self, running: Iterable[str]) -> None:
        """Record the running processes."""
        names = frozenset(running)
        for lender in self._lenders.values():
            lender.see(names)

    def close(self) -> None:
        """Stop lending."""
        for lender in self._lenders.values():
            lender.close()


def make_production(config: LendingConfig) -> Production:
    """The production configured by the fleet. Raises :class:`~etude.errors.ConfigError` if it cannot be created."""
    try:
        return cast("Production", PRODUCTIONS.make(config.production, config))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read(file: Path) -> Forecast | None:
    """The forecast of an earlier supervisor; ``None`` if the file is damaged or missing."""
    try:
        return Forecast.learnt(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
