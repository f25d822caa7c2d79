"""The process that feeds sinks and evaluates alerts, `etude sinks`, and its start beside a run.

    events/*.jsonl ──▶ one EventTail and one thread for each sink ──▶ tracker, exporter, alerts
                         sinks/NAME.json: its position       sinks/id: the id of the run in trackers

It is not a process of the run: only `etude run` waits for it, at its very end, for :data:`CLOSING_S`; if it dies, that
is reported and it is restarted. Unsent events are sent when the run is resumed, or by `etude sinks --run RUN`.
"""

import importlib.util
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import cast, final

from etude.closing import Closing
from etude.config.log import SINKS, SinkConfig, is_webhook_url
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, EtudeError
from etude.fleet.specs import ETUDE, ProcessSpec
from etude.run.detokenize import turn_reader
from etude.run.events import open_events
from etude.run.folder import RunFolder, exclusive
from etude.run.judging import judge_cost
from etude.run.kept_files import KeptFiles
from etude.run.launchers.host_process import HostProcess, host_process, stop_all
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent
from etude.run.process_name import ProcessName
from etude.run.processes import PREDECESSOR_S
from etude.run.run_url import POSITIONS
from etude.run.scoring import transcript_of
from etude.run.stores import open_archive
from etude.telemetry.alerts import NAMES
from etude.telemetry.events import SinkFailed
from etude.telemetry.log import EventLog
from etude.telemetry.public import public
from etude.telemetry.sinks.alerts import AlertSink, url_of
from etude.telemetry.sinks.sink import Sink, SinkContext
from etude.telemetry.tail import EventTail, SinkThread
from etude.tokens.jinja import load_format

SINKS_PROCESS = ProcessName(command="sinks")
"""The name of the process."""
ALERTS = "alerts"
"""Name of the sink that evaluates ``[[alerts]]``."""
PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "wandb": "wandb",
        "trackio": "trackio",
        "mlflow": "mlflow",
        "tensorboard": "tensorboardX",
        "otlp": "opentelemetry.exporter.otlp.proto.http",
    }
)
"""Sink → the module of its required package; étude's extra has the sink's name."""
CLOSING_S = 30.0
"""Longest time for sinks at the end of a run, when a tracker uploads the report."""
KEEP_S = 60.0
"""Interval at which the positions of sinks are saved at the run's URL."""
NICENESS = 15
"""Niceness of the process: it yields to every process of the run."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""First and longest minimum pause between two starts; it doubles."""

logger = logging.getLogger(__name__)


