"""Pages of the site that are read from the code when it is built: command line, public API, events and metrics."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

import etude
from etude.cli.main import COMMANDS, load
from etude.telemetry.events import Event
from etude.telemetry.metrics import METRICS

MODULES = (
    ("etude.protocols", "The seams: what may be replaced"),
    ("etude.types", "The nouns"),
    ("etude.sandbox_spec", "What a sandbox is made from"),
    ("etude.errors", "Errors and exit codes"),
)
"""Modules that code of one's own meets, beside ``import etude``."""
FIELD_DOC = re.compile(r'^    (\w+): [^\n]+\n    """(.*?)"""', re.MULTILINE | re.DOTALL)


def pages() -> Mapping[str, str]:
    """Path of the site → Markdown."""
    return {
        "reference/command-line.md": "\n".join(_command_line()),
        "reference/python.md": "\n".join(_python()),
        "reference/events.md": "\n".join(_events()),
    }


def _command_line() -> Iterator[str]:
    yield "# Command line\n\n`etude COMMAND --help` says the same in a terminal. Exit codes are those of `ExitCode`.\n"
    for name in COMMANDS:
        yield from _command(f"etude {name}", load(name))


def _command(name: str, command: TyperCommand | TyperGroup) -> Iterator[str]:
    if command.hidden:
        return
    yield f"## `{name}`\n\n{inspect.cleandoc(command.help or COMMANDS[name.split()[1]][1])}\n"
    rows = [row for parameter in command.params if (row := _parameter(parameter))]
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""])
    if isinstance(command, TyperGroup):
        for inner_name, inner in command.commands.items():
            yield from _command(f"{name} {inner_name}", inner)  # type: ignore[arg-type]


def _parameter(parameter: Any) -> str:  # a class of typer's that is private
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
    shown = names if is_option else f"`{(parameter.metavar or parameter.name).upper()}`"
    needed = " Required." if is_option and parameter.required else ""
    return f"| {shown} | {cell(parameter.help or '')}{needed} |"


def _python() -> Iterator[str]:
    yield "# Python\n\nWhat `import etude` gives, and the modules that code of your own meets. A walk through it: "
    yield "[étude from Python](../python.md); classes named in a recipe: [extending](../extending.md).\n"
    for name in etude.__all__:
        public = getattr(etude, name)
        yield f"::: {public.__module__}.{public.__qualname__}\n"
    for module, title in MODULES:
        yield f"## {title}\n\n::: {module}\n    options:\n      heading_level: 3\n"


def _events() -> Iterator[str]:
    yield "# Events and metrics\n"
    yield "Each process of a run writes one JSON object per line into `events/PROCESS.jsonl`: the time, the name of the"
    yield "event and its fields. [Trackers](../trackers.md) get the same.\n"
    for event in get_args(Event):
        documented = dict(FIELD_DOC.findall(inspect.getsource(event)))
        yield f"## `{event.__name__}`\n\n{plain(inspect.getdoc(event) or '')}\n"
        yield "| field | type | meaning |\n|---|---|---|"
        for field in fields(event):
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            yield f"| `{field.name}` | `{cell(str(kind))}` | {cell(documented.get(field.name, ''))} |"
        yield ""
    yield "## Metrics of a step\n\nThe names in `StepDone.metrics`, in `report.json` (`curve`) and in trackers.\n"
    yield "| metric | unit | meaning |\n|---|---|---|"
    for name, metric in METRICS.items():
        yield f"| `{name}` | {cell(metric.unit)} | {cell(metric.title)} |"


def cell(text: str) -> str:
    """A docstring's words in a cell of a table."""
    return plain(text).replace("|", "\\|").replace("\n", " ")


def plain(text: str) -> str:
    """A docstring as Markdown: its roles are names in code."""
    return re.sub(r":\w+:`~?(?:[\w]+\.)*(\w+)`", r"`\1`", re.sub(r"``", "`", inspect.cleandoc(text)))
