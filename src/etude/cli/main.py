"""The command line: finds the module of a command in ``cli/commands``, runs it, and returns its exit status.

A command's module is imported only when the command is called. It owns the options; the modules of ``cli/actions`` do
the work, and are imported once the options are right, so that no help imports torch.
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

from etude.cli.imports import without_collections
from etude.errors import EtudeError, ExitCode, InfrastructureError
from etude.storage import FIXES, FULL, fullest, storage_errno

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", "Run the whole loop of a recipe, on this machine or on a fleet."),
        "live": ("live", "Serve users and learn from what they do: `etude run` of a recipe with releases."),
        "check": ("check", "Check whether a recipe can run here, as `etude run` does first."),
        "plan": ("plan", "Predict memory, speed, time and cost of a recipe, also for GPUs that you do not have."),
        "midtrain": ("processes", "One process of a run: mid-training, or one node of it."),
        "sft": ("processes", "One process of a run: supervised fine-tuning, or one node of it."),
        "parity": ("processes", "One process of a run: compares engine and trainer before they start."),
        "serve": ("processes", "One process of a run: an engine."),
        "production": ("processes", "One process of a run: an engine for users."),
        "product": ("processes", "One process of a run: the gateway for users."),
        "gateway": ("gateway", "Serve the gateway of a run, or a gateway without a run in front of your engines."),
        "rollouts": ("processes", "One process of a run: rollouts; replica 0 also runs evaluations."),
        "sinks": ("processes", "Send a run's metrics to trackers and evaluate its alerts."),
        "train": ("processes", "One process of a run: the trainer, or one node of it."),
        "release": ("release", "Show, approve, propose and roll back the weight versions that users get."),
        "eval": ("eval", "Evaluate a weight version of a run on the held-out tasks, or compare two."),
        "suite": ("suite", "Evaluate any model on a suite of tasks, compare models and their cost; build suites."),
        "show": ("show", "Show the rollouts of a run: an overview, a list, a group, or a single rollout."),
        "ui": ("ui", "Look at runs in a browser: curves, rollouts, weights, users, live."),
        "play": ("play", "Watch the agent of a run solve a held-out task, turn by turn, until it is graded."),
        "tinker": ("tinker", "Let programs train a model step by step, over the Tinker API."),
        "chat": ("chat", "Chat with the newest weights, and see which version answered."),
        "doctor": ("doctor", "Check what works on this machine or fleet, and whether engine and trainer agree."),
        "fleet": ("fleet", "Run on many machines: write files for clusters, change a fleet, show it, drain it."),
        "config": ("config", "Explain the keys of a recipe."),
        "judge": ("judge", "Test the model that grades aspects of rollouts, and compare it with people."),
        "feedback": ("feedback", "Show, export and delete stored data of a product's users; one process of a run."),
        "keys": ("keys", "Manage the API keys of a gateway, and print the keys of a run."),
        "weights": ("weights", "List, verify, repair, export and copy the weight versions of a store."),
        "tasks": ("tasks", "Build tasks from a repository; verify, list and export tasks."),
        "images": ("images", "Manage the base systems and images that sandboxes start from."),
        "sandboxes": ("sandboxes", "Serve this machine's sandboxes over HTTP, drain a server, describe a sandbox."),
    }
)
"""Command → its module in ``cli/commands``, and its line in ``etude --help``."""
COMPLETE = "_ETUDE_COMPLETE"
"""Variable of the environment that a shell sets to ask for completions."""
BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit status of a program whose reader, such as ``head``, has closed the pipe."""


class LazyGroup(TyperGroup):
    """All commands by name and help line; only the command that is called is imported."""

    def resolve_command(  # its context is of a part of typer that is private
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """Return the command that is called. Raises a usage error that suggests similar names."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else None, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # private likewise
        """Write the help line of every command without shortening it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a command."""
    with without_collections():
        module = import_module(f"etude.cli.commands.{COMMANDS[name][0]}")
    command = get_command(module.app)
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
    """Run one command and return its exit status; a user's error is printed as one line, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that a terminal cannot show
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
    """Print to stderr, which may itself be a file on the full disk; the exit status says it as well."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # so that no later flush fails


def _is_stdout_closed() -> bool:
    """True if the reader of stdout is gone, rather than the other end of a socket; then stdout is discarded."""
    looking = select.poll()
    looking.register(sys.stdout.fileno(), 0)
    if not looking.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _terminate(number: int, frame: FrameType | None) -> None:
    """End a command as Ctrl-C does, with its clean-up: its processes are stopped, its temporary files removed."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SystemExit(128 + number) from None
    loop.call_soon_threadsafe(sys.exit, 128 + number)  # between two tasks, which are cancelled then
