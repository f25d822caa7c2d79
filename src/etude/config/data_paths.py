"""Paths of a recipe's data: files and folders that decide what is learnt, wherever a process of the run is.

A recipe has them as they are on the machine that starts the run. In the ``run.toml`` of a run at a URL, which keeps
copies (:mod:`etude.run.data_copies`), they begin with ``@data/``: below the folder of that file.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from etude.config.imitation import FILE_SOURCES

DATA = "data"
"""Folder of a run with copies of data."""
KEYS = ("tasks.folder", "tasks.options.path", "tasks.options.heldout_path", "model.checkpoint", "sft.file")
"""Keys that name data, beside :data:`MIXTURE`."""
LIMIT_GIB = 64.0
"""Default limit for data per key that a run at a URL copies; `etude run --copy-limit` changes it."""
MIXTURE = "midtrain.mixture"
"""The table whose keys may be ``text:PATH`` and ``chat:PATH``."""


def change_data(tree: dict[str, Any], change: Callable[[str, str], str]) -> None:
    """Replace each path of data in a recipe's plain values by what ``change`` makes of its key and itself; what has
    not the form of one stays.
    """
    for key in KEYS:
        table, name = _table(tree, key)
        if isinstance(table.get(name), str) and table[name]:
            table[name] = change(key, table[name])
    table, name = _table(tree, MIXTURE)
    if isinstance(table.get(name), dict):
        table[name] = {change_source(source, partial(change, MIXTURE)): share for source, share in table[name].items()}


def data_of(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """Key and path of all data that a recipe's plain values name."""
    paths: list[tuple[str, str]] = []

    def note(key: str, path: str) -> str:
        paths.append((key, path))
        return path

    change_data(tree, note)
    return paths


def from_run(path: str, folder: Path) -> str:
    """The whole path of data in a ``run.toml`` that lies in ``folder``; any other path as it is."""
    return str(folder.absolute() / path[1:]) if path.startswith(f"@{DATA}/") else path


def in_run(path: str, folder: Path) -> str:
    """The inverse of :func:`from_run`."""
    place = Path(path)
    whole = folder.absolute()
    return f"@{place.relative_to(whole).as_posix()}" if place.is_relative_to(whole / DATA) else path


def change_source(source: str, change: Callable[[str], str]) -> str:
    """A source of a mixture with its path changed; one that is no file as it is."""
    kind = next((kind for kind in FILE_SOURCES if source.startswith(kind)), "")
    return kind + change(source.removeprefix(kind)) if kind else source


def _table(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *sections, name = key.split(".")
    table: Any = tree
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    return (table if isinstance(table, dict) else {}), name
