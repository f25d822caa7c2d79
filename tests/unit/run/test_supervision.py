"""A process that finds a full disk waits for room, and says so, instead of dying again and again."""

import os
import signal
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.run.folder import RunFolder
from etude.run.process_name import GATEWAY, ProcessName
from etude.run.supervision import Child, stop_all
from etude.telemetry.events import PhaseStarted
from etude.telemetry.log import EventLog, EventReader
from smalldisk import fill, small_disk
from waiting import wait_until


def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    """Regression: six silent deaths in 97 s, then the end of the run."""
    message = list[str]()
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder.create(disk / "run", RunConfig())
        with EventLog(folder.events, "supervisor", lossy=True) as events:
            filler = fill(disk)
            child = Child(ProcessName(command="midtrain"), folder, events, message.append, heartbeat_timeout_s=900.0)
            try:
                wait_until(lambda: child.check() or bool(message))
                events.write(PhaseStarted(phase="rl"))
                assert "midtrain waits for room on a disk" in message[0]
                assert f"{folder.path} has 0 bytes free" in message[0]
                assert "make room there and it goes on" in message[0]
                filler.unlink()
                full = child.pid
                wait_until(lambda: child.check() or child.pid != full)
            finally:
                stop_all([child])
        assert all(line.event for line in EventReader(folder.events).new()), "no event was torn"


def test_a_restart_is_told_with_its_reason(tmp_path: Path) -> None:
    """Regression: nothing was said while a process died again and again."""
    folder, message = RunFolder.create(tmp_path / "run", RunConfig()), list[str]()
    with EventLog(folder.events, "supervisor") as events:
        child = Child(GATEWAY, folder, events, message.append, heartbeat_timeout_s=900.0)
        try:
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: child.check() or bool(message))
            assert message == ["gateway ended with status -9 and is started again: it said nothing"]
        finally:
            stop_all([child])
