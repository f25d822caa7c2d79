"""The command line: arguments in, one module of ``run/`` out, exit codes.

    0  done        1  a process of the run failed        2  the user can fix it        3  finished, nothing learnt
    4  a disk is full        130  interrupted        143  terminated

Every subcommand imports its own composition when it is called, so that ``etude --help`` needs no torch.
"""

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from etude.cli import judge, keys, runs, serving, tasks, weights
from etude.cli.options import DISK_FULL, FAILED, INTERRUPTED, USER_ERROR
from etude.errors import EtudeError, InfrastructureError
from etude.storage import FIXES, FULL, fullest, storage_errno

Command = Callable[[argparse.Namespace], int]

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
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return UNREAD
        told = _tell(error, options)
        if told is not None:
            return told
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="etude", description="Train a coding model inside the product that uses it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (runs, keys, serving, weights, tasks, judge):
        part.add_commands(commands)
    return parser


def _tell(error: Exception, options: argparse.Namespace) -> int | None:
    """Say what a command ended with and return its exit status; ``None`` for a bug, whose traceback is wanted."""
    number = storage_errno(error)
    if number in FULL:
        named = [*(vars(options).get(name) for name in ("run", "resume", "out")), getattr(error, "filename", None)]
        folder, free_bytes = fullest([*(Path(place) for place in named if place), Path()])
        _print_if_there_is_room(f"etude: {error}; {folder} has {free_bytes:,} bytes free: {FIXES[number]}")
        return DISK_FULL
    if isinstance(error, EtudeError):
        print(f"etude: {error}", file=sys.stderr)
        return FAILED if isinstance(error, InfrastructureError) else USER_ERROR
    if isinstance(error, OSError) and number is not None:
        print(f"etude: {error}; {FIXES[number]}", file=sys.stderr)
        return FAILED
    return None


def _print_if_there_is_room(words: str) -> None:
    """Print to the standard error, which may be a file on the very disk that is full; the exit status tells it, too."""
    try:
        print(words, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what could not be written is not tried again


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
