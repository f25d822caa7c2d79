"""The access log: a line for each request, none lost without being counted."""

import asyncio
import os
from pathlib import Path
from threading import Event, Thread

import orjson

from etude.gateway import request_log
from etude.gateway.request_log import AccessLog, RequestRecord
from waiting import until


def record(route: str = "POST /v1/chat/completions") -> RequestRecord:
    return RequestRecord(began=1.0, route=route, status=200, first_token=1.25, ended=1.5, versions=(3, 4))


def test_a_line_has_the_facts_of_a_request(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log", lambda: 1785312000.1234)
    log.add(record())
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    fields = orjson.loads(line)
    assert fields["time"] == 1785312000.123
    assert (fields["seconds"], fields["first_token_s"], fields["versions"]) == (0.5, 0.25, [3, 4])


def test_lines_are_written_every_second_and_appended_to_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("earlier\n")

    async def run() -> None:
        log = AccessLog(file, lambda: 0.0)
        running = asyncio.create_task(log.run())
        log.add(record("first"))
        await until(lambda: "first" in file.read_text())
        log.add(record("second"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        log.close()

    asyncio.run(run())
    lines = file.read_text().splitlines()
    assert lines[0] == "earlier"
    assert [orjson.loads(line)["route"] for line in lines[1:]] == ["first", "second"]


def test_a_line_that_is_made_while_others_are_written_is_not_lost(tmp_path: Path) -> None:
    def wall_s() -> float:
        if len(logs) == 1:
            logs.pop().flush()
        return 0.0

    log = AccessLog(tmp_path / "log", wall_s)
    logs = [log]
    log.add(record("first"))
    log.add(record("second"))
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [orjson.loads(line)["route"] for line in lines] == ["first", "second"]


def test_lines_that_are_added_and_written_at_once_all_get_there(tmp_path: Path) -> None:
    log, over = AccessLog(tmp_path / "log", lambda: 0.0), Event()

    def write() -> None:
        while not over.is_set():
            log.flush()

    writing = Thread(target=write)
    writing.start()
    for _ in range(20_000):
        log.add(record())
    over.set()
    writing.join()
    log.close()
    assert len((tmp_path / "log").read_text().splitlines()) == 20_000


def test_lines_beyond_the_buffer_are_counted_and_the_count_is_written(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log", lambda: 0.0)
    for _ in range(request_log.MAX_LINES + 7):
        log.add(record())
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == request_log.MAX_LINES + 1
    assert orjson.loads(lines[-1])["lost_lines"] == 7


def test_lines_that_cannot_be_written_are_lost_and_nothing_else(tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(pipe, lambda: 0.0)
    os.close(reader)
    for _ in range(3):
        log.add(record())
        log.flush()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log.close()
    assert orjson.loads(os.read(reader, 1 << 16)) == {"time": 0.0, "lost_lines": 3}
    os.close(reader)


def test_the_load_is_that_of_model_calls_since_it_was_taken_the_last_time() -> None:
    metrics = request_log.Metrics(dict)
    for status, began, ended in ((200, 1.0, 3.0), (503, 2.0, 2.5)):
        metrics.count(
            RequestRecord(began=began, ended=ended, api="/v1/chat/completions", status=status, dispatched=2.0)
        )
    metrics.count(RequestRecord(began=0.0, ended=9.0, status=200))
    load = metrics.take_load()
    assert (load.calls, load.failed, load.call_s, load.waited_s) == (2, 1, 2.5, 1.0)
    assert metrics.take_load().calls == 0