def check_log(config: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a sink whose package is missing, or an alert that cannot work."""
    for sink in config.log.to:
        if sink.kind in PACKAGES and not _is_installed(PACKAGES[sink.kind]):
            raise ConfigError(
                f"log.to = {sink.kind!r} needs a package that is not installed here: pip install 'etude[{sink.kind}]'"
            )
    for alert in config.alerts:
        watch = alert.condition.watch
        if watch not in NAMES:
            raise ConfigError(
                f"alerts: {alert.name!r} watches {watch!r}, which does not exist: choose one of {', '.join(NAMES)}"
            )
        if watch == "cost" and config.judge.kind != "model":
            raise ConfigError(
                f"alerts: {alert.name!r} would never fire: only a judge with judge.kind = 'model' costs anything"
            )
    check_webhooks(config)


def check_webhooks(config: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a webhook whose environment variable has no URL."""
    for alert in config.alerts:
        url = url_of(alert, os.environ)
        if alert.webhook and not is_webhook_url(url):  # the value may be secret: it is not named
            fault = "it is not a URL" if url else "there is no such environment variable"
            raise ConfigError(
                f"alerts: {alert.name!r} has webhook = {alert.webhook!r}, and {fault}: set it to https://HOST/PATH, "
                f"without spaces and line ends"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def run_sinks(folder: RunFolder) -> None:
    """Feed the sinks of a run until a stop signal; if started by hand, only send the missing events."""
    ending, is_beside = threading.Event(), SUPERVISOR_VARIABLE in os.environ
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    if is_beside:
        die_with_parent(signal.SIGTERM)
        os.nice(NICENESS)
    else:
        ending.set()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    check_webhooks(folder.config())
    if not feed_sinks(folder, ending, closing_s=CLOSING_S if is_beside else None):
        os._exit(0)  # a tracker's own threads may never end, and its exit handlers may wait for them


def feed_sinks(folder: RunFolder, ending: threading.Event, *, closing_s: float | None) -> bool:
    """Feed the sinks of a run until ``ending`` is set, then send the events written until then for at most
    ``closing_s``; false if a sink did not finish.
    """
    with (
        exclusive(folder, str(SINKS_PROCESS), wait_s=PREDECESSOR_S),
        open_events(folder, SINKS_PROCESS, lossy=True) as events,
    ):
        KeptFiles(folder, POSITIONS).bring()  # only here: under the lock, no sink has its position's file open
        threads = _threads(folder, folder.config(), events)
        for thread in threads:
            thread.start()
        while not ending.wait(KEEP_S):
            _keep(folder)
        for thread in threads:
            thread.end()
        deadline_s = None if closing_s is None else time.monotonic() + closing_s
        ended = [thread.join(deadline_s) for thread in threads]
        _keep(folder)
    return all(ended)


def _threads(folder: RunFolder, config: RunConfig, events: EventLog) -> list[SinkThread]:
    places = folder.path / POSITIONS
    places.mkdir(exist_ok=True)
    identity = _identity(places)
    shown = public(config.model_dump(mode="json"))
    read = partial(read_rollout, folder)

    def tell(sink: str, reason: str, lost: int) -> None:
        logger.warning("sink %s: %s; %d events are lost, the run continues", sink, reason, lost)
        events.write(SinkFailed(sink=sink, reason=reason, lost=lost))

    def thread(name: str, place: str, make: Callable[[SinkContext], Sink]) -> SinkThread:
        tail = EventTail(folder.events, places / f"{place}.json")
        context = SinkContext(
            run=config.name,
            id=identity,
            folder=folder.path.absolute(),
            config=shown,
            past=tail.past,
            read_rollout=read,
            samples=config.log.samples,
        )
        return SinkThread(name, tail, partial(make, context), tell)

    threads = [thread(sink.kind, _file_name(sink.kind), partial(_make, sink)) for sink in config.log.to]
    if config.alerts:
        cost = partial(judge_cost, folder.path, config.judge)
        threads.append(
            thread(ALERTS, ALERTS, lambda context: AlertSink(config.alerts, context, events.write, os.environ, cost))
        )
    return threads


def _make(sink: SinkConfig, context: SinkContext) -> Sink:
    return cast("Sink", SINKS.make(sink.kind, sink.options, context))


def _file_name(kind: str) -> str:
    """The file name of a sink; for a class in a user's own file, without the folder and its digest."""
    module, _, name = kind.rpartition(":")
    return f"{Path(module).stem.partition('.')[0]}-{name}" if module else kind


def _identity(places: Path) -> str:
    """The id of the run in trackers, created once."""
    file = places / "id"
    if not file.is_file():
        file.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _keep(folder: RunFolder) -> None:
    """Save the positions at the run's URL, so that another machine can continue from there."""
    try:
        KeptFiles(folder, POSITIONS).keep(POSITIONS, whole=True)
    except EtudeError as error:
        logger.warning("the positions of sinks are not saved at the URL of the run yet: %s", error)


def read_rollout(folder: RunFolder, rollout_id: str) -> str:
    """A rollout as plain text; empty if it cannot be read now."""
    try:
        with open_archive(folder) as archive:
            _, rollout = archive.rollout(rollout_id)
        chat = load_format(folder.model, folder.config().gateway.chat_template_kwargs)
        parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items())
        head = f"rollout {rollout_id}: reward {rollout.reward}, {rollout.reason}; {parts}"
        return f"{head}\n\n{transcript_of(turn_reader(chat)(rollout.turns))}"
    except EtudeError as error:
        logger.warning("rollout %s cannot be read: %s", rollout_id, error)
        return ""


@final
class SinksProcess(Closing):
    """The sinks process of a run, restarted when it dies; a run without sinks or alerts starts none."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder = folder
        self._is_wanted = bool(config.log.to or config.alerts)
        self._process: HostProcess | None = None
        self._due_s = 0.0
        """Earliest time of the next start."""
        self._pause_s = FIRST_PAUSE_S

    def check(self) -> list[str]:
        """Start the process if it does not run; returns lines for the user about its end, without waiting."""
        now_s = time.monotonic()
        if not self._is_wanted or now_s < self._due_s or (self._process is not None and not self._process.has_ended):
            return []
        died = [] if self._process is None else [self._process.status().last_line]
        spec = ProcessSpec(name=str(SINKS_PROCESS), command=(ETUDE, "sinks", "--run", self._folder.name), region="")
        self._process = host_process(spec, self._folder.path, {})
        self._due_s = now_s + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        return [f"the process that feeds sinks has ended and is restarted: {line}" for line in died]

    def close(self) -> None:
        """Let sinks send the remaining events, for a bounded time."""
        if self._process is not None:
            stop_all([self._process], CLOSING_S + 5.0)
