"""The keys of a recipe in words: what each takes, its default and its meaning, read off the sections themselves."""

import ast
import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue, PlainValidator
from pydantic.fields import FieldInfo

from etude.config.plugins import Registry
from etude.config.recipe import RunConfig
from etude.config.section import OptionsOf, Section

SCALARS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "nothing"}
BOUNDS = {
    "gt": "> {}",
    "ge": "≥ {}",
    "lt": "< {}",
    "le": "≤ {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
}


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe."""

    path: str
    """Path as ``--set`` names it: ``engine.max_length``; ``reward.parts[].name`` is one of each table of an array."""
    takes: str
    """Its type and bounds, in words."""
    default: str
    """Default as TOML spells it; empty where the key has to be there."""
    meaning: str
    """Its docstring."""


@dataclass(frozen=True)
class Table:
    """A section of a recipe, or the tables of an array."""

    title: str
    """``[engine]`` or ``[[reward.parts]]``; empty for the keys above all sections."""
    meaning: str
    keys: tuple[RecipeKey, ...]
    choices: tuple[str, ...] = ()
    """The families or kinds that have these options; empty for a table that every recipe has."""


def count_keys() -> tuple[int, int]:
    """The keys that every recipe has, and the options that single families and kinds bring along."""
    every = list(tables())
    return (
        sum(len(table.keys) for table in every if not table.choices),
        sum(len(table.keys) for table in every if table.choices),
    )


def options_of(field: FieldInfo) -> OptionsOf | None:
    """The rule of an option table; ``None`` for any other key."""
    rules = (each.func for each in field.metadata if isinstance(each, PlainValidator))
    return next((rule for rule in rules if isinstance(rule, OptionsOf)), None)


def tables() -> Iterator[Table]:
    """All there is in a recipe, in its order."""
    return _tables(RunConfig, (), in_array=False)


def find(word: str) -> list[Table]:
    """Find what a word stands for: a section, a key, a part of a key's name, or else of its meaning."""
    every, name = list(tables()), word.strip("[]").lower()
    section = [table for table in every if name and table.title.strip("[]").partition(".")[0] == name]
    if section:
        return section
    return (
        _only(every, lambda key: key.path == name)
        or _only(every, lambda key: name in key.path)
        or _only(every, lambda key: name in key.meaning.lower())
    )


def meanings_of(section: type[BaseModel]) -> dict[str, str]:
    """Key → its docstring, for those keys of a section and of its bases that have one.

    Read from the source when they are printed: pydantic would read them in every process, for a quarter of a second.
    """
    meanings: dict[str, str] = {}
    for base in reversed(section.__mro__):
        node = _classes(base.__module__).get(base.__name__) if issubclass(base, Section) else None
        for key, docstring in pairwise(node.body if node else ()):
            match key, docstring:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[name] = inspect.cleandoc(text)
    return meanings


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Name → source of each class of a module."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def suggestion(parents: tuple[str, ...], name: str, whole: type[BaseModel] = RunConfig) -> str:
    """Guess the key that was meant by an unknown one: one like it there, or the same one of another section."""
    names = _names(parents, whole)
    near = [".".join((*parents, key)) for key in difflib.get_close_matches(name, names, n=1)]
    elsewhere = [f"{section}.{name}" for section in whole.model_fields if name in _names((section,), whole)]
    if meant := near or elsewhere:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    return f"{'.'.join(parents) or ('a recipe' if whole is RunConfig else 'a fleet')} has {', '.join(names)}"


def _only(every: Iterable[Table], is_match: Callable[[RecipeKey], bool]) -> list[Table]:
    """The tables with matching keys, with these keys alone."""
    matching = (replace(table, keys=tuple(filter(is_match, table.keys))) for table in every)
    return [table for table in matching if table.keys]


def _tables(section: type[BaseModel], path: tuple[str, ...], *, in_array: bool) -> Iterator[Table]:
    """A section and those within it."""
    name, within = ".".join(path), {name: _section_of(field) for name, field in section.model_fields.items()}
    title = f"[[{name}]]" if in_array else f"[{name}]"
    prefix = f"{name}[]." if in_array else f"{name}."
    meanings = meanings_of(section)
    keys = [
        _key(prefix.lstrip("."), name, section.model_fields[name], meanings.get(name, ""))
        for name, inner in within.items()
        if not inner
    ]
    yield Table(title if path else "", _meaning(section), tuple(keys))
    for name, inner in within.items():
        field = section.model_fields[name]
        if rule := options_of(field):
            for options in dict.fromkeys(rule.classes.values()):
                choices = [choice for choice, its in rule.classes.items() if its is options]
                chosen = f"With `{rule.section}.{rule.key}` = {_any_of(map(json.dumps, choices))}. "
                for table in _tables(options, (*path, name), in_array=False):
                    yield replace(table, meaning=chosen + table.meaning, choices=tuple(choices))
        elif inner:
            yield from _tables(inner, (*path, name), in_array=field.annotation is not inner)


def _key(prefix: str, name: str, field: FieldInfo, meaning: str) -> RecipeKey:
    bounds = [
        phrase.format(limit)
        for constraint in field.metadata
        for bound, phrase in BOUNDS.items()
        if (limit := getattr(constraint, bound, None)) is not None
    ]
    kind = _registered(field.metadata) or _type(field.annotation)
    takes = ", ".join([kind, *bounds])
    value = field.get_default(call_default_factory=True, validated_data={})
    default = "" if field.is_required() else json.dumps(value, ensure_ascii=False)
    return RecipeKey(prefix + name, takes, default, _plain(meaning))


def _registered(rules: Iterable[object]) -> str | None:
    """The names of a key that takes any of a registry, in words; ``None`` for any other key."""
    functions = (getattr(rule, "func", None) for rule in rules)
    names = next((function for function in functions if isinstance(function, Registry)), None)
    return None if names is None else _any_of([*map(json.dumps, names.builtins), "another's name"])


def _type(annotation: Any) -> str:
    """A type in words that a writer of TOML knows."""
    if annotation is JsonValue:
        return "any value"
    if get_origin(annotation) is Annotated:
        plain, *rules = get_args(annotation)
        names = _registered(rules)
        return _type(plain) if names is None else names
    if get_origin(annotation) is None and annotation in SCALARS:
        return SCALARS[annotation]
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return _any_of(map(json.dumps, inner))
    if kind in (Union, UnionType):
        return _any_of(map(_type, inner))
    if kind is dict:
        return f"a table, each entry {_type(inner[1])}"
    if kind is tuple:
        return f"a list, each {_type(inner[0])}" if inner[-1] is ... else f"[{', '.join(map(_type, inner))}]"
    raise TypeError(f"a key takes {annotation!r}, which has no words yet")


def _any_of(choices: Iterable[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _meaning(section: type[BaseModel]) -> str:
    """The docstring of a section, without its name in front."""
    text = re.sub(r"^``\[+[a-z_.]+\]+``: ", "", inspect.getdoc(section) or "")
    return _plain(text[:1].upper() + text[1:])


def _plain(text: str) -> str:
    """A docstring as Markdown spells it, which a terminal can be shown, too."""
    return re.sub(r":[a-z]+:`~?", "`", text).replace("``", "`")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key is, or that the tables of its array are; ``None`` for any other key."""
    kind = next(iter(get_args(field.annotation)), field.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _names(parents: tuple[str, ...], whole: type[BaseModel]) -> list[str]:
    """The keys of a section; none of what is no section."""
    section = whole
    for parent in parents:
        if parent not in section.model_fields:  # a number: the place in an array of tables, which are all of one kind
            continue
        inner = _section_of(section.model_fields[parent])
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)
