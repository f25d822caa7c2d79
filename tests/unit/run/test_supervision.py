"""A process that finds a full disk waits for space and reports it, instead of dying again and again."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.fleet.specs import ProcessSpec
from etude.run.folder import RunFolder
from etude.run.placement import place_here
from etude.run.supervision import Supervisor
from etude.telemetry.events import PhaseStarted, ProcessStarted
from etude.telemetry.log import EventLog, EventReader
from smalldisk import fill, small_disk
from waiting import wait_until

START_S = 200.0
"""A process imports torch before it writes anything, which takes its time on a busy machine."""


def supervise(command: str, folder: RunFolder, events: EventLog, notify: Callable[[str], None]) -> Supervisor:
    spec = ProcessSpec(name=command, command=("etude", command, "--run", str(folder.path)), region="home")
    placement = place_here(folder, folder.config())
    supervisor = Supervisor([spec], placement, folder, events, notify, heartbeat_timeout_s=900.0)
    supervisor.check()
    return supervisor


def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    """Regression: six silent deaths in 97 s, then the end of the run."""
    message = list[str]()
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder.create(disk / "run", RunConfig())
        with EventLog(folder.events, "supervisor", lossy=True) as events:
            filler = fill(disk)
            supervisor = supervise("midtrain", folder, events, message.append)
            try:
                wait_until(lambda: supervisor.check() or bool(message), timeout_s=START_S)
                events.write(PhaseStarted(phase="rl"))
                assert "midtrain waits for free space on a disk" in message[0]
                assert f"{folder.path} has 0 bytes free" in message[0]
                assert "free some space there, and midtrain continues" in message[0]
                filler.unlink()
                full = supervisor.statuses["midtrain"].pid
                wait_until(lambda: supervisor.check() or supervisor.statuses["midtrain"].pid != full, timeout_s=START_S)
            finally:
                supervisor.stop()
        assert all(line.event for line in EventReader(folder.events).new()), "no event was torn"


def test_a_restart_is_told_with_its_reason(tmp_path: Path) -> None:
    """Regression: nothing was reported while a process died again and again."""
    folder, message = RunFolder.create(tmp_path / "run", RunConfig()), list[str]()
    with EventLog(folder.events, "supervisor") as events:
        supervisor = supervise("gateway", folder, events, message.append)
        try:
            os.kill(supervisor.statuses["gateway"].pid, signal.SIGKILL)
            wait_until(lambda: supervisor.check() or bool(message))
            assert message == ["gateway ended with status -9 and is restarted: no output"]
        finally:
            supervisor.stop()
    starts = [line.event for line in EventReader(folder.events).new() if isinstance(line.event, ProcessStarted)]
    assert [start.restarts for start in starts] == [0, 1]
