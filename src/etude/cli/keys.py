"""``etude config``: what a recipe may say, in the terminal and as the page ``docs/recipe-keys.md``."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from etude.cli.options import Commands
from etude.config.keys import Key, Table, find, tables
from etude.errors import ConfigError

MAX_WIDTH = 100
"""Columns of the terminal that are used; longer lines are tiring."""
PAGE_HEAD = """# Keys of a recipe

All that a recipe may say, section by section; a key without a default has to be there. `--set SECTION.KEY=VALUE`
overrides a recipe for one run, and `etude run RECIPE --dry-run` prints what one comes to. In the terminal, `etude
config SECTION` explains the keys of a section and `etude config WORD` those that speak of something. This page is what
`etude config --markdown` prints; a test holds it to that.
"""


def add_commands(commands: Commands) -> None:
    """Add ``etude config``."""
    config = commands.add_parser("config", help="what a recipe may say: its sections, their keys, a word's")
    config.add_argument("word", nargs="?", help="a section, a key, or what keys speak of (default: all sections)")
    config.add_argument("--markdown", action="store_true", help="print the page docs/recipe-keys.md")
    config.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> int:
    if options.markdown:
        print(markdown(tables()), end="")
    elif options.word is None:
        print("\n".join(_overview()))
    else:
        found = find(options.word)
        if not found:
            raise ConfigError(f"no key is named or speaks of {options.word!r}: etude config lists the sections")
        print("\n".join(_explained(found)))
    return 0


def markdown(every: Iterable[Table]) -> str:
    """The page: a table for each section. Its lines are as long as what they say."""
    lines = [PAGE_HEAD]
    for table in every:
        if table.title:
            lines += [f"## `{table.title}`", "", table.meaning, ""]
        if table.keys:
            lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
            lines += [f"| {' | '.join(map(_cell, _columns(key)))} |" for key in table.keys]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _columns(key: Key) -> tuple[str, str, str, str]:
    name = key.path.rpartition(".")[2]
    return f"`{name}`", key.takes, f"`{key.default}`" if key.default else "", key.meaning


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _overview() -> Iterator[str]:
    every = list(tables())
    yield from (f"{key.path:<18}{_first_sentence(key.meaning)}" for table in every[:1] for key in table.keys)
    yield from (f"{table.title:<18}{_first_sentence(table.meaning)}" for table in every[1:])
    yield ""
    yield "etude config SECTION explains its keys, etude config WORD those that speak of something."
    yield "etude run RECIPE --dry-run prints what a recipe comes to."


def _first_sentence(text: str) -> str:
    return textwrap.shorten(re.split(r"(?<=\.)\s", text)[0], MAX_WIDTH - 18, placeholder=" …")


def _explained(found: Iterable[Table]) -> Iterator[str]:
    for number, table in enumerate(found):
        if number:
            yield ""
        if table.title:
            yield from _wrapped(f"{table.title} {table.meaning}", "")
        for key in table.keys:
            yield ""
            yield f"{key.path} = {key.default}" if key.default else f"{key.path}, which has to be there"
            yield from _wrapped(key.takes, "    ")
            yield from _wrapped(key.meaning, "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)
