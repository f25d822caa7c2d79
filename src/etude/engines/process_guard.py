"""Runs a command that must not outlive this process: a program of its own, with the standard library only.

    étude ──pipe──▶ guard ──▶ command and all its children, one process group

The pipe closes when the parent process ends for any reason; then, or when the command ends by itself, the guard ends
the whole group. vLLM has three processes, and two of them survive if the first is killed. Exits with the command's
status.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

STOP_S = 5.0
"""Time for the command to clean up."""
POLL_S = 0.1


def main(command: list[str]) -> int:
    """Run ``command`` until it ends or standard input does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.close(sys.stdin.fileno()))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    try:
        while process.poll() is None and not _is_closed():
            pass
        if process.poll() is None:
            process.terminate()
            _wait(process, STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them may have ended by themselves
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _is_closed() -> bool:
    """Report whether the other end of standard input is closed, after waiting for ``POLL_S``."""
    try:
        readable, _, _ = select.select([0], [], [], POLL_S)
        return bool(readable) and os.read(0, 1) == b""
    except OSError:
        return True


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
