"""Recipes, fleets and suites from files, and back; all faults of one are told at once: the key, the value, the fix."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from etude.config import plugins
from etude.config.data_paths import change_data, from_run, in_run
from etude.config.fleet import FleetConfig
from etude.config.keys import suggestion
from etude.config.log import spell_out
from etude.config.recipe import RunConfig
from etude.config.renamed import drop_removed_keys, renamed
from etude.config.section import Section
from etude.config.suite import SUITE_FILE, SuiteFile
from etude.config.tasks import FOLDER_FAMILIES
from etude.errors import ConfigError

Whole = TypeVar("Whole", RunConfig, FleetConfig, SuiteFile)

RUN_FILE = "run.toml"
"""A recipe's file, in a folder that bears its name."""
SHIPPED = f"share/etude/recipes/*/{RUN_FILE}"
"""Files of an installation that are recipes."""
FILE_TABLES = (("harness", "options", "files"), ("judge", "rubrics"), ("judge", "calibrations"))
"""Paths of tables whose texts may lie in files beside the recipe."""
EVERY = "*"
"""Stands for every key of a table."""
NAMES = (
    ("tasks", "family"),
    ("tasks", "graders", EVERY),
    ("reward", "parts", "source"),
    ("log", "to", "kind"),
    ("loss", "kind"),
    ("loss", "baseline"),
    ("harness", "kind"),
    ("sandboxes", "kind"),
    ("engine", "kind"),
)
"""Paths of keys that name a class or a function, which may be in a file beside the recipe; of arrays, each table's."""


def is_recipe(path: Path) -> bool:
    """Return whether a path is that of a recipe: a TOML file, or a folder with ``run.toml``."""
    return path.suffix == ".toml" or (path / RUN_FILE).is_file()


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with étude, by name: in a checkout those of ``recipes/``, else those that the wheel has."""
    checkout = Path(__file__).parents[3] / "recipes"
    try:
        installed = [Path(file.locate()) for file in distribution("etude").files or () if file.match(SHIPPED)]
    except PackageNotFoundError:
        installed = []
    return {file.parent.name: file for file in sorted([*installed, *checkout.glob(f"*/{RUN_FILE}")])}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, as :func:`read_tree` finds it, and apply ``section.key=value`` overrides in order.

    Raises :class:`~etude.errors.ConfigError` naming the key, the value and the fix.
    """
    tree, file = read_tree(path, overrides)
    changed = [override.partition("=")[0] for override in overrides]  # a value may be secret
    return parse_config(tree, source=" --set ".join([str(file), *changed]))


def read_tree(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Path]:
    """Read the plain values of a recipe, not yet checked, and name its file; texts that lie in files are read, too.

    ``path`` is a TOML file, a folder with ``run.toml``, or the name of a recipe that comes with étude.

    Raises :class:`~etude.errors.ConfigError`.
    """
    file = path / RUN_FILE if path.is_dir() else path
    if not file.is_file() and path.name == str(path):
        file = shipped_recipes().get(path.name, file)
    if not file.is_file():
        names = ", ".join(shipped_recipes())
        raise ConfigError(
            f"no recipe at {str(path)!r}: expected a TOML file, a folder with {RUN_FILE} in it, or a name of {names}"
        )
    tree = read_toml(file)
    for override in overrides:
        apply_override(tree, override)
    _read_files(tree, file)
    if isinstance(log := tree.get("log"), dict) and "to" in log:
        log["to"] = spell_out(log["to"])
    _change_names(tree, lambda name: plugins.absolute(name, file.parent))
    change_data(tree, lambda _, path: from_run(path, file.parent))
    return tree, file


def default_recipe(overrides: Sequence[str] = ()) -> RunConfig:
    """The defaults with ``section.key=value`` overrides. Raises like :func:`load_recipe`."""
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, source="--set")


def parse_config(tree: Mapping[str, Any], *, source: str) -> RunConfig:
    """Check a tree of plain values. Raises :class:`~etude.errors.ConfigError` with every fault found."""
    return _parse(drop_removed_keys(tree), RunConfig, source=source)


def load_fleet(path: Path) -> FleetConfig:
    """Read a fleet. Raises :class:`~etude.errors.ConfigError` naming the key, the value and the fix."""
    if not path.is_file():
        raise ConfigError(f"no fleet at {str(path)!r}: expected a TOML file; examples/fleet has some to begin with")
    tree = read_toml(path)
    if isinstance(tree.get("launcher"), str):
        tree["launcher"] = plugins.absolute(tree["launcher"], path.parent)
    return _parse(tree, FleetConfig, source=str(path))


