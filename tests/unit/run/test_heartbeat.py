"""Missing heartbeats are noticed, and a supervisor that was stopped itself blames no process."""

import asyncio
import os
from pathlib import Path

import pytest

from etude.aio import background_task
from etude.fleet.restarts import LONGEST_LOOK_S, Silence
from etude.run.heartbeat import HEARTBEAT_VARIABLE, Heartbeat
from waiting import until


def test_silence_lasts_until_the_next_beat() -> None:
    silence = Silence(7, 100.0)
    assert [silence.look(7, 100.0 + 0.5 * look) for look in (1, 2, 3)] == [0.5, 1.0, 1.5]
    assert not silence.begun
    assert silence.look(8, 102.0) == 0.0
    assert silence.begun
    assert silence.look(8, 102.5) == 0.5


def test_the_time_in_which_no_one_looked_is_no_silence() -> None:
    """The supervisor was stopped, or the whole machine, or the clock jumped."""
    silence = Silence(7, 100.0)
    assert silence.look(7, 86_500.0) == LONGEST_LOOK_S
    assert silence.look(7, 86_500.25) == LONGEST_LOOK_S + 0.25


def test_a_beat_touches_the_file_that_the_supervisor_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    file.touch()
    os.utime(file, (1.0, 1.0))
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(file))
    heart = Heartbeat()
    heart.beat()
    assert file.stat().st_mtime > 1.0
    os.utime(file, (1.0, 1.0))
    heart.beat()  # every turn of a loop may ask for it
    assert file.stat().st_mtime == 1.0
    file.unlink()
    Heartbeat().beat()  # a disk in trouble is no reason to die


def test_an_event_loop_beats_as_long_as_it_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    file.touch()
    os.utime(file, (1.0, 1.0))
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(file))

    async def run() -> None:
        async with background_task(Heartbeat().keep()):
            await until(lambda: file.stat().st_mtime > 1.0)

    asyncio.run(run())


def test_no_one_looks_at_the_beats_of_a_process_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    Heartbeat().beat()
