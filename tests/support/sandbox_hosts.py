"""Real `etude sandboxes serve` processes on the loopback, which are killed, drained and started again."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_until

KEY = "the key of several hosts of a fleet"
VARIABLE = "ETUDE_SANDBOXES_KEY"
LENDING = re.compile(r"lending \w+ sandboxes at (http://127\.0\.0\.1:(\d+))")
START_S = 240.0
"""For a process to import all of étude, on a machine that is busy with others."""


class HostProcess:
    """One host; another one on its port is the same host, started anew."""

    def __init__(self, log: Path, *options: str, port: int = 0) -> None:
        self._log = log
        argv = [sys.executable, "-m", "etude", "sandboxes", "serve", "--port", str(port), *options]
        environment = {**os.environ, VARIABLE: KEY, "ETUDE_IMAGES": str(log.parent / "images")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment)

    def address(self) -> tuple[str, int]:
        """Its URL and port, once it listens."""
        wait_until(lambda: self._match() is not None or not self.is_running, fault=self.text, timeout_s=START_S)
        match = self._match()
        assert match is not None, self.text()
        return match[1], int(match[2])

    @property
    def is_running(self) -> bool:
        """False once its process has ended."""
        return self.process.poll() is None

    def text(self) -> str:
        """All that it printed."""
        return self._log.read_text(encoding="utf-8")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, and wait for that."""
        self.process.send_signal(number)
        self.process.wait(timeout=60)

    def _match(self) -> re.Match[str] | None:
        return LENDING.search(self.text())


@contextmanager
def hosts(folder: Path, count: int, *options: str) -> Iterator[list[HostProcess]]:
    """Start a number of hosts; those still running at the end are stopped."""
    running = [HostProcess(folder / f"host-{number}.log", *options) for number in range(count)]
    try:
        yield running
    finally:
        for host in running:
            if host.is_running:
                host.stop()