def load_suite(folder: Path) -> SuiteFile:
    """Read the ``suite.toml`` of a folder, whose tasks lie in that folder unless it names another one.

    Raises :class:`~etude.errors.ConfigError` naming the key, the value and the fix.
    """
    file = folder / SUITE_FILE
    if not file.is_file():
        raise ConfigError(f"no suite at {str(folder)!r}: expected a folder with {SUITE_FILE} in it")
    tree = read_toml(file)
    _read_files(tree, file)
    tasks = tree.get("tasks")
    if isinstance(tasks, dict):
        if tasks.get("family") in FOLDER_FAMILIES:
            tasks.setdefault("folder", ".")
        change_data(tree, lambda _, path: str(folder / path))
    _change_names(tree, lambda name: plugins.absolute(name, folder))
    return _parse(tree, SuiteFile, source=str(file))


def read_toml(file: Path) -> dict[str, Any]:
    """The values of a TOML file. Raises :class:`~etude.errors.ConfigError`."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _parse(tree: Mapping[str, Any], whole: type[Whole], *, source: str) -> Whole:
    try:
        return whole.model_validate(_tuples(dict(tree)))
    except ValidationError as error:
        faults = "\n  ".join(_explain(whole, fault["loc"], fault["type"], fault["msg"], fault["input"])
                             for fault in error.errors())  # fmt: skip
        raise ConfigError(f"{source}:\n  {faults}") from error


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that :func:`load_recipe` reads back to an equal value."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def dump_run(config: RunConfig, folder: Path) -> str:
    """The resolved configuration as TOML for the folder of a run, which gets copies of the files that it names.

    Raises ``OSError`` for a file that cannot be copied.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    _change_names(tree, lambda name: plugins.keep(name, folder))
    change_data(tree, lambda _, path: in_run(path, folder))
    return tomli_w.dumps(tree)


def _change_names(tree: dict[str, Any], change: Callable[[str], str]) -> None:
    """Replace the names of classes and functions in a tree."""
    for *parents, key in NAMES:
        tables: list[Any] = [tree]
        for parent in parents:
            inner = [table.get(parent) for table in tables if isinstance(table, dict)]
            tables = [each for some in inner for each in (some if isinstance(some, list | tuple) else [some])]
        for table in (table for table in tables if isinstance(table, dict)):
            for each in [*table] if key == EVERY else [key]:
                if isinstance(table.get(each), str):
                    table[each] = change(table[each])


def _read_files(tree: dict[str, Any], recipe: Path) -> None:
    """Replace ``"@NAME"`` in every table of texts by the text, so that a run holds all that decides it."""
    for table in FILE_TABLES:
        _read_table(tree, table, recipe)


def _read_table(tree: dict[str, Any], table: tuple[str, ...], recipe: Path) -> None:
    files: Any = tree
    for name in table:
        files = files.get(name) if isinstance(files, dict) else None
    if not isinstance(files, dict):
        return  # absent, or refused later
    for name, text in files.items():
        if isinstance(text, str) and text.startswith("@"):
            try:
                files[name] = (recipe.parent / text[1:]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                key = ".".join((*table, name))
                raise ConfigError(f"{recipe}: {key} = {text!r} cannot be read: {error}") from error


def apply_override(
    tree: dict[str, Any], override: str, *, option: str = "--set", form: str = "section.key=value"
) -> None:
    """Apply ``section.key=value`` to a tree, which is changed; ``option`` and ``form`` are what errors say of it.

    Raises :class:`~etude.errors.ConfigError`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{option} {override!r}: expected {form}")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    try:
        set_key(tree, key.strip(), value)
    except ConfigError as error:
        raise ConfigError(f"{option} {override!r}: {error}") from None


def set_key(tree: dict[str, Any], key: str, value: object) -> None:
    """Set ``section.key`` of a tree, which is changed. Raises :class:`~etude.errors.ConfigError`."""
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{parent!r} is a value, not a section")
    node[leaf] = value


def _tuples(value: Any) -> Any:
    """TOML has arrays, frozen sections hold tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _explain(whole: type[Section], location: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in location)
    match kind:
        case "value_error":
            return message.removeprefix("Value error, ")
        case "extra_forbidden":
            parents, name = tuple(map(str, location[:-1])), str(location[-1])
            return f"unknown key {key!r}: {renamed(key) or suggestion(parents, name, whole)}"
        case "missing":
            return f"{key} is missing"
        case "tuple_type":
            return f"{key} = {value!r}: expected a list, such as [{json.dumps(value)}]"
        case _:
            return f"{key} = {value!r}: {message}"
