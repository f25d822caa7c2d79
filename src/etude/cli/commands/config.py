"""`etude config`: the keys of a recipe, in the terminal and as the page ``docs/recipe-keys.md``.

Owns the options. :mod:`etude.cli.actions.explain_keys` does the rest.
"""

from typing import Annotated

import typer

from etude.cli.options import group
from etude.errors import ConfigError

app = group()


@app.command()
def config(
    word: Annotated[
        str | None, typer.Argument(help="A section, a key, or a word of its meaning (default: all sections).")
    ] = None,
    *,
    as_page: Annotated[bool, typer.Option("--markdown", help="Print the page docs/recipe-keys.md.")] = False,
) -> None:
    """Explain the keys of a recipe."""
    from etude.cli.actions.explain_keys import explained, markdown, overview
    from etude.config.keys import find, tables

    if as_page:
        print(markdown(tables()), end="")
    elif word is None:
        print("\n".join(overview()))
    elif matches := find(word):
        print("\n".join(explained(matches)))
    else:
        raise ConfigError(f"no key has {word!r} in its name or meaning: `etude config` lists the sections")
