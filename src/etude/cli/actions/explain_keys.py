"""The text of `etude config`: keys of a recipe for the terminal, and the page ``docs/recipe-keys.md``."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from etude.config.keys import RecipeKey, Table, count_keys, tables

MAX_WIDTH = 100
"""Most columns of the terminal that are used; longer lines are hard to read."""
PAGE_HEAD = """# Keys of a recipe

{} keys, and {} options that belong to one family or kind; any other refuses them. A key without a default is required.
`--set SECTION.KEY=VALUE` overrides a recipe for one run, and `etude run RECIPE --dry-run` prints the resolved recipe.
In the terminal, `etude config SECTION` explains the keys of a section, and `etude config WORD` the keys whose name or
meaning contains a word. `etude config --markdown` prints this page; a test compares the two.
"""


def markdown(every: Iterable[Table]) -> str:
    """The page: a table for each section. Its lines are as long as what they say."""
    lines = [PAGE_HEAD.format(*count_keys())]
    for table in every:
        if table.title:
            lines += [f"## `{table.title}`", "", table.meaning, ""]
        if table.keys:
            lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
            lines += [f"| {' | '.join(map(_cell, _columns(key)))} |" for key in table.keys]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _columns(key: RecipeKey) -> tuple[str, str, str, str]:
    name = key.path.rpartition(".")[2]
    return f"`{name}`", key.takes, f"`{key.default}`" if key.default else "", key.meaning


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def overview() -> Iterator[str]:
    """Yield the lines of all sections, each with the first sentence of its meaning."""
    every = list(tables())
    yield from (f"{key.path:<18}{_first_sentence(key.meaning)}" for table in every[:1] for key in table.keys)
    yield from (f"{table.title:<18}{_first_sentence(table.meaning)}" for table in every[1:])
    yield ""
    yield "etude config SECTION explains the keys of a section, etude config WORD those that contain a word."
    yield "etude run RECIPE --dry-run prints the resolved recipe."


def _first_sentence(text: str) -> str:
    return textwrap.shorten(re.split(r"(?<=\.)\s", text)[0], MAX_WIDTH - 18, placeholder=" …")


def explained(every: Iterable[Table]) -> Iterator[str]:
    """Yield the lines that explain some keys with their types, defaults and meanings."""
    for number, table in enumerate(every):
        if number:
            yield ""
        if table.title:
            yield from _wrapped(f"{table.title} {table.meaning}", "")
        for key in table.keys:
            yield ""
            yield f"{key.path} = {key.default}" if key.default else f"{key.path} (required)"
            yield from _wrapped(key.takes, "    ")
            yield from _wrapped(key.meaning, "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)
