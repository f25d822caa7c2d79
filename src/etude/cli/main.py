"""The command line: arguments in, one module of ``run/`` out, exit codes.

    0  done          1  a process of the run failed          2  the user can fix it          130  interrupted

Every subcommand imports its own composition when it is called, so that ``etude --help`` needs no torch.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from etude.cli import benches, environments, runs, serving, weights
from etude.cli.words import FAILED, INTERRUPTED, USER_ERROR
from etude.errors import EtudeError, InfrastructureError

Command = Callable[[argparse.Namespace], int]


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
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="etude", description="Train a coding model inside the product that uses it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (runs, serving, weights, environments, benches):
        part.add_commands(commands)
    return parser
