"""``python -m etude.cli.fork_server DESCRIPTOR``: the server that :mod:`etude.run.launchers.fork_server` starts.

    import ──▶ wait ──order──▶ fork ──▶ new session, environment, log, name ──▶ the command, as `etude` runs it
                ▲                │
                └──process id────┘

``DESCRIPTOR`` is the number of the socket on which orders come.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import orjson
from setproctitle import setproctitle

from etude.cli.imports import without_collections
from etude.cli.main import main as run_etude
from etude.errors import ExitCode
from etude.run.launchers.fork_server import MESSAGE_BYTES, ForkOrder
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent

IMPORTED = (
    "etude.cli.commands.gateway",
    "etude.cli.commands.processes",
    "etude.run.engine",
    "etude.run.gateway",
    "etude.run.parity",
    "etude.run.phases",
    "etude.run.rollouts",
    "etude.run.trainer",
)
"""Commands of a run's processes, and the modules that they import when they are called."""


def serve(messages: socket.socket) -> ForkOrder | None:
    """Fork a process for each order. Returns the order in a forked process, and ``None`` once the launcher is gone."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker.fileno())
    with selectors.DefaultSelector() as selector, messages, woken, waker:
        selector.register(messages, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(MESSAGE_BYTES)
                _report_ends(messages)
            if messages in ready:
                message = messages.recv(MESSAGE_BYTES)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return ForkOrder(**orjson.loads(message))
                messages.send(orjson.dumps((pid, None)))


def _report_ends(messages: socket.socket) -> None:
    """Report the exit status of each forked process that has ended."""
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            messages.send(orjson.dumps((pid, os.waitstatus_to_exitcode(wait_status))))


def become(order: ForkOrder, server: int) -> None:
    """Give this forked process its session, environment, output and name. It ends with the ``server`` of this id."""
    os.setsid()
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update({**order.environment, SUPERVISOR_VARIABLE: str(server)})
    die_with_parent(signal.SIGKILL)
    os.chdir(order.folder)
    if not sys.flags.safe_path:
        sys.path[0] = order.folder  # as `python -m etude` has it
    sys.argv = ["etude", *order.arguments]
    setproctitle(" ".join((sys.executable, "-m", *sys.argv)))


def run_and_exit(arguments: Sequence[str]) -> NoReturn:
    """Run a command and exit with its status, without freeing each object, which takes seconds after these imports."""
    try:
        status: object = run_etude(arguments)
    except SystemExit as end:
        status = end.code
    except Exception:  # noqa: BLE001 - a bug, whose traceback is the last output
        traceback.print_exc()
        status = ExitCode.FAILED
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = ExitCode.FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status if isinstance(status, int) else ExitCode.DONE)


def main() -> None:
    """Import, then fork until the launcher is gone; in a forked process, run its command."""
    setproctitle(f"{sys.executable} -m etude: fork server")  # the first call finds the memory of names in `os.environ`
    with without_collections():  # in a forked process they would also copy every page that they mark
        for module in IMPORTED:
            import_module(module)
        gc.collect()
    server = os.getpid()
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        os._exit(ExitCode.DONE)
    become(order, server)
    run_and_exit(order.arguments)


if __name__ == "__main__":
    main()
