"""The command line: arguments in, one module of ``run/`` out, exit codes.

    0  done          1  a process of the run failed          2  the user can fix it          130  interrupted

Every subcommand imports its own composition when it is called, so that ``etude --help`` needs no torch.
"""

import argparse
import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from etude.cli import benches, environments, judging, runs, serving, weights
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors of the user are one line, never a traceback."""
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except InfrastructureError as error:
        print(f"etude: {error}", file=sys.stderr)
        return FAILED
    except EtudeError as error:
        print(f"etude: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        way_out = WAYS_OUT.get(error.errno or 0)
        if way_out is None:
            raise
        print(f"etude: {error}; {way_out}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="etude", description="Train a coding model inside the product that uses it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (runs, serving, weights, environments, judging, benches):
        part.add_commands(commands)
    return parser
