"""Measures a link from inside its sites: round-trip time and TCP throughput, to say what the emulation really gives.

    python -m bench.sync.link_probe serve ADDRESS
    python -m bench.sync.link_probe measure ADDRESS CONNECTIONS SECONDS        prints one JSON object

The throughput is that of bytes which arrived and were read, towards the server, between the end of slow start and the
end of the measurement.
"""

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Protocol

from bench.sync.wan import Wan
from etude.errors import InfrastructureError

PORT = 7077
PINGS = 7
BLOCK_BYTES = 1 << 18
WARM_UP_S = 1.5
"""Not counted: slow start at 80 ms takes about a second."""
START_S = 60.0
ECHO, SINK = b"e", b"s"
"""First byte of a connection: send back what comes, or count it and tell when asked by a new connection."""
COUNT = b"c"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """Measurements of one pair of sites."""

    rtt_s: float
    """Median of small messages there and back, on an idle link."""
    bits_per_s: float
    """Payload that arrived."""
    connections: int
    congestion: str
    """TCP congestion control of the sender."""


def measure_link(wan: Wan, source: str, target: str, *, connections: int, seconds: float) -> LinkMeasurement:
    """Measure from ``source`` to ``target``. Raises :class:`~etude.errors.InfrastructureError`."""
    this, address = (sys.executable, "-m", __name__), wan.address(target)
    server = wan.popen(target, [*this, "serve", address])
    try:
        client = wan.popen(source, [*this, "measure", address, str(connections), str(seconds)], stdout=subprocess.PIPE)
        printed, _ = client.communicate(timeout=START_S + 2 * (WARM_UP_S + seconds))
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"the link {source} → {target} could not be measured in {error.timeout} s") from error
    finally:
        server.kill()
        server.wait()
    if client.returncode:
        raise InfrastructureError(f"measuring the link {source} → {target} failed; see standard error")
    return LinkMeasurement(**json.loads(printed))


class _Counter(Protocol):
    """Bytes that sinks have read so far."""

    def __call__(self) -> int: ...


def serve(address: str) -> None:
    """Answer probes until killed."""
    received: list[int] = []
    with socket.create_server((address, PORT), backlog=256) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, received, lambda: sum(received)), daemon=True).start()


def measure(address: str, connections: int, seconds: float) -> LinkMeasurement:
    """Probe the server at ``address``."""
    rtt_s = round_trip_s(address)
    stop = threading.Event()
    pumps = [threading.Thread(target=_pump, args=(address, stop), daemon=True) for _ in range(connections)]
    with _connect(address, COUNT) as counter:
        for pump in pumps:
            pump.start()
        time.sleep(WARM_UP_S)
        started_s, before = time.monotonic(), _count(counter)
        time.sleep(seconds)
        size_bytes = _count(counter) - before
        passed_s = time.monotonic() - started_s
        congestion = counter.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    stop.set()
    return LinkMeasurement(
        rtt_s=rtt_s, bits_per_s=8 * size_bytes / passed_s, connections=connections, congestion=congestion
    )


def _connect(address: str, kind: bytes) -> socket.socket:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=START_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(kind)
        return connection


def _answer(connection: socket.socket, received: list[int], total: _Counter) -> None:
    with connection:
        kind = connection.recv(1)
        buffer = bytearray(BLOCK_BYTES)
        while size := connection.recv_into(buffer):
            if kind == ECHO:
                connection.sendall(buffer[:size])
            elif kind == COUNT:
                connection.sendall(total().to_bytes(8, "little"))
            else:
                received.append(size)


def round_trip_s(address: str) -> float:
    """Median time of small messages to the server at ``address`` and back."""
    with _connect(address, ECHO) as connection:
        times_s: list[float] = []
        for _ in range(PINGS):
            started_s = time.monotonic()
            connection.sendall(b"?")
            connection.recv(1)
            times_s.append(time.monotonic() - started_s)
    return statistics.median(times_s)


def _count(counter: socket.socket) -> int:
    counter.sendall(b"?")
    return int.from_bytes(counter.recv(8), "little")


def _pump(address: str, stop: threading.Event) -> None:
    block = bytes(BLOCK_BYTES)
    with _connect(address, SINK) as connection:
        while not stop.is_set():
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        result = measure(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        sys.stdout.write(json.dumps(asdict(result)))
