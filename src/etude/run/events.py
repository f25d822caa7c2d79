"""The events of a run's processes, with the sinks that its recipe names and copies at the run's URL."""

from typing import cast

from etude.config.recipe import RunConfig
from etude.config.telemetry import SINKS
from etude.run.event_copies import EventCopies
from etude.run.folder import RunFolder
from etude.run.process_name import ProcessName
from etude.run.run_url import EVENTS, open_place
from etude.telemetry.log import EventLog
from etude.telemetry.sinks import Sink, SinkContext, Sinks


def open_events(folder: RunFolder, config: RunConfig, process: ProcessName, *, lossy: bool = False) -> EventLog:
    """The log of one process; the caller closes it."""
    context = SinkContext(run=config.name, process=str(process))
    sinks = {
        f"{number} ({sink.kind})": cast("Sink", SINKS.make(sink.kind, sink.options, context))
        for number, sink in enumerate(config.telemetry.sinks, start=1)
    }
    log = EventLog(folder.events, str(process), lossy=lossy, sinks=Sinks(sinks) if sinks else None)
    if folder.url:
        log.follow(EventCopies(open_place(folder.url, EVENTS), folder.events, str(process)))
    return log
