"""A small HTTP server that stores posted bodies: a webhook, or a collector of traces."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def receiver(
    statuses: Sequence[int] = (200,), *, port: int = 0, location: str = ""
) -> Iterator[tuple[str, list[Posted]]]:
    """A server that answers with these statuses, from the last one on always with that; its URL, and what came.

    ``location`` is where a redirect leads; a ``GET`` there succeeds.
    """
    received: list[Posted] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(Posted(path=self.path, headers=dict(self.headers), body=body))
            self.send_response(statuses[min(len(received), len(statuses)) - 1])
            self.send_header("Content-Length", "0")
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
