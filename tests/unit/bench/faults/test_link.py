"""A link forwards everything without a fault, and with a fault does what the fault says, on that link only."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.faults.link import HOST, STATUSES, Link, Weather
from waiting import WAIT_S

BODY = b"x" * 200_000


class Echo(BaseHTTPRequestHandler):
    """Returns the body of each request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def link() -> Iterator[Link]:
    server = ThreadingHTTPServer((HOST, 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with Link() as link:
        link.target = server.server_address[1]
        yield link
    server.shutdown()
    thread.join()
    server.server_close()


class Caller:
    """One connection to a link."""

    def __init__(self, link: Link) -> None:
        self.connection = http.client.HTTPConnection(HOST, link.port, timeout=WAIT_S)

    def ask(self) -> tuple[int, bytes]:
        self.connection.request("POST", "/", BODY)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture
def call(link: Link) -> Iterator[Callable[[], Caller]]:
    """Makes connections, which are closed at the end."""
    with ExitStack() as stack:

        def connect() -> Caller:
            caller = Caller(link)
            stack.callback(caller.connection.close)
            return caller

        yield connect


Call = Callable[[], Caller]


def test_bytes_pass_both_ways_again_and_again(call: Call) -> None:
    caller = call()
    assert [caller.ask() for _ in range(3)] == [(200, BODY)] * 3


@pytest.mark.parametrize(("pick", "status"), [(0.0, STATUSES[0]), (0.99, STATUSES[-1])])
def test_requests_are_refused_on_old_connections_and_new_ones(link: Link, call: Call, pick: float, status: int) -> None:
    old = call()
    assert old.ask() == (200, BODY)
    with link.disturbed(Weather.REFUSING, pick):
        assert old.ask() == (status, b"")
        assert call().ask() == (status, b"")
    assert call().ask() == (200, BODY)


def test_connections_break_and_come_back(link: Link, call: Call) -> None:
    old = call()
    assert old.ask() == (200, BODY)
    with link.disturbed(Weather.BREAKING):
        for caller in (old, call()):
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                caller.ask()
    assert call().ask() == (200, BODY)


def test_what_is_stalled_comes_late_and_whole(link: Link, call: Call) -> None:
    answers: list[tuple[int, bytes]] = []
    asking = threading.Thread(target=lambda: answers.append(call().ask()))
    with link.disturbed(Weather.STALLING):
        asking.start()
        time.sleep(0.2)
        assert not answers
    asking.join(WAIT_S)
    assert answers == [(200, BODY)]


def test_a_server_that_is_not_there_is_a_broken_connection(link: Link, call: Call) -> None:
    link.target = 1
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        call().ask()
