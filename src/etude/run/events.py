"""The events of a run's processes, with copies at the run's URL."""

from etude.run.event_copies import EventCopies
from etude.run.folder import RunFolder
from etude.run.process_name import ProcessName
from etude.run.run_url import EVENTS, open_place
from etude.telemetry.log import EventLog


def open_events(folder: RunFolder, process: ProcessName, *, lossy: bool = False) -> EventLog:
    """The log of one process; the caller closes it."""
    log = EventLog(folder.events, str(process), lossy=lossy)
    if folder.url:
        log.follow(EventCopies(open_place(folder.url, EVENTS), folder.events, str(process)))
    return log
