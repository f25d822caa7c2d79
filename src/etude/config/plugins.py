"""Classes and functions that a recipe names: étude's own and anybody's.

    "bugfix"                a built-in name, a row of the table of its choice
    "acme"                  an entry point of the group ``etude.plugins`` of an installed package
    "acme.tasks:AcmeTasks"  anything that can be imported
    "@env.py:MyTasks"       a file beside the recipe, of which a run keeps a copy that is named by its digest

Rows are strings, so that a recipe is read without what the built-ins need. Owns names and imports; how the thing is
made and used is its user's affair.
"""

import difflib
import hashlib
import importlib
import importlib.util
import operator
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import cast

from etude.errors import ConfigError, EtudeError
from etude.fsync import write_whole

GROUP = "etude.plugins"
"""Group of entry points by which installed packages give short names."""
PLUGINS = "plugins"
"""Folder of a run with copies of the files that its recipe names."""
DIGITS = 12
"""Hexadecimal digits of a file's SHA-256 in the name of its copy."""
FILE = re.compile(r"@(?P<path>.+\.py):(?P<name>[\w.]+)")
"""A name in a file, ``@env.py:MyTasks``."""


@dataclass(frozen=True)
class Registry:
    """The names that one key takes; as a validator it refuses all others."""

    key: str
    """``tasks.family``."""
    noun: str
    """Noun of the thing that is named: ``task family``."""
    builtins: Mapping[str, str]
    """Built-in name → ``module:Name``."""

    def __call__(self, name: str) -> str:
        """``name``, if it is built in or can be found. Raises ``ValueError``."""
        if name not in self.builtins:
            self.find(name)
        return name

    def find(self, name: str) -> object:
        """The class or function of a name. Raises ``ValueError`` for one that is unknown or cannot be imported."""
        place = self.builtins.get(name) or entry_point(name) or name
        if ":" not in place:
            near = difflib.get_close_matches(name, self.builtins, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{self.key} = {name!r} is no {self.noun}: {meant}Expected {', '.join(map(repr, self.builtins))}, "
                f"'package.module:Name', '@file.py:Name' beside the recipe, or an entry point of {GROUP!r}"
            )
        return load(place, f"{self.key} = {name!r}")

    def make(self, name: str, *arguments: object) -> object:
        """Call the class or function of a name, and return what it makes of ``arguments``.

        Raises ``ValueError`` as :meth:`find` does, and :class:`~etude.errors.ConfigError`, with the line of their code,
        for whatever goes wrong in one that is not built in.
        """
        maker = cast("Callable[..., object]", self.find(name))
        if name in self.builtins:
            return maker(*arguments)
        try:
            return maker(*arguments)
        except EtudeError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.key} = {portable(name)!r} cannot be made: {_last_line(error)}") from error


def load(place: str, where: str) -> object:
    """Import the thing that ``module:Name`` or ``@file.py:Name`` stands for.

    Raises ``ValueError``, which begins with ``where``, with the last line of the traceback if the import fails.
    """
    module_name, _, name = place.rpartition(":")
    try:
        if module_name.startswith("@"):
            module = _module_of(Path(module_name[1:]))
        else:
            module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{where} cannot be imported: {_last_line(error)}") from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(name, vars(module), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: there is no {name!r} in {module.__file__}{meant}") from None


def portable(name: str) -> str:
    """``name`` without the folder of its file: the same wherever the run lies."""
    match = FILE.fullmatch(name)
    return f"@{Path(match['path']).name}:{match['name']}" if match else name


def absolute(name: str, folder: Path) -> str:
    """``name``, where it is of a file, with the whole path of that: relative ones are beside a recipe in ``folder``."""
    match = FILE.fullmatch(name)
    return f"@{(folder / match['path']).absolute()}:{match['name']}" if match else name


def keep(name: str, folder: Path) -> str:
    """Copy the file of a ``name`` into a run's ``folder``, and return its name from there; any other name is returned
    as it is.
    """
    match = FILE.fullmatch(name)
    if not match:
        return name
    source = Path(match["path"])
    data = source.read_bytes()
    copy = folder / PLUGINS / f"{source.stem.partition('.')[0]}.{_digest(data)}.py"
    copy.parent.mkdir(exist_ok=True)
    write_whole(copy, data)
    return f"@{PLUGINS}/{copy.name}:{match['name']}"


def entry_point(name: str) -> str:
    """The ``module:Name`` to which an installed package gave a short name; empty if none did."""
    return next((point.value for point in entry_points(group=GROUP, name=name)), "")


def _module_of(file: Path) -> ModuleType:
    """The module in a file, imported once in a process. Raises ``ValueError`` for a run's copy that was changed."""
    digest, (stem, _, expected) = _digest(file.read_bytes()), file.stem.partition(".")
    if expected and expected != digest:
        raise ValueError(f"{file} was changed since the run began: put it back, or start another run")
    name = f"etude_plugin_{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def _last_line(error: Exception) -> str:
    """The last line of a traceback, and where in somebody's own code that is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    line = traceback.format_exception_only(error)[-1].strip()
    return f"{line} ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else line
