"""The command line: arguments in, one module of ``run/`` out, exit codes.

    0  done        1  a process of the run failed        2  the user can fix it        3  finished, nothing learnt
    130  interrupted        143  terminated

Every subcommand imports its own composition when it is called, so that ``etude --help`` needs no torch.
"""

import argparse
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MappingProxyType

from etude.cli import benches, environments, judging, keys, runs, serving, weights
from etude.cli.words import FAILED, INTERRUPTED, USER_ERROR
from etude.errors import EtudeError, InfrastructureError

Command = Callable[[argparse.Namespace], int]
WAYS_OUT: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "make room on that disk and run again",
        errno.EDQUOT: "make room within your quota and run again",
        errno.EIO: "its disk does not read or write; look into the system's log",
        errno.EROFS: "its disk is read-only; mount it to be written to",
    }
)
"""What a machine's storage says when it fails, and what to do; any other system error is a bug of ours."""

UNREAD = 128 + signal.SIGPIPE
"""The exit status of a program whose output nobody reads on, as ``head`` does not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors of the user are one line, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of what a terminal cannot show, something is shown
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    before = signal.signal(signal.SIGTERM, _end)
    try:
        status = command(options)
        sys.stdout.flush()
        return status
    except InfrastructureError as error:
        print(f"etude: {error}", file=sys.stderr)
        return FAILED
    except EtudeError as error:
        print(f"etude: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return UNREAD
        way_out = WAYS_OUT.get(error.errno or 0)
        if way_out is None:
            raise
        print(f"etude: {error}; {way_out}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="etude", description="Train a coding model inside the product that uses it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (runs, keys, serving, weights, environments, judging, benches):
        part.add_commands(commands)
    return parser


def _is_unread() -> bool:
    """Whether whoever read what we print is gone, and not the other end of a socket; then nobody is told any more."""
    looking = select.poll()
    looking.register(sys.stdout.fileno(), 0)
    if not looking.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _end(number: int, frame: FrameType | None) -> None:
    """End a command as Ctrl-C does, by its own ways out: what it started is stopped, what it laid down is removed."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SystemExit(128 + number) from None
    loop.call_soon_threadsafe(sys.exit, 128 + number)  # between two tasks, which are cancelled then
