"""The page's server in a process of its own, and the browser that it is looked at with."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.ui.page import TOKEN_VARIABLE

CHROMIUM = "/usr/bin/chromium"
"""Debian's."""


@contextmanager
def serving(*places: Path) -> Iterator[tuple[int, str]]:
    """`etude ui` of some runs while the context is open: its process, and its URL."""
    environment = os.environ | {TOKEN_VARIABLE: secrets.token_urlsafe(8)}
    command = [sys.executable, "-m", "etude", "ui", *map(str, places)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.pid, server.stdout.readline().strip()
        finally:
            server.terminate()
