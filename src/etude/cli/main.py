"""The command line: arguments in, one module of ``cli/commands`` out, exit codes.

A command's module is imported when the command is called, so that ``etude --help`` needs no torch.
"""

import io
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from etude.errors import EtudeError, ExitCode, InfrastructureError
from etude.storage import FIXES, FULL, fullest, storage_errno

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", "Run the whole loop of a recipe, on this machine or on a fleet."),
        "live": ("live", "Serve users and learn from what they do: `etude run` of a recipe with releases."),
        "check": ("check", "See if a recipe can run here: what `etude run` checks first."),
        "plan": ("plan", "See what a recipe takes of GPUs that need not be here: memory, speed, time, money."),
        "midtrain": ("processes", "One process of a run: mid-training, or one node of it."),
        "sft": ("processes", "One process of a run: supervised fine-tuning, or one node of it."),
        "parity": ("processes", "One process of a run: engine against trainer, before they run."),
        "serve": ("processes", "One process of a run: an engine."),
        "production": ("processes", "One process of a run: an engine for users."),
        "product": ("processes", "One process of a run: the gateway for users."),
        "gateway": ("gateway", "Serve the gateway of a run, or one alone in front of any engines."),
        "rollouts": ("processes", "One process of a run: rollouts and, of replica 0, evaluations."),
        "sinks": ("processes", "Beside a run: feeds trackers and evaluates alerts; by hand, sends what was not sent."),
        "train": ("processes", "One process of a run: the trainer, or one node of it."),
        "release": ("release", "See, approve, propose and take back the versions that users meet."),
        "eval": ("eval", "Try a weight version of a run on the held-out tasks, or compare two."),
        "suite": ("suite", "Try any model at a suite of tasks, compare models, see quality against cost."),
        "show": ("show", "Read the rollouts of a run: an overview, a list, a group, one of them."),
        "ui": ("ui", "Look at runs in a browser: curves, rollouts, weights, users, live."),
        "play": ("play", "Watch the agent of a run play a held-out task, turn by turn, to the verdict."),
        "tinker": ("tinker", "Let programs train a model step by step, over the Tinker API."),
        "chat": ("chat", "Talk with the newest weights, and see which version answered."),
        "doctor": ("doctor", "See what works on this machine or on a fleet, and if engine and trainer agree."),
        "fleet": ("fleet", "Run on many machines: files for their clusters, status, drain."),
        "config": ("config", "Explain the keys of a recipe."),
        "judge": ("judge", "Try the model that grades aspects, and compare it with people."),
        "feedback": ("feedback", "See and delete what is kept of a product's users; one process of a run."),
        "keys": ("keys", "Manage the keys of a gateway; print those of a run."),
        "weights": ("weights", "Look into a weight store, verify it, repair it, take versions out."),
        "tasks": ("tasks", "Make tasks of a repository, verify tasks, list them, export them."),
        "images": ("images", "Manage base systems and images that sandboxes start from."),
        "sandboxes": ("sandboxes", "Lend sandboxes over HTTP; ask one what it looks like."),
    }
)
"""Command → its module in ``cli/commands``, and its line in ``etude --help``."""
COMPLETE = "_ETUDE_COMPLETE"
"""Set by a shell that asks for completions."""
BROKEN_PIPE = 128 + signal.SIGPIPE
"""The exit status of a program whose output is not read on, as by ``head``."""


class LazyGroup(TyperGroup):
    """All commands by name and help alone; the one that is called is imported."""

    def resolve_command(  # its context is of a part of typer that is private
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """The command that is called. Raises a usage error that names those that are like it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else None, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # private likewise
        """Write every command's line, whole."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a command."""
    command = get_command(import_module(f"etude.cli.commands.{COMMANDS[name][0]}").app)
    if isinstance(command, TyperGroup) and name in command.commands:
        command = command.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    command.name = name
    return command


def _print_version(command: bool) -> None:
    if command:
        from importlib.metadata import version as version_of  # a fifth of a start, and needed here alone

        print(f"etude {version_of('etude')}")
        raise typer.Exit


# Plain: rich's import and its tables would take two thirds of the time of `etude --help`.
app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def etude(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train a coding model inside the product that uses it."""


for command_name, (_, line) in COMMANDS.items():
    app.command(command_name, help=line)(lambda: None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors of the user are one line, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of what a terminal cannot show, something is shown
    command, given = get_command(app), list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETE in os.environ:
        command(given, prog_name="etude")  # prints completions and exits
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with command.make_context("etude", given or ["--help"]) as context:
            status = command.invoke(context)
        sys.stdout.flush()
        return int(status or 0)
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return BROKEN_PIPE
        status = _report(error, given)
        if status is not None:
            return status
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(error: Exception, arguments: Sequence[str]) -> int | None:
    """Print the error that ended a command and return its exit status; ``None`` for a bug, which gets a traceback."""
    from etude.dashboard.formatting import visible  # here: it takes a while, and most commands end well

    number = storage_errno(error)
    if number in FULL:
        named = [*(place for place in arguments if Path(place).exists()), getattr(error, "filename", None)]
        folder, free_bytes = fullest([*(Path(place) for place in named if place), Path()])
        _print_if_there_is_room(f"etude: {error}; {folder} has {free_bytes:,} bytes free: {FIXES[number]}")
        return ExitCode.DISK_FULL
    if isinstance(error, EtudeError):
        print(f"etude: {visible(str(error))}", file=sys.stderr)
        return ExitCode.FAILED if isinstance(error, InfrastructureError) else ExitCode.USER_ERROR
    if isinstance(error, typer.TyperException):
        if message := error.format_message():  # empty where help was printed instead
            print(f"etude: {visible(message)}", file=sys.stderr)
        return ExitCode.USER_ERROR
    if isinstance(error, OSError) and number is not None:
        print(f"etude: {visible(str(error))}; {FIXES[number]}", file=sys.stderr)
        return ExitCode.FAILED
    return None


def _print_if_there_is_room(text: str) -> None:
    """Print to the standard error, which may be a file on the very disk that is full; the exit status tells it, too."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what could not be written is not tried again


def _is_stdout_closed() -> bool:
    """True if the reader of our output is gone, and not the other end of a socket; nothing more is printed then."""
    looking = select.poll()
    looking.register(sys.stdout.fileno(), 0)
    if not looking.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _terminate(number: int, frame: FrameType | None) -> None:
    """End a command as Ctrl-C does, by its own clean-up: its processes are stopped, its temporary files removed."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SystemExit(128 + number) from None
    loop.call_soon_threadsafe(sys.exit, 128 + number)  # between two tasks, which are cancelled then
