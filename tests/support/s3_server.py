"""A server that speaks S3, in a thread of the test.

    GET, HEAD ────────────────────▶ moto
    PUT, POST, DELETE ──one lock──▶ moto

S3 lets one of two writers create a key (``If-None-Match: *``). moto looks for the key and then writes it, with nothing
between the two that keeps another thread out: of 300 keys that eight threads race for, seven have two winners.
"""

from collections.abc import Callable, Iterable
from threading import Lock, Thread
from typing import TYPE_CHECKING, final
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

HOST = "127.0.0.1"


@final
class S3Server:
    """Serves from its creation until ``stop``; ``before`` sees each request and may change it."""

    def __init__(self, port: int = 0, before: Callable[["WSGIEnvironment"], object] | None = None) -> None:
        # These imports take a second, which only the tests with a bucket need.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            """Writes no line for a request: a failed test has thousands."""

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """Write nothing."""

        serve = one_change_at_a_time(DomainDispatcherApplication(create_backend_app), before)
        self._server = make_server(HOST, port, serve, threaded=True, request_handler=Quiet)
        self.port = self._server.server_port
        self.endpoint = f"http://{HOST}:{self.port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def make_bucket(self, name: str = "bucket") -> None:
        with urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=30):
            pass

    def stop(self) -> None:
        """Serve no more and free the port. A second call does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def one_change_at_a_time(
    application: "WSGIApplication", before: Callable[["WSGIEnvironment"], object] | None
) -> "WSGIApplication":
    changes = Lock()

    def serve(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if before:
            before(environ)
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return application(environ, start_response)
        with changes:
            return application(environ, start_response)

    return serve
